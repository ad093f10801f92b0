"""What the scripts of heads read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support import tiny


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Return a folder with permissive and other texts, and a tiny chat model."""
    model = tmp_path / "model"
    tiny.model(max_position_embeddings=1 << 14).save_pretrained(model)
    tiny.tokenizer(chat=True).save_pretrained(model)
    lm = tmp_path / "shared" / "data" / "lm"
    lm.mkdir(parents=True)
    paragraph = tiny.TEXT.split("\n\n")[0]
    whole = "Drafting\n\n" + "\n\n".join([paragraph] * 40)
    rows = [
        {"id": "1", "kind": "docs", "doc": "Drafting", "license": "PSF-2.0", "text": whole},
        {"id": "2", "kind": "docs", "doc": "Other", "license": "CC-BY-SA-4.0", "text": "z" * 9000},
    ]
    with gzip.open(lm / "train.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return tmp_path / "shared", model
