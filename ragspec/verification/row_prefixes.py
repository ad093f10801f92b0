"""Prefix caching between the rows of a session: which rows are taken, and the tokens of each.

The keys of a freed row stay in place until the row is taken again. If a new sequence has a common
prefix with a freed or active row, the keys of that prefix are copied instead of computed. vLLM
(arXiv 2309.06180) and SGLang (2312.07104) cache prefixes too; here all rows are compared, since
there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ragspec.errors import InputError


class Place(NamedTuple):
    """The row of a new sequence, and the source row of its first `known` tokens."""

    row: int
    source: int
    known: int


@dataclass(slots=True)
class _Held:
    """The committed tokens of one row.

    Attributes:
        left: The number of the `leave` that freed the row, 0 if it never was taken.
        dropped: Whether the memory of the row was freed.
    """

    tokens: list[int] = field(default_factory=list)
    scope: str = ""
    taken: bool = False
    left: int = 0
    dropped: bool = False


class RowPrefixes:
    """Assigns `count` rows to sequences and finds common prefixes between them."""

    def __init__(self, count: int) -> None:
        self._rows = [_Held() for _ in range(count)]
        self._leaves = 0

    def join(self, tokens: Sequence[int], scope: str) -> Place:
        """Take a free row for a sequence of these tokens, the one freed longest ago.

        Empty rows come before those, and rows without memory after them. Only prefixes of the same
        scope are shared.

        Raises:
            InputError: No row is free.
        """
        free = [row for row, held in enumerate(self._rows) if not held.taken]
        if not free:
            raise InputError(
                f"got a text for {len(self._rows)} rows that are all taken; expected a free one. "
                "Let a row leave first."
            )
        tokens = list(tokens)
        row = min(free, key=lambda each: _gain(self._rows[each]))
        prefix, source = max(
            (_common(held.tokens, tokens) if held.scope == scope else 0, -number)
            for number, held in enumerate(self._rows)
        )
        self._rows[row] = _Held(tokens[:prefix], scope, True)
        return Place(row, -source if prefix else row, prefix)

    def fork(self, row: int) -> Place:
        """Take a free row for a copy of this sequence.

        Raises:
            InputError: No row is free.
        """
        held = self._rows[row]
        place = self.join((), held.scope)
        self._rows[place.row].tokens = list(held.tokens)
        return Place(place.row, row, len(held.tokens))

    def leave(self, row: int) -> bool:
        """Free a row but remember its tokens. Return whether it was taken."""
        held = self._rows[row]
        if held.taken:
            self._leaves += 1
            held.taken, held.left = False, self._leaves
            return True
        return False

    def free(self) -> list[int]:
        """Forget the tokens of all free rows with memory; return these rows."""
        rows = [row for row, held in enumerate(self._rows) if not (held.taken or held.dropped)]
        for row in rows:
            self.free_again(row)
        return rows

    def free_again(self, row: int) -> None:
        """Free a row without memory, for example because it could not be allocated."""
        self._rows[row] = _Held(dropped=True)

    def grow(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that were committed to a row, if it is taken."""
        if self._rows[row].taken:
            self._rows[row].tokens.extend(tokens)

    def forget(self, row: int) -> None:
        """Forget the tokens of a row, whose keys were discarded."""
        self._rows[row].tokens = []


def _gain(held: _Held) -> tuple[bool, bool, int]:
    """Return the sort key of free rows: empty ones first, those without memory last."""
    return held.dropped, bool(held.tokens), held.left


def _common(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(i for i in range(most) if first[i] != second[i])
