"""Rows of a session that are objects of their own, which share nothing of what they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ragspec.verification.row_texts import RowTexts

T = TypeVar("T")


class ListedRows(Generic[T]):
    """The part of a `TargetSession` in which rows join, leave and line up.

    rows: R. make: makes an empty row. copy: copies one, as of the last commit.
    """

    def __init__(self, rows: int, make: Callable[[], T], copy: Callable[[T], T]) -> None:
        self._make, self._copy = make, copy
        self._all = [make() for _ in range(rows)]
        self._line = list(range(rows))
        self._taken = RowTexts(rows)

    @property
    def active_rows(self) -> list[T]:
        """The rows in line."""
        return [self._all[row] for row in self._line]

    def join(self, tokens: Sequence[int], scope: str = "") -> tuple[int, int]:
        """Take a free row for a text, of which it holds nothing; see `TargetSession.join`."""
        row = self._taken.join((), scope).row
        self._all[row] = self._make()
        return row, 0

    def fork(self, row: int) -> int:
        """Take a free row that holds what this one does; see `TargetSession.fork`."""
        other = self._taken.fork(row).row
        self._all[other] = self._copy(self._all[row])
        return other

    def leave(self, row: int) -> None:
        """Give a row back, and its memory; see `TargetSession.leave`."""
        self._taken.leave(row)
        self._all[row] = self._make()

    def line_up(self, rows: Sequence[int]) -> list[int]:
        """Let the next forwards cover these rows; see `TargetSession.line_up`."""
        self._line = list(rows)
        return self._line

    def abandon(self) -> list[int]:
        """Forget what was not committed, which no row holds; see `TargetSession.abandon`."""
        return []

    def shrink(self) -> None:
        """Nothing to do: rows that were left hold no memory."""
