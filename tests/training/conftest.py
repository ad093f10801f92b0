"""Input files for the scripts of heads and of image models."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Return a folder with permissive and other texts, and a tiny chat model."""
    model = tmp_path / "model"
    tiny.save(model, chat=True, max_position_embeddings=1 << 14)
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


@pytest.fixture
def built_up(tmp_path: Path) -> Path:
    """Write two sets of rectangles in the layout of the real ones; returns the shared folder."""
    folder = tmp_path / "data" / "images"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for kind, count, draft_state in (("emoji", 24, 255), ("tiles", 40, 0)):
        images = np.full((count, 32, 32, 3), draft_state, dtype=np.uint8)
        for image in images:
            top, left = rng.integers(4, 14, 2)
            image[top : top + 14, left : left + 14] = rng.integers(40, 220, 3)
        names = np.array([f"{'red' if n % 2 else 'blue'} square {n}" for n in range(count)])
        fields: dict[str, Any] = {"images": images, "names": names}
        if kind == "emoji":
            fields["is_tone_variant"] = np.arange(count) % 4 == 3
            fields["subgroup"] = (np.arange(count) % 2).astype(np.uint8)
            fields["subgroup_names"] = np.array(["cold-shape", "warm-shape"])
        else:
            fields["label"] = (np.arange(count) % 32).astype(np.uint8)
            fields["class_names"] = np.array([f"class {n}" for n in range(32)])
        np.savez(folder / f"{kind}32.npz", **fields)
    return tmp_path
