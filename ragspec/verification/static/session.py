"""A session whose steps have fixed shapes. Prompts are read as in any other session.

Rows keep their places: a step covers all places up to that of the last selected row. Finished rows
in between are padded, so nothing is copied when a sequence ends. Rows are only moved together if
the step would otherwise need twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import InputError
from ragspec.models.device import Stopwatch
from ragspec.sampling.batch_distribution import BatchDistribution
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.static.arena import Arena
from ragspec.verification.static.buffers import StackedRow, compact, reserve
from ragspec.verification.static.layout import (
    MOST_QUERIES,
    ancestor_bits,
    queries_of,
    rows_of,
    slots_of,
)
from ragspec.verification.static.step import StepShape
from ragspec.verification.tree_attention import Configs
from ragspec.verification.tree_session import TreeSession

# The distribution and the text of each row.
RequestDistribution = list[tuple[TokenDistribution, Sequence[int]]]
StepTensors = tuple[Tensor | None, Tensor, Tensor | None]


class TakesSteps(Protocol):
    """Runs the steps of sessions over their buffers; implemented by `StaticTarget`."""

    def check_addresses(self, arena: Arena) -> None:
        """Discard the steps of an arena if the model's weights have moved."""

    def take_step(
        self,
        arena: Arena,
        shape: StepShape,
        inputs: NDArray[np.int64],
        configs: Configs,
        *,
        hidden: bool,
    ) -> StepTensors:
        """Start a step on `inputs` (see `step`), without waiting for an accelerator.

        Returns the packet (None without distributions), logits [B, n, V], and any hidden states.
        """

    def take_again(
        self, arena: Arena, shape: StepShape, packet: Tensor, logits: Tensor, *, hidden: bool
    ) -> Tensor:
        """Return the packet of the last step with uncertain tokens resolved; see `StaticStep`."""


