"""Which prompts a store of answers has been given, so that none is answered twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SUFFIX = ".answered"


class Answered:
    """The prompts whose answers are in a store, by their hashes, in a file beside it.

    about: what an answer depends on beside its prompt. A hash is written once the answer is, so
    that after a kill some may be answered again, and none is missing.
    """

    def __init__(self, store: Path, about: dict[str, Any], *, new: bool) -> None:
        self.path = store.with_name(store.name + SUFFIX)
        self.skipped = 0
        self._about = json.dumps(about, sort_keys=True)
        if new:
            self.path.unlink(missing_ok=True)
        self._known = set(self.path.read_text().split()) if self.path.is_file() else set[str]()
        self._open: list[str] = []

    def left(self, prompts: Iterable[Any]) -> Iterator[Any]:
        """Yield the prompts that were not answered yet, each once."""
        for prompt in prompts:
            mark = self._mark(prompt)
            if mark in self._known:
                self.skipped += 1
                continue
            self._known.add(mark)
            self._open.append(mark)
            yield prompt

    def sealed(self, count: int) -> None:
        """Note that the answers to the first `count` prompts that are open are in the store."""
        done, self._open = self._open[:count], self._open[count:]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{mark}\n" for mark in done)

    def _mark(self, prompt: Any) -> str:
        text = self._about + json.dumps(prompt, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
