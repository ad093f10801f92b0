"""Which rows of a session are taken, and what is known of the text that each holds.

The keys of a row that was left stay where they are until the row is wanted again. A text that
begins like one of them, or like a row that is still being written, need not be read from its start:
the keys of its beginning are copied (as in vLLM's prefix caching, arXiv 2309.06180, and SGLang's,
2312.07104; here whole rows are looked through, since there are few).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ragspec.errors import InputError


class Place(NamedTuple):
    """Where a text joins: its row, and of which row the first `known` tokens are its own, too."""

    row: int
    source: int
    known: int


@dataclass(slots=True)
class _Held:
    """The text of one row. tokens: committed ones. left: when it was left, counted; 0: never.

    dropped: its memory was given up.
    """

    tokens: list[int] = field(default_factory=list)
    scope: str = ""
    taken: bool = False
    left: int = 0
    dropped: bool = False


class RowPrefixes:
    """The texts of `count` rows: who joins gets one, and who leaves gives it back."""

    def __init__(self, count: int) -> None:
        self._rows = [_Held() for _ in range(count)]
        self._leaves = 0

    def join(self, tokens: Sequence[int], scope: str) -> Place:
        """Take a free row for a text that begins with these tokens, that left longest ago first.

        Rows that would take new memory are the last choice. Texts of another scope are not looked
        at. Raises InputError where no row is free.
        """
        free = [row for row, held in enumerate(self._rows) if not held.taken]
        if not free:
            raise InputError(
                f"got a text for {len(self._rows)} rows that are all taken; expected a free one. "
                "Let a row leave first."
            )
        tokens = list(tokens)
        row = min(free, key=lambda each: _gain(self._rows[each]))
        alike = [
            (_common(held.tokens, tokens) if held.scope == scope else 0, -number)
            for number, held in enumerate(self._rows)
        ]
        known, source = max(alike)
        self._rows[row] = _Held(tokens[:known], scope, True)
        return Place(row, -source if known else row, known)

    def fork(self, row: int) -> Place:
        """Take a free row for a text that goes on like this one; raises InputError for none."""
        held = self._rows[row]
        place = self.join((), held.scope)
        self._rows[place.row].tokens = list(held.tokens)
        return Place(place.row, row, len(held.tokens))

    def leave(self, row: int) -> bool:
        """Give a row back, of which what it holds stays known; tell whether it had been joined."""
        held = self._rows[row]
        if held.taken:
            self._leaves += 1
            held.taken, held.left = False, self._leaves
            return True
        return False

    def free(self) -> list[int]:
        """Forget the texts of all rows that nobody has and that have memory; return these rows."""
        results = [row for row, held in enumerate(self._rows) if not (held.taken or held.dropped)]
        for row in results:
            self._rows[row] = _Held(dropped=True)
        return results

    def free_again(self, row: int) -> None:
        """Give a row back that could not be had."""
        self._rows[row] = _Held(dropped=True)

    def grow(self, row: int, tokens: Sequence[int]) -> None:
        """Note tokens that were committed to a row that was joined."""
        if self._rows[row].taken:
            self._rows[row].tokens.extend(tokens)

    def forget(self, row: int) -> None:
        """Note that nothing is left of a row's text."""
        self._rows[row].tokens = []


def _gain(held: _Held) -> tuple[bool, bool, int]:
    """Return what orders free rows: those first of which nobody else has any use."""
    return held.dropped, bool(held.tokens), held.left


def _common(first: list[int], second: list[int]) -> int:
    """Return how many tokens two texts begin with alike."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(i for i in range(most) if first[i] != second[i])
