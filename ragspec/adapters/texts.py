"""Texts of a host whose rows carry no ids: each is found again by what it says.

Rows may change places, stop for a while and come back, and several may say the same: then any of
the sessions that know this text will do. Those that no row asks for are kept within limits, the
longest unasked go first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ragspec.adapters.host_text import HostText

_TAIL = 16  # last tokens by which candidates are found; the whole text decides

Key = tuple[int, bytes]


class TextsByWords:
    """The sessions of a host's texts.

    opening: makes the session of a text that none knows, from its tokens [T]. idle, idle_tokens:
    how many texts that the last call did not ask for are kept, and their tokens in sum.
    """

    def __init__(
        self, opening: Callable[[NDArray[np.int64]], HostText], idle: int, idle_tokens: int
    ) -> None:
        self._opening = opening
        self._idle = idle
        self._idle_tokens = idle_tokens
        self._selection: dict[int, HostText] = {}  # by number, the longest unasked first
        self._matches: dict[Key, list[int]] = {}
        self._next = 0
        self.opened = 0

    def __len__(self) -> int:
        return len(self._selection)

    def take(self, text: NDArray[np.int64]) -> HostText:
        """Return the session that knows exactly this text [T], and let go of it; or a new one."""
        key = _key(text)
        for number in self._matches.get(key, ()):
            known = self._selection[number]
            if np.array_equal(known.ids, text):
                self._forget(number, key)
                return known
        self.opened += 1
        return self._opening(text)

    def keep(self, texts: list[HostText]) -> None:
        """Keep the sessions of one call; of the others those that fit the limits, latest first."""
        idle = sum(map(len, self._selection.values()))
        for number in list(self._selection):
            if len(self._selection) <= self._idle and idle <= self._idle_tokens:
                break
            known = self._selection[number]
            idle -= len(known)
            self._forget(number, _key(known.ids))
        for text in texts:
            self._selection[self._next] = text
            self._matches.setdefault(_key(text.ids), []).append(self._next)
            self._next += 1

    def _forget(self, number: int, key: Key) -> None:
        del self._selection[number]
        places = self._matches[key]
        places.remove(number)
        if not places:
            del self._matches[key]


def _key(text: NDArray[np.int64]) -> Key:
    return len(text), text[-_TAIL:].tobytes()
