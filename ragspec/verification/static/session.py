"""A session whose steps have fixed shapes. Prompts are read as in any other session.

Rows keep their places: a step covers all places up to that of the last selected row. Finished rows
in between are padded, so nothing is copied when a sequence ends. Rows are only moved together if
the step would otherwise need twice as many.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import InputError
from ragspec.models.device import Stopwatch
from ragspec.needs import HiddenStates
from ragspec.sampling.batch_distribution import BatchDistribution
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import Followed, Pending, TargetModel
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.reading import Taps
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.static import layout
from ragspec.verification.static.buffers import StackedRow
from ragspec.verification.static.runner import StepRunner
from ragspec.verification.static.step import StaticStep, StepShape
from ragspec.verification.tree_session import TreeSession

# Logits [n, V] of each selected row; see `StaticStep.read`, None if the host chooses tokens.
Launched = tuple[list[Tensor], Callable[[], list[tuple[list[int], list[int]]]] | None]


class StaticSession(TreeSession):
    """Verifies draft trees by steps of fixed shape.

    Args:
        rows, capacity, prefix_cache: See `TreeSession`.
        most: Rows at once.
    """

    ahead = True

    def __init__(
        self,
        target: TargetModel,
        runner: StepRunner,
        rows: int,
        capacity: int,
        prefix_cache: PrefixCache | None = None,
        most: int = 1,
    ) -> None:
        self._runner = runner
        self._arena = runner.lend_arena(self, max(rows, most), capacity)
        self._free = list(range(self._arena.rows))
        super().__init__(target, rows, capacity, prefix_cache)
        self._at: list[int] = []  # the place of each selected row
        self._launched: Launched | None = None
        # For each row the queries of a step that chose tokens, in the order of their slots, and the
        # tokens of those that it accepted.
        self._selection: list[tuple[list[int], list[int]]] = []
        self._watch = Stopwatch(target.device)

    def join(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> tuple[int, int]:
        """Add a row, after a check for moved weights; see `TargetSession.join`."""
        self._runner.check_addresses(self._arena)
        return super().join(tokens, tenant, room)

    def leave(self, row: int, keep: bool = True) -> None:
        """Drop a row; its place is free again. See `TargetSession.leave`."""
        place = self._place(row)
        super().leave(row, keep)
        self._clear(place)

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Select the rows of the next forwards; see `TargetSession.select_rows`."""
        return super().select_rows(sorted(rows, key=self._place))

    def verify(self, pending: Pending, trees: Sequence[DraftTree]) -> list[Tensor]:
        """Run one forward, of fixed shape if all prompts are read; see `TargetSession`."""
        self.launch(pending, trees)
        return self.settle()

    def launch(
        self, pending: Pending, trees: Sequence[DraftTree], followed: Followed | None = None
    ) -> None:
        """Start a forward; see `TargetSession`."""
        if not all(BatchDistribution.takes(distribution) for distribution, _ in followed or ()):
            followed = None
        self.chosen = None
        fits = max(map(len, trees)) < layout.MOST_QUERIES and all(len(row) == 1 for row in pending)
        if fits and all(row.cache.length for row in self.active_rows):
            with self._watch:
                self._inputs = list(zip(pending, trees, strict=True))
                self._launched = self._step(followed)
        else:
            self._launched = super().verify(pending, trees), None

    def settle(self) -> list[Tensor]:
        """Wait for the packet of the launched step; see `TargetSession`."""
        assert self._launched is not None
        (logits, read), self._launched = self._launched, None
        if read is not None:
            self.chosen, self._selection = [], []
            for (flags, tokens), (_, tree) in zip(read(), self._inputs, strict=True):
                self.chosen.append(tokens[: 1 + len(tree)])
                order = sorted(range(len(flags)), key=flags.__getitem__, reverse=True)
                accepted = [int(tree.tokens[query - 1]) for query in order[1 : sum(flags)]]
                self._selection.append((order, accepted))
        return logits

    @property
    def seconds(self) -> float:
        """The device time of the last step; see `TargetSession`."""
        return self._watch.seconds if self.chosen is not None else 0.0

    def discard_uncommitted(self) -> None:
        """Discard uncommitted tokens; see `TargetSession.discard_uncommitted`."""
        self._launched = self.chosen = None
        super().discard_uncommitted()

    def _slots(self, row: int, path: Sequence[int]) -> list[int]:
        (_, tree), slots = self._inputs[row], super()._slots(row, path)
        if self.chosen is None:
            return slots
        order, accepted = self._selection[row]
        if accepted[: len(path)] == [int(tree.tokens[node]) for node in path]:
            return list(range(len(slots)))
        return [order.index(slot) for slot in slots]

    def _empty_cache(self, capacity: int) -> StackedRow:
        if not self._free:
            raise InputError(
                f"got a sequence, expected one of {self._arena.rows} rows free. Open more rows."
            )
        return self._arena.caches[self._free.pop(0)]

    def _adopt(self, cache: SequenceCache) -> SequenceCache:
        row = self._empty_cache(0)
        for layer, (keys, values) in cache.layers(cache.length).items():
            row.write(layer, keys, values)
        row.length = cache.length
        return row

    def _detach(self, cache: SequenceCache) -> SequenceCache:
        return cache.prefix(cache.length, 0)

    def _clear(self, place: int) -> None:
        """Let another sequence have a place."""
        self._arena.caches[place].truncate(0)
        self._free = sorted([*self._free, place])

    def _place(self, row: int) -> int:
        """Return the row's place in the arena."""
        cache = self._rows[row].cache
        assert isinstance(cache, StackedRow)
        return cache.row

    def _step(self, followed: Followed | None) -> Launched:
        """Start a step of the selected rows."""
        self.target.check_mode()
        self._cover()
        model, runner, arena = self.target.model, self._runner, self._arena
        n = layout.queries_of(1 + max(len(tree) for _, tree in self._inputs))
        rows = layout.rows_of(1 + max(self._at), arena.rows)
        # Of all rows, as a pad writes behind its own, which may be a text that waits.
        lengths = [cache.length for cache in arena.caches[:rows]]
        arena.reserve(max(lengths) + n)
        slots = layout.slots_of(max(lengths) + n, arena.slots)
        message = distribution = None
        if followed is not None:
            if rows not in arena.distributions:
                place = arena.device, arena.slots + layout.MOST_QUERIES
                arena.distributions[rows] = BatchDistribution(rows, self.target.vocab_size, *place)
            message = arena.distributions[rows]
            distribution = message.notify(dict(zip(self._at, followed, strict=True)))
        shape = StepShape(rows, n, slots, distribution)
        inputs = self._packet(shape, lengths, followed)
        if message is not None and shape.reads_texts:
            inputs[:, 3 * n + 2 :] = message.fresh
        taps = None if self._taps is None else Taps(self._taps.modules)
        make = partial(StaticStep, model, arena, shape, runner.masks, message, taps)
        key = shape, taps and (*taps.modules,)
        try:
            step, outputs = runner.take(arena, key, make, inputs, self._configs)
        except BaseException:
            if message is not None:
                message.forget()
            raise
        packet, logits, states = outputs
        # The next step overwrites them, and drafters may keep them.
        states = {tap: each.clone() for tap, each in states.items()}
        hidden = (HiddenStates({tap: x[None, at] for tap, x in states.items()}) for at in self._at)
        self.hidden = list(hidden) if states else []
        parts = [logits[at] for at in self._at]
        if message is None:
            return parts, None
        assert isinstance(step, StaticStep)
        return parts, partial(step.read, packet, logits, self._at)

    def _packet(
        self, shape: StepShape, lengths: Sequence[int], followed: Followed | None
    ) -> NDArray[np.int64]:
        """Return the inputs of a step, see `step`, without the new tokens of the texts."""
        n = shape.queries
        inputs = np.zeros((shape.rows, shape.width), dtype=np.int64)
        inputs[:, n : 2 * n] = np.arange(n)  # a pad is its own parent
        inputs[:, 3 * n] = np.array(lengths) - 1
        for i, (at, (head, tree)) in enumerate(zip(self._at, self._inputs, strict=True)):
            end = 1 + len(tree)
            inputs[at, 0], inputs[at, 1:end] = head[0], tree.tokens
            inputs[at, n + 1 : n + end] = tree.parents + 1
            if followed is not None:
                distribution, text = followed[i]
                inputs[at, 3 * n + 1] = len(text) - distribution.prompt_length - 1
        inputs[:, 2 * n : 3 * n] = layout.ancestor_bits(inputs[:, n : 2 * n])
        return inputs

    def _cover(self) -> None:
        """Move rows to free places if the step would otherwise need twice as many."""
        most, line = self._arena.rows, self.active_rows
        last, fewest = max(map(self._place, self._line)), layout.rows_of(len(line), most)
        while layout.rows_of(1 + last, most) > fewest and self._free[0] < last:
            row = next(row for row in line if row.cache is self._arena.caches[last])
            row.cache = self._adopt(row.cache)
            self._clear(last)
            last = max(map(self._place, self._line))
        self._at = [self._place(row) for row in self._line]
