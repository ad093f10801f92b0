"""Rows of a session that are objects of their own, which share nothing of what they read."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_paths, limit_depth
from ragspec.verification.causal import CausalTarget, TreeSession
from ragspec.verification.row_prefixes import RowPrefixes

T = TypeVar("T")


class ListedRows(Generic[T]):
    """The part of a `TargetSession` in which rows join, leave and line up.

    rows: R. make: makes an empty row. copy: copies one, as of the last commit.
    """

    def __init__(self, rows: int, make: Callable[[], T], copy: Callable[[T], T]) -> None:
        self._make, self._copy = make, copy
        self._all = [make() for _ in range(rows)]
        self._line = list(range(rows))
        self._taken = RowPrefixes(rows)

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


LAG = 16  # replayed tokens beyond this are settled by a forward of their own


class PathTarget(CausalTarget):
    """A causal model that verifies chains, not trees."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._timed: tuple[int, PathSession] | None = None

    @property
    def divisible(self) -> bool:
        """Never: recurrent layers read a prompt at once, and what they knew halfway is gone."""
        return False

    def open(self, rows: int, capacity: int) -> PathSession:  # type: ignore[override]
        """Return an empty session of R rows; the model's own cache needs no capacity."""
        return PathSession(self, rows)

    def time_forward(self, n: int, length: int) -> float:
        """Return the seconds of one forward over n positions after `length` cached ones."""
        if self._timed is None or self._timed[0] != length:
            prepared = self.open(1, length)
            prepared.verify([[0] * length], [DraftTree.empty()])
            prepared.commit([()])
            self._timed = (length, prepared)
        session = self._timed[1].copied()
        tree = DraftTree.chain([0] * (n - 1), "timing")
        self.synchronize()
        start = time.perf_counter()
        session.verify([[0]], [tree])
        self.synchronize()
        return time.perf_counter() - start


class OneTreeTarget(CausalTarget):
    """A causal model that verifies trees in sessions of one row, else chains over its own cache.

    Its rotary table changes with the length (longrope).
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._beyond = PathTarget(model)

    def open(self, rows: int, capacity: int) -> TreeSession | PathSession:  # type: ignore[override]
        """Return an empty session of R rows, fit for `capacity` slots."""
        return super().open(rows, capacity) if rows == 1 else self._beyond.open(rows, capacity)


@dataclass(slots=True)
class _Row:
    """One text: the model's cache, what it was before the last forward, and what it lacks.

    length: tokens in the cache. replay: committed tokens that the cache has not seen. head, draft:
    the tokens of the last forward.
    """

    cache: Any = None
    length: int = 0
    before: Any = None
    replay: list[int] = field(default_factory=list)
    head: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)

    def fork(self) -> _Row:
        """Return an independent copy, as of the last commit."""
        return _Row(snapshot(self.cache), self.length, replay=list(self.replay))


class PathSession(ListedRows[_Row]):
    """Verification of chains over the model's own cache; see `TargetSession`."""

    def __init__(self, target: PathTarget, rows: int) -> None:
        super().__init__(rows, _Row, _Row.fork)
        self.target = target

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._all, self._line = [], []

    def abandon(self) -> list[int]:
        """Empty the rows in line, whose states cannot be taken back; see `TargetSession`."""
        for row in self._line:
            self._all[row] = _Row()
        return list(self._line)

    def admit(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Return the likeliest path of a draft; of draws the first.

        Drafts end where the rotary table of the row changes; see `rotary_tables`.
        """
        border, current = self.target.border, self.active_rows[row]
        if border is not None and len(text) <= border:
            tree = limit_depth(tree, border - len(text))
        elif (
            border is not None
            and self.target.rereads
            and border >= current.length + len(current.replay)
        ):
            self._all[self._line[row]] = _Row(replay=list(text[:-1]))
            return DraftTree.empty(tree.kind)
        return keep_paths(tree, 1)

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> Tensor:
        """Run one forward a row; see `TargetSession.verify`."""
        parts = [
            self._verify(row, list(tokens), tree)
            for row, tokens, tree in zip(self.active_rows, pending, trees, strict=True)
        ]
        if len(parts) == 1:
            return parts[0][None]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep pending tokens and accepted nodes; see `TargetSession.commit`."""
        for row, path in zip(self.active_rows, paths, strict=True):
            _commit(row, tuple(path))

    def copied(self) -> PathSession:
        """Return an independent copy of the session, as of the last commit."""
        twin = PathSession(self.target, len(self._all))
        twin._all, twin._line = [row.fork() for row in self._all], list(self._line)
        return twin

    def _verify(self, row: _Row, pending: list[int], tree: DraftTree) -> Tensor:
        """Return the logits of the root and the nodes: [N + 1, V]."""
        known, border = row.length + len(row.replay), self.target.border
        crosses = border is not None and known <= border < known + len(pending)
        if row.replay and row.length and (len(row.replay) > LAG or crosses):
            self._forward(row, row.replay, 1)
            row.replay = []
        row.head, row.draft = [*row.replay, *pending], tree.tokens.tolist()
        row.before = snapshot(row.cache) if row.draft else None
        return self._forward(row, [*row.head, *row.draft], len(row.draft) + 1)

    def _forward(self, row: _Row, tokens: list[int], keep: int) -> Tensor:
        """Feed tokens to the row's cache; return the last logits [keep, V]."""
        target = self.target
        target.check_mode()
        arguments: dict[str, Any] = {"logits_to_keep": keep} if target.keeps_logits else {}
        ids = torch.tensor([tokens], device=target.device)
        positions = torch.arange(row.length, row.length + ids.shape[1], device=target.device)
        if target.takes_positions:  # as `generate` does: some count otherwise by themselves
            arguments["position_ids"] = positions[None]
        with torch.no_grad():
            out = target.model(
                input_ids=ids, past_key_values=row.cache, use_cache=True, **arguments
            )
        row.cache = out.past_key_values
        row.length += ids.shape[1]
        logits: Tensor = out.logits[0, -keep:]
        return logits


def snapshot(cache: Any) -> Any:
    """Return a copy of a transformers cache that later forwards leave alone.

    Keys and values are shared: dynamic layers replace them by longer ones and never write into
    them. Recurrent and convolution states are written in place and so are copied.
    """
    if cache is None:
        return None
    twin = _copied(cache)
    twin.layers = [_copied(layer) for layer in cache.layers]
    return twin


def _copied(thing: Any) -> Any:
    """Return a shallow copy whose lists and dictionaries of tensors are its own."""
    twin = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, dict):
            setattr(twin, name, {k: _cloned(v) for k, v in value.items()})
        elif isinstance(value, list):
            setattr(twin, name, [_cloned(v) for v in value])
    return twin


def _cloned(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _commit(row: _Row, path: tuple[int, ...]) -> None:
    """Bring the row's cache to the end of the accepted path, or note what it lacks."""
    beyond = len(row.draft) - len(path)
    row.length -= beyond
    if beyond and not _croppable(row.cache):
        row.cache = row.before
        row.length -= len(row.head) + len(path)
        row.replay = [*row.head, *row.draft[: len(path)]]
    else:
        if beyond:
            row.cache.crop(-beyond)
        row.replay = []
    row.before, row.draft = None, []


def _croppable(cache: Any) -> bool:
    """Whether the last slots of every layer can be dropped without a trace.

    Sliding layers cannot once they have release what lies before their window.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return type(cache) is DynamicCache and all(
        type(layer) is DynamicLayer for layer in cache.layers
    )
