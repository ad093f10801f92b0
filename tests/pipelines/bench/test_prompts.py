"""What a benchmark runs on: our rows, Spec-Bench rows, free text, and files that are neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import DocumentError
from ragspec.pipelines.bench.measure import by_category
from ragspec.pipelines.bench.prompts import (
    FIXED_NEW_TOKENS,
    BenchItem,
    free_items,
    read_items,
)
from tests.support import tiny

OURS = {"id": "a1", "category": "qa", "prompt": "who is it?"}
SPEC_BENCH = {
    "question_id": 81,
    "category": "writing",
    "turns": ["first turn", "second turn"],
    "reference": ["x"],
}


def read(folder: Path, *rows: Any, room: int | None = None) -> list[BenchItem]:
    path = folder / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_items(path, tiny.tokenizer(), room)


def test_rows_of_both_forms(tmp_path: Path) -> None:
    first, second = read(tmp_path, OURS, "", SPEC_BENCH)
    assert (first.id, first.category) == ("a1", "qa")
    assert first.prompt == tuple(tiny.tokenizer()("who is it?")["input_ids"])
    assert (second.id, second.category) == ("81", "chat")
    assert second.prompt == tuple(tiny.tokenizer()("first turn")["input_ids"])
    assert second.extra == SPEC_BENCH
    assert first.fixed
    assert first.new_tokens == FIXED_NEW_TOKENS


def test_the_categories_of_spec_bench_are_pooled_and_ours_are_not(tmp_path: Path) -> None:
    rows = [{**SPEC_BENCH, "question_id": i, "category": name} for i, name in enumerate(
        ("math", "math_reasoning", "rag", "coding")
    )]  # fmt: skip
    result = read(tmp_path, *rows, {**OURS, "category": "math"}, {**OURS, "category": "coding"})
    assert [item.category for item in result] == ["chat", "math", "rag", "chat", "math", "coding"]


def test_a_line_break_inside_a_text_is_no_new_row(tmp_path: Path) -> None:
    """U+2028 stands unescaped in many a data file; it ends no line of JSON."""
    row = json.dumps({**OURS, "prompt": "one\u2028two"}, ensure_ascii=False)
    assert len(read(tmp_path, row)) == 1


def test_long_prompts_keep_their_end(tmp_path: Path) -> None:
    (item,) = read(tmp_path, {**OURS, "prompt": "x" * 50 + "the end"}, room=FIXED_NEW_TOKENS + 7)
    assert item.prompt == tuple(tiny.tokenizer()("the end")["input_ids"])


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "5",
        "[1]",
        "null",
        '"prompt"',
        {"id": 1, "prompt": "no category"},
        {"id": 1, "category": "qa"},
        {"id": 1, "category": "qa", "prompt": ""},
        {"id": 1, "category": "qa", "prompt": 5},
        {"id": 1, "category": "qa", "prompt": None},
        {"id": 1, "category": "qa", "turns": []},
        {"id": 1, "category": "qa", "turns": "a text"},
        {"id": 1, "category": "qa", "turns": [["nested"]]},
        OURS,
    ],
    ids=str,
)
def test_a_line_that_cannot_be_read_is_named(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"data\.jsonl, line 2"):
        read(tmp_path, OURS, bad)


def test_files_without_rows(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="holds no prompts"):
        read(tmp_path)
    with pytest.raises(DocumentError, match="cannot be read"):
        read_items(tmp_path / "missing.jsonl", tiny.tokenizer(), None)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DocumentError, match="cannot be read"):
        read_items(tmp_path / "bytes.jsonl", tiny.tokenizer(), None)


def test_free_text_goes_on_from_the_first_tokens() -> None:
    texts = [("long", "abc" * 40), ("short", "abc")]
    (item,) = free_items(tiny.tokenizer(), texts, length=10)
    assert item.id == "long"
    assert item.prompt == tuple(tiny.tokenizer()("abcabcabca")["input_ids"])
    assert item.fixed


def test_groups_in_the_order_of_appearance() -> None:
    items = [BenchItem(str(i), category, (1,), 4) for i, category in enumerate("babca")]
    groups = by_category(items)
    assert list(groups) == ["b", "a", "c"]
    assert [item.id for item in groups["a"]] == ["1", "4"]
