"""Verification of chains over the model's own cache: the fallback of recurrent hybrids."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragspec.needs import Capabilities
from ragspec.trees.draft_tree import DraftTree
from ragspec.types import Cache, PreTrainedModel
from ragspec.verification.base import Pending, TargetSession
from ragspec.verification.causal import CausalTarget

LAG = 16  # more replayed tokens than this take a forward of their own


class PathTarget(CausalTarget):
    """A causal model that verifies chains, not trees."""

    capabilities = Capabilities(hidden_states=False, owner="a model that verifies chains alone")
    chains = True

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__(model)
        self.divisible = False  # recurrent layers do not keep their states within a prompt
        self._timed: tuple[int, PathSession] | None = None

    def open(self, rows: int = 0, *_: object, **__: object) -> "PathSession":  # type: ignore[override]
        """Return a session of R empty rows; the model's own cache needs no capacity."""
        return PathSession(self, rows)

    def time_forward(self, n: int, length: int) -> float:
        """Return the seconds of one forward over n positions after `length` cached ones."""
        if self._timed is None or self._timed[0] != length:
            session = self.open(1, length)
            session.verify([[0] * length], [DraftTree.empty()])
            session.commit([()])
            self._timed = length, session
        session = self._timed[1]
        [row] = session.select_rows([session.fork(0)])
        tree = DraftTree.chain([0] * (n - 1), "timing")
        self.synchronize()
        start = time.perf_counter()
        session.verify([[0]], [tree])
        self.synchronize()
        seconds = time.perf_counter() - start
        session.leave(row)
        return seconds


@dataclass(slots=True)
class _Row:
    """One sequence with the model's own cache.

    Attributes:
        tokens: The committed tokens. Those that the cache lacks are in the next forward.
        cache, before: The cache, and its copy before the last forward.
        length: Tokens in the cache.
        head, draft: The tokens of the last forward.
    """

    tokens: list[int] = field(default_factory=list)
    cache: Any = None
    length: int = 0
    before: Any = None
    head: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Drop the cache."""
        self.cache, self.length = None, 0


class PathSession(TargetSession):
    """Verifies the most likely path of each draft over the model's own cache."""

    _rows: dict[int, _Row]

    def new_row(self) -> _Row:
        """Return an empty row."""
        return _Row()

    def copy_row(self, row: int) -> _Row:
        """Return an independent copy of a row, as of the last commit."""
        held = self._rows[row]
        return _Row(list(held.tokens), snapshot(held.cache), held.length)

    def discard_uncommitted(self) -> None:
        """Drop the caches, whose states cannot be rolled back; see `TargetSession`."""
        for row in self.active_rows:
            row.clear()

    def verify(self, pending: Pending, trees: Sequence[DraftTree]) -> list[Tensor]:
        """Run one forward per row; see `TargetSession.verify`."""
        rows = zip(self.active_rows, pending, trees, strict=True)
        return [self._verify(row, list(tokens), tree) for row, tokens, tree in rows]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep pending tokens and accepted nodes; see `TargetSession.commit`."""
        for row, path in zip(self.active_rows, paths, strict=True):
            beyond = len(row.draft) - len(path)
            start = row.length - len(row.head) - len(row.draft)
            row.tokens[start:] = [*row.head, *row.draft[: len(path)]]
            if beyond and not _croppable(row.cache):
                row.cache, row.length = row.before, start
            elif beyond:
                row.cache.crop(-beyond)
                row.length -= beyond
            row.before, row.draft = None, []

    def _verify(self, row: _Row, pending: list[int], tree: DraftTree) -> Tensor:
        """Return the logits of the root and the nodes: [N + 1, V]."""
        border = self.target.border
        crosses = border is not None and 0 <= border - len(row.tokens) < len(pending)
        replay = row.tokens[row.length :]
        if replay and row.length and (len(replay) > LAG or crosses):
            self._forward(row, replay, 1)
            replay = []
        row.head, row.draft = [*replay, *pending], tree.tokens.tolist()
        row.before = snapshot(row.cache) if row.draft else None
        return self._forward(row, [*row.head, *row.draft], len(row.draft) + 1)

    def _forward(self, row: _Row, tokens: list[int], keep: int) -> Tensor:
        """Feed tokens to the row's cache; return the last logits [keep, V]."""
        target, end = self.target, row.length + len(tokens)
        target.check_mode()
        moved = torch.tensor([tokens, range(row.length, end)], device=target.device)
        cache = {target.cache_argument: row.cache, "use_cache": True}
        output = target.call(moved[:1], moved[1:], keep, **cache)
        row.cache, row.length = getattr(output, target.cache_argument), end
        logits: Tensor = output.logits[0, -keep:]
        return logits


def snapshot(cache: "Cache | None") -> "Cache | None":
    """Return a copy of a transformers cache that later forwards do not change.

    Keys and values are shared: dynamic layers replace them by longer ones and never write into
    them. Recurrent and convolution states are written in place, so they are copied.
    """
    if cache is None:
        return None
    twin = _copied(cache)
    twin.layers = [_copied(layer) for layer in cache.layers]
    return twin


def _copied(thing: "Cache") -> "Cache":
    """Return a shallow copy with cloned tensors in lists and dictionaries."""
    twin = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, dict):
            setattr(twin, name, {k: _cloned(v) for k, v in value.items()})
        elif isinstance(value, list):
            setattr(twin, name, [_cloned(v) for v in value])
    return twin


def _cloned(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _croppable(cache: "Cache") -> bool:
    """Return whether the last slots of every layer can be dropped.

    Sliding layers have already dropped the slots before their window, which a shorter text needs.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return type(cache) is DynamicCache and all(type(each) is DynamicLayer for each in cache.layers)
