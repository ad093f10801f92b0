"""Keys and values of beginnings that many prompts share, within a limit of memory.

A passage that stands first in a prompt has the same keys and values whatever follows it, so a
prompt over a passage that was met before is read from its end on (RAGCache, arXiv 2404.12457, keeps
a tree of them; here a beginning is one passage, as prompts have one).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ragspec.errors import InputError
from ragspec.target.base import Beginning

MOST_BYTES = 256 << 20


class PrefixCache:
    """Beginnings of prompts by their tokens, of one model at a time.

    most_bytes: of keys and values in all; the longest unused leave first. Several threads may use
    it.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        if most_bytes < 0:
            raise InputError(f"most_bytes is {most_bytes}; expected 0 or more.")
        self.most_bytes = most_bytes
        self.bytes = 0
        self._known: OrderedDict[tuple[int, ...], Beginning] = OrderedDict()
        self._target: Any = None
        self._using = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, target: Any, tokens: Sequence[int]) -> Beginning | None:
        """Return what is kept of exactly these tokens, read by this target."""
        with self._using:
            self._serve(target)
            found = self._known.get(tuple(tokens))
            if found is not None:
                self._known.move_to_end(tuple(tokens))
            return found

    def keep(self, target: Any, tokens: Sequence[int], beginning: Beginning) -> None:
        """Keep a beginning, and as many others as there is room for."""
        size = sum(part.nbytes for pair in beginning for part in pair)
        if size > self.most_bytes:
            return
        with self._using:
            self._serve(target)
            self._forget(tuple(tokens))
            self._known[tuple(tokens)] = beginning
            self.bytes += size
            while self.bytes > self.most_bytes:
                self._forget(next(iter(self._known)))

    def _forget(self, tokens: tuple[int, ...]) -> None:
        for pair in self._known.pop(tokens, ()):
            self.bytes -= sum(part.nbytes for part in pair)

    def _serve(self, target: Any) -> None:
        """Drop what is of another target."""
        if target is not self._target:
            self._known.clear()
            self._target, self.bytes = target, 0
