"""The gate of the starter text models: its prompts, and how it judges what was written."""

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_text import SENTENCES

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")
LINES = [SENTENCES[number] for number in (0, 1, 3)]


def item(evidence: str) -> Any:
    gate = module("text_gate")
    passages = [" ".join(LINES[:2]), " ".join(LINES[2:])]
    text = "\n\n".join(passages)
    return gate.Item("x", "", passages, text, evidence, ["Dutch engineers"], "Who built it?")


def test_the_gate_judges_quotes() -> None:
    judge = module("text_gate").judge
    good = judge(item(LINES[0]), f" [1] {LINES[0]}\nAnswer: Dutch engineers", True)
    assert all(good[key] for key in ("verbatim", "overlap", "ended", "answer", "label"))
    wrong = judge(item(LINES[0]), f" [1] {LINES[2]}\nAnswer: peat", False)
    assert wrong["verbatim"]
    assert not any(wrong[key] for key in ("overlap", "ended", "answer", "label"))
    built_up = judge(item(LINES[0]), " [1] The harbour of Almen was built by French hands", True)
    assert not built_up["verbatim"] and not built_up["overlap"]
    assert not judge(item(LINES[0]), " [1] The harbour of Almen\nAnswer: it", True)["verbatim"]


def test_the_gate_takes_the_shared_records_of_valid_documents(tmp_path: Path) -> None:
    context = "Context:\n[1] Almen\nIt is a harbour.\n\n[2] Peat\nPeat burns well."
    request = "\n\nQuestion: What burns?\nEvidence: [2] Peat burns well.\nAnswer: Peat"
    records = [
        {"id": "r1", "kind": "qa", "text": context + request},
        {
            "id": "r2",
            "kind": "qa",
            "text": (context + request).replace("[2] Peat\n", "[2] Other\n"),
        },
        {"id": "r3", "kind": "docs", "text": context + request},
    ]
    titles = [{"title": "Peat", "split": "valid"}, {"title": "Other", "split": "train"}]
    for name, lines in (("docqa/documents", titles), ("lm/valid", records)):
        path = tmp_path / "data" / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    (result,) = module("text_gate").read_records(tmp_path, "valid")
    assert result.name == "r1" and result.evidence == "Peat burns well."
    assert result.prompt == context + "\n\nQuestion: What burns?\nEvidence:"
    assert result.passages == ["It is a harbour.", "Peat burns well."]
    assert result.answers == ["Peat"]
