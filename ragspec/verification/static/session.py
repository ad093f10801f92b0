"""A session whose steps have fixed shapes; prompts are read as in any other.

Rows keep their places: a step covers all places up to that of the last row in line, and what ended
between them is padded, so that nothing is copied when a text ends. Only where that would double
the shape are rows moved together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.models.device import Stopwatch
from ragspec.sampling.batch_distribution import BatchDistribution
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import Beginning
from ragspec.verification.causal import CausalTarget, TreeSession
from ragspec.verification.static.arena import Arena
from ragspec.verification.static.buffers import StackedCache, compact
from ragspec.verification.static.layout import (
    MOST_QUERIES,
    ancestor_bits,
    queries_of,
    rows_of,
    slots_of,
)
from ragspec.verification.static.step import StepShape
from ragspec.verification.tree_attention import Configs, TreeView

T = TypeVar("T")
RequestDistribution = list[
    tuple[TokenDistribution, Sequence[int]]
]  # the distribution and the text of each row
StepTensors = tuple[Tensor | None, Tensor, Tensor | None]


class TakesSteps(Protocol):
    """Who takes the steps of sessions, over the buffers that they hold."""

    def check_addresses(self, arena: Arena) -> None:
        """Forget steps that read weights where these no longer are."""

    def take_step(
        self,
        arena: Arena,
        shape: StepShape,
        inputs: NDArray[np.int64],
        configs: Configs,
        *,
        hidden: bool,
    ) -> StepTensors:
        """Begin a step: returns packet (None without distributions), logits [B, n, V], states.

        inputs, packet: see `step`; they are the device's, where the step may be running.
        """

    def take_again(
        self, arena: Arena, shape: StepShape, packet: Tensor, logits: Tensor, *, hidden: bool
    ) -> Tensor:
        """Return the packet of the step that was just taken with its tokens certain, if it can."""


class StaticSession(TreeSession):
    """Tree verification by steps of fixed shape.

    See `TargetSession` and `base.StepSession`.
    """

    cache: StackedCache

    def __init__(
        self, target: CausalTarget, steps: TakesSteps, arena: Arena, rows: int, capacity: int
    ) -> None:
        super().__init__(target, rows, capacity)
        self._steps, self._arena = steps, arena
        self.cache = StackedCache(arena.stacks, rows)
        self.chosen: list[list[int]] | None = None
        self._rows_selected = list(range(rows))
        self._at = list(range(rows))  # of each wanted row its place in line
        self._distributions: RequestDistribution | None = None
        self._selection: list[list[int]] | None = None  # tokens of the paths kept by the last step
        self._flags: list[list[int]] = []  # of each row whether a query was kept
        self._static = False  # whether the last forward was a step of fixed shape
        self._matches: tuple[Tensor | None, Tensor] | None = None  # of what was launched
        self._again: Callable[[], Tensor] | None = None  # makes its packet certain
        self._watch = Stopwatch(target.device)

    def join(self, tokens: Sequence[int], scope: str = "") -> tuple[int, int]:
        """Take a free row for a text, by the weights as they are; see `TargetSession.join`."""
        self._steps.check_addresses(self._arena)
        return super().join(tokens, scope)

    def line_up(self, rows: Sequence[int]) -> list[int]:
        """Let the next forwards cover these rows; see `TargetSession.line_up`."""
        self.cache.abandon()
        place = {row: at for at, row in enumerate(self.cache.row_order)}
        self._rows_selected = sorted(rows, key=place.__getitem__)
        return list(self._rows_selected)

    def follow(
        self, distributions: Sequence[TokenDistribution], texts: Sequence[Sequence[int]]
    ) -> None:
        """Let the next forward follow the target's own tokens; see `base.StepSession`."""
        known = all(BatchDistribution.takes(distribution) for distribution in distributions)
        self._distributions = list(zip(distributions, texts, strict=True)) if known else None

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> Tensor:
        """Run one forward, of fixed shape where all prompts are read; see `TargetSession`."""
        self.launch(pending, trees)
        return self.settle()

    def launch(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> None:
        """Begin a forward; see `base.StepSession`."""
        distributions, self._distributions = self._distributions, None
        self.chosen = self._selection = None
        widest = 1 + max(map(len, trees))
        fits = widest <= MOST_QUERIES and all(len(row) == 1 for row in pending)
        self._static = fits and all(self.cache.length(row) for row in self._rows_selected)
        if self._static:
            with self._watch:
                self._matches = self._step([row[0] for row in pending], trees, distributions)
            return
        self._line(self._rows_selected)
        logits = super().verify(self._spread(pending), self._spread(trees))
        self.hidden = [self.hidden[at] for at in self._at] if self.hidden else []
        self._matches = None, logits[self._at]

    def settle(self) -> Tensor:
        """Wait for the packet of the step that was launched; see `base.StepSession`."""
        assert self._matches is not None
        (packet, logits), self._matches = self._matches, None
        again, self._again = self._again, None
        if packet is not None:
            read = packet.tolist()
            if again is not None and any(_ends_unknown(read[at]) for at in self._at):
                read = again().tolist()
            self._settle(read, [tree for _, tree in self._inputs])
        return logits

    @property
    def seconds(self) -> float:
        """What the device took for the last step; see `base.StepSession`."""
        return self._watch.seconds if self._static and self._selection is not None else 0.0

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[Tensor, list[TopTokens]]:
        """Read the prompts; see `base.CachedSession`."""
        self._static = False
        self._line(self._rows_selected)
        logits, top_tokens = super().read_prompts(self._spread(pending), k)
        self.hidden = [self.hidden[at] for at in self._at] if self.hidden else []
        return logits[self._at], [top_tokens[at] for at in self._at] if top_tokens else []

    def read_states(self, tokens: Sequence[int]) -> Tensor | None:
        """Return what the head reads at all of a row's next tokens; see `base.CachedSession`."""
        self._static = False
        self._line(self._rows_selected)
        return super().read_states(tokens)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep pending tokens and accepted nodes; see `TargetSession.commit`."""
        if not self._static:
            super().commit(self._spread(paths))
            return
        accepted = self._tokens_of(paths)
        moved = [
            any(node != i for i, node in enumerate(path))
            and (self._selection is None or not _begins(self._selection[row], accepted[row]))
            for row, path in enumerate(paths)
        ]
        if any(moved):
            self._compact(
                [
                    self._row_order(row, path) if local else ()
                    for row, (path, local) in enumerate(zip(paths, moved, strict=True))
                ]
            )
        lengths = self.cache.book.lengths
        for row, at, (tokens, _), current in zip(
            self._rows_selected, self._at, self._inputs, accepted, strict=True
        ):
            lengths[at] += 1 + len(current)
            self._texts.grow(row, [*tokens, *current])
        self.cache.abandon()

    def abandon(self) -> list[int]:
        """Forget what was not committed; see `TargetSession.abandon`."""
        self._distributions = self._selection = self.chosen = self._matches = self._again = None
        return super().abandon()

    def _step(
        self,
        roots: Sequence[int],
        trees: Sequence[DraftTree],
        distributions: RequestDistribution | None,
    ) -> tuple[Tensor | None, Tensor]:
        """Begin a step of fixed shape; returns its packet and logits [B, n, V] of wanted rows."""
        self._cover()
        book, n = self.cache.book, queries_of(1 + max(map(len, trees)))
        rows = rows_of(len(book.lengths), self._arena.stacks.rows)
        slots = max(book.lengths) + n
        self._reserve(slots)
        slots = slots_of(slots, self._arena.stacks.slots)
        self._inputs = [([root], tree) for root, tree in zip(roots, trees, strict=True)]
        message = (
            None
            if distributions is None
            else self._arena.distributions_of(rows, self.target.vocab_size)
        )
        distribution = (
            message
            and distributions
            and message.notify(dict(zip(self._at, distributions, strict=True)))
        )
        shape = StepShape(rows, n, slots, distribution or None)
        inputs = np.zeros((rows, shape.width), dtype=np.int64)
        inputs[:, n : 2 * n] = np.arange(n)  # a pad is its own parent
        inputs[:, 3 * n] = -1
        inputs[: len(book.lengths), 3 * n] += book.lengths
        for i, (at, root, tree) in enumerate(zip(self._at, roots, trees, strict=True)):
            end = 1 + len(tree)
            inputs[at, 0], inputs[at, 1:end] = root, tree.tokens
            inputs[at, n + 1 : n + end] = tree.parents + 1
            if distributions is not None:
                inputs[at, 3 * n + 1] = (
                    len(distributions[i][1]) - distributions[i][0].prompt_length - 1
                )
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
            states = states.clone()  # a captured step writes its own again; drafters may keep them
        self.hidden = [] if states is None else [states[None, at] for at in self._at]
        if self._at == list(range(len(self._at))):
            return packet, logits[: len(self._at)]
        # An index would be waited for.
        return packet, torch.stack([logits[at] for at in self._at])

    def _settle(self, packet: list[list[int]], trees: Sequence[DraftTree]) -> None:
        """Read a packet: what the target would choose everywhere, and the paths that were kept."""
        self.chosen, self._selection, self._flags = [], [], []
        for at, tree in zip(self._at, trees, strict=True):
            n = len(packet[at]) // 2
            flags, tokens = packet[at][:n], packet[at][n:]
            self.chosen.append(tokens[: 1 + len(tree)])
            self._flags.append(flags)
            self._selection.append([int(tree.tokens[q - 1]) for q in range(1, n) if flags[q]])

    def _row_order(self, row: int, path: Sequence[int]) -> list[int]:
        """Return by which numbers the nodes of a path lie now, less the root."""
        if self._selection is None:
            return list(path)
        flags = self._flags[row]
        order = sorted(range(len(flags)), key=lambda query: not flags[query])
        return [order.index(node + 1) - 1 for node in path]

    def _compact(self, paths: Sequence[Sequence[int]]) -> None:
        """Move the slots of accepted nodes down, as the host decided."""
        longest = 1 + max(map(len, paths))
        lengths = np.asarray(self.cache.book.lengths)[:, None]
        moves = np.tile(np.arange(longest), (len(lengths), 1))
        for at, path in zip(self._at, paths, strict=True):
            moves[at, 1 : 1 + len(path)] = np.asarray(path, dtype=np.int64) + 1
        both = np.stack([lengths + moves, lengths + np.arange(longest)])
        source, target = torch.from_numpy(both).to(self.target.device)
        compact(self._arena.stacks, source, target)

    def _tokens_of(self, paths: Sequence[Sequence[int]]) -> list[list[int]]:
        trees = [tree for _, tree in self._inputs]
        return [
            [int(tree.tokens[node]) for node in path]
            for tree, path in zip(trees, paths, strict=True)
        ]

    def _run(
        self, tokens: Tensor, view: TreeView, keep: int | Tensor
    ) -> tuple[Tensor, Tensor | None]:
        self._reserve(self.cache.book.read(tokens.shape[1]))
        return super()._run(tokens, view, keep)

    def _reserve(self, slots: int) -> None:
        if self.cache.reserve(slots):
            self._arena.moved()

    def begin_with(self, beginning: Beginning) -> None:
        """Hold these keys and values and no others; see `base.CachedSession`."""
        self._reserve(beginning[0][0].shape[-2] if beginning else 0)
        super().begin_with(beginning)

    def _line(self, rows: Sequence[int]) -> None:
        """Bring rows in line and note where the wanted ones lie."""
        self.cache.line_up(rows)
        line = self.cache.line
        self._at = [line.index(row) for row in self._rows_selected]

    def _cover(self) -> None:
        """Bring all rows in line up to the last wanted one, or the wanted ones alone."""
        row_order = self.cache.row_order
        last = 1 + max(row_order.index(row) for row in self._rows_selected)
        most = self._arena.stacks.rows
        far = rows_of(last, most) > rows_of(len(self._rows_selected), most)
        self._line(self._rows_selected if far else row_order[:last])

    def _spread(self, values: Sequence[T]) -> list[T]:
        """Return what is given for each wanted row, in the order in which they lie."""
        result = list(values)
        for at, value in zip(self._at, values, strict=True):
            result[at] = value
        return result


def _ends_unknown(packet: Sequence[int]) -> bool:
    """Tell whether the token after a row's accepted path is not certain; nodes follow parents."""
    n = len(packet) // 2
    return packet[n + max(query for query in range(n) if packet[query])] < 0


def _begins(whole: Sequence[int], part: Sequence[int]) -> bool:
    return list(whole[: len(part)]) == list(part)