class StaticSession(TreeSession):
    """Verifies draft trees by steps of fixed shape; implements `StepSession`."""

    def __init__(
        self,
        target: CausalTarget,
        steps: TakesSteps,
        arena: Arena,
        rows: int,
        capacity: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._steps, self._arena = steps, arena
        self._places = [StackedRow(arena.stacks, place) for place in range(arena.stacks.rows)]
        self._free = list(range(arena.stacks.rows))
        super().__init__(target, rows, capacity, prefix_cache)
        self.chosen: list[list[int]] | None = None
        self._at: list[int] = []  # the place of each selected row
        self._distributions: RequestDistribution | None = None
        self._selection: list[list[int]] | None = None  # tokens of the last accepted paths
        self._flags: list[list[int]] = []  # for each row whether each query was accepted
        self._static = False  # whether the last forward was a step of fixed shape
        self._launched: tuple[Tensor | None, list[Tensor]] | None = None  # of the launched forward
        self._again: Callable[[], Tensor] | None = None  # resolves its uncertain tokens
        self._watch = Stopwatch(target.device)

    def join(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> tuple[int, int]:
        """Add a row, after a check for moved weights; see `TargetSession.join`."""
        self._steps.check_addresses(self._arena)
        return super().join(tokens, tenant, room)

    def leave(self, row: int, keep: bool = True) -> None:
        """Drop a row; its place is free again. See `TargetSession.leave`."""
        place = self._place(row)
        super().leave(row, keep)
        self._free = sorted([*self._free, place])

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Select the rows of the next forwards; see `TargetSession.select_rows`."""
        return super().select_rows(sorted(rows, key=self._place))

    def _empty_cache(self, capacity: int) -> SequenceCache:
        if not self._free:
            raise InputError(
                f"got a sequence for {len(self._places)} rows that are all taken; expected a free "
                "one. Open a session of more rows."
            )
        cache = self._places[self._free.pop(0)]
        cache.truncate(0)
        return cache

    def _adopt(self, cache: SequenceCache) -> SequenceCache:
        row = self._empty_cache(0)
        assert isinstance(row, StackedRow)
        self._reserve(cache.length)
        row.fill(cache, cache.length)
        return row

    def _detach(self, cache: SequenceCache) -> SequenceCache:
        return cache.copy(cache.length, 0)

    def _place(self, row: int) -> int:
        """Return the row's place in the stacks."""
        cache = self._rows[row].cache
        assert isinstance(cache, StackedRow)
        return cache.row

    def follow(
        self, distributions: Sequence[TokenDistribution], texts: Sequence[Sequence[int]]
    ) -> None:
        """Let the next forward choose the target's tokens; see `base.StepSession`."""
        supported = all(BatchDistribution.takes(distribution) for distribution in distributions)
        self._distributions = list(zip(distributions, texts, strict=True)) if supported else None

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> list[Tensor]:
        """Run one forward, of fixed shape if all prompts are read; see `TargetSession`."""
        self.launch(pending, trees)
        return self.settle()

    def launch(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> None:
        """Start a forward; see `base.StepSession`."""
        distributions, self._distributions = self._distributions, None
        self.chosen = self._selection = None
        widest = 1 + max(map(len, trees))
        fits = widest <= MOST_QUERIES and all(len(row) == 1 for row in pending)
        self._static = fits and all(row.cache.length for row in self.active_rows)
        if self._static:
            with self._watch:
                self._launched = self._step([row[0] for row in pending], trees, distributions)
            return
        self._launched = None, super().verify(pending, trees)

    def settle(self) -> list[Tensor]:
        """Wait for the packet of the launched step; see `base.StepSession`."""
        assert self._launched is not None
        (packet, logits), self._launched = self._launched, None
        again, self._again = self._again, None
        if packet is not None:
            read = packet.tolist()
            if again is not None and any(_ends_unknown(read[at]) for at in self._at):
                read = again().tolist()
            self.chosen, self._selection, self._flags = [], [], []
            for at, (_, tree) in zip(self._at, self._inputs, strict=True):
                n = len(read[at]) // 2
                flags, tokens = read[at][:n], read[at][n:]
                self.chosen.append(tokens[: 1 + len(tree)])
                self._flags.append(flags)
                self._selection.append([int(tree.tokens[q - 1]) for q in range(1, n) if flags[q]])
        return logits

    @property
    def seconds(self) -> float:
        """The device time of the last step; see `base.StepSession`."""
        return self._watch.seconds if self._static and self._selection is not None else 0.0

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[list[Tensor], list[TopTokens]]:
        """Read the prompts; see `base.CachedSession`."""
        self._static = False
        return super().read_prompts(pending, k)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep pending tokens and accepted nodes; see `TargetSession.commit`."""
        if not self._static:
            super().commit(paths)
            return
        accepted = [
            [int(tree.tokens[node]) for node in path]
            for (_, tree), path in zip(self._inputs, paths, strict=True)
        ]
        moved = [
            any(node != i for i, node in enumerate(path))
            and (self._selection is None or self._selection[row][: len(path)] != accepted[row])
            for row, path in enumerate(paths)
        ]
        if any(moved):
            self._compact(
                [
                    self._row_order(row, path) if local else ()
                    for row, (path, local) in enumerate(zip(paths, moved, strict=True))
                ]
            )
        for row, (tokens, _), new in zip(self.active_rows, self._inputs, accepted, strict=True):
            row.cache.length += 1 + len(new)
            row.tokens += [*tokens, *new]

    def discard_uncommitted(self) -> list[int]:
        """Discard uncommitted tokens; see `TargetSession.discard_uncommitted`."""
        self._distributions = self._selection = self.chosen = self._launched = self._again = None
        return super().discard_uncommitted()

    def _step(
        self,
        roots: Sequence[int],
        trees: Sequence[DraftTree],
        distributions: RequestDistribution | None,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Start a step; return its packet and the logits [n, V] of each selected row."""
        self._cover()
        n, lengths = queries_of(1 + max(map(len, trees))), self._lengths()
        rows = rows_of(len(lengths), self._arena.stacks.rows)
        slots = max(lengths) + n
        self._reserve(slots)
        slots = slots_of(slots, self._arena.stacks.slots)
        self._inputs = [([root], tree) for root, tree in zip(roots, trees, strict=True)]
        message = distribution = None
        if distributions is not None:
            message = self._arena.distributions_of(rows, self.target.vocab_size)
            distribution = message.notify(dict(zip(self._at, distributions, strict=True)))
        shape = StepShape(rows, n, slots, distribution)
        inputs = np.zeros((rows, shape.width), dtype=np.int64)
        inputs[:, n : 2 * n] = np.arange(n)  # a pad is its own parent
        inputs[:, 3 * n] = -1
        inputs[: len(lengths), 3 * n] += lengths
        for i, (at, root, tree) in enumerate(zip(self._at, roots, trees, strict=True)):
            end = 1 + len(tree)
            inputs[at, 0], inputs[at, 1:end] = root, tree.tokens
            inputs[at, n + 1 : n + end] = tree.parents + 1
            if distributions is not None:
                token_distribution, text = distributions[i]
                inputs[at, 3 * n + 1] = len(text) - token_distribution.prompt_length - 1
        inputs[:, 2 * n : 3 * n] = ancestor_bits(inputs[:, n : 2 * n])
        if message is not None and shape.reads_texts:
            inputs[:, 3 * n + 2 :] = message.fresh
        hidden = self._head_inputs is not None
        try:
            packet, logits, states = self._steps.take_step(
                self._arena, shape, inputs, self._configs, hidden=hidden
            )
        except BaseException:
            if message is not None:
                message.forget()
            raise
        if packet is not None:
            again = self._steps.take_again
            self._again = partial(again, self._arena, shape, packet, logits, hidden=hidden)
        if states is not None:
            states = states.clone()  # the next step overwrites them, and drafters may keep them
        self.hidden = [] if states is None else [states[None, at] for at in self._at]
        return packet, [logits[at] for at in self._at]

    def _row_order(self, row: int, path: Sequence[int]) -> list[int]:
        """Return the current slots of a path's nodes, counted from the slot after the root."""
        if self._selection is None:
            return list(path)
        flags = self._flags[row]
        order = sorted(range(len(flags)), key=lambda query: not flags[query])
        return [order.index(node + 1) - 1 for node in path]

    def _compact(self, paths: Sequence[Sequence[int]]) -> None:
        """Move the slots of nodes that the host accepted down."""
        longest = 1 + max(map(len, paths))
        lengths = np.asarray(self._lengths())[:, None]
        moves = np.tile(np.arange(longest), (len(lengths), 1))
        for at, path in zip(self._at, paths, strict=True):
            moves[at, 1 : 1 + len(path)] = np.asarray(path, dtype=np.int64) + 1
        both = np.stack([lengths + moves, lengths + np.arange(longest)])
        source, target = torch.from_numpy(both).to(self.target.device)
        compact(self._arena.stacks, source, target)

    def _lengths(self) -> list[int]:
        """Return the committed slots of all places up to that of the last selected row."""
        lengths = [0] * (1 + max(self._at))
        for row in self._rows:
            if (place := self._place(row)) < len(lengths):
                lengths[place] = self._rows[row].cache.length
        return lengths

    def _run(
        self,
        rows: Sequence[SequenceCache],
        inputs: Sequence[tuple[int, Sequence[int], DraftTree]],
        queries: Sequence[range],
        last: Sequence[int] | None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        self._reserve(max(length + len(head) + len(tree) for length, head, tree in inputs))
        return super()._run(rows, inputs, queries, last)

    def _reserve(self, slots: int) -> None:
        if reserve(self._arena.stacks, slots):
            self._arena.moved()
            for place in self._places:
                place.bind(self._arena.stacks)

    def _cover(self) -> None:
        """Move rows to free places if the step would otherwise need twice as many."""
        most, rows = self._arena.stacks.rows, self.active_rows
        last = max(map(self._place, self._line))
        while rows_of(1 + last, most) > rows_of(len(rows), most) and self._free[0] < last:
            row = next(row for row in rows if row.cache is self._places[last])
            cache = self._empty_cache(0)
            assert isinstance(cache, StackedRow)
            cache.fill(row.cache, row.cache.length)
            row.cache, self._free = cache, sorted([*self._free, last])
            last = max(map(self._place, self._line))
        self._at = [self._place(row) for row in self._line]


def _ends_unknown(packet: Sequence[int]) -> bool:
    """Return whether the token after a row's accepted path is uncertain. Parents come first."""
    n = len(packet) // 2
    return packet[n + max(query for query in range(n) if packet[query])] < 0
