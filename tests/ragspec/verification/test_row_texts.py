"""Who gets which row, and whose beginning it shares."""

from __future__ import annotations

import pytest

from ragspec.errors import InputError
from ragspec.verification.row_texts import RowTexts


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def left(*texts: tuple[str, str]) -> RowTexts:
    """Return rows, one more than the texts, that held these texts of a scope and were left."""
    rows = RowTexts(len(texts) + 1)
    for text, scope in texts:
        row, _, known = rows.join(ids(text), scope)
        rows.grow(row, ids(text)[known:])
        rows.leave(row)
    return rows


def test_the_longest_common_beginning_is_detected_in_the_same_scope_alone() -> None:
    rows = left(("abcdef", "one"), ("abx", "two"), ("abcd", "two"))
    assert rows.join(ids("abcdef"), "two")[1:] == (2, 4)
    assert rows.join(ids("abcdef"), "three").known == 0


def test_empty_rows_are_taken_first_and_then_those_left_longest_ago() -> None:
    rows = left(("a", ""), ("b", ""), ("c", ""))
    assert [rows.join([], "").row for _ in range(4)] == [3, 0, 1, 2]
    with pytest.raises(InputError, match="all taken"):
        rows.join([], "")


def test_a_row_that_is_being_written_shares_its_beginning_too() -> None:
    rows = RowTexts(2)
    first = rows.join([1, 2, 3], "").row
    rows.grow(first, [1, 2, 3, 4])
    assert rows.join([1, 2, 3, 9], "") == (1, first, 3)


def test_a_text_may_go_on_in_its_its_row() -> None:
    rows = RowTexts(1)
    rows.grow(rows.join([1, 2], "").row, [1, 2, 3])
    rows.leave(0)
    assert rows.join([1, 2, 7], "") == (0, 0, 2)
    rows.grow(0, [7])
    rows.leave(0)
    assert rows.join([1, 2, 3], "").known == 2, "it holds another text now"


def test_what_was_forgotten_serves_nobody() -> None:
    rows = RowTexts(2)
    rows.grow(rows.join([1, 2], "").row, [1, 2])
    rows.forget(0)
    assert rows.join([1, 2], "").known == 0


def test_memory_that_was_passed_up_is_taken_last() -> None:
    rows = left(("a", ""), ("b", ""))
    assert rows.free() == [0, 1, 2] and rows.free() == []
    first = rows.join([1], "").row
    rows.grow(first, [1])
    rows.leave(first)
    assert rows.join([2], "") == (first, first, 0), "rather than a row that takes new memory"
    assert rows.join([2], "").row != first
