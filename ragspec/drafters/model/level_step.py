"""All levels of a static tree in one call, without a copy to the host between levels.

    input i64 [1, C + 2]: tokens that are not in the cache (the root last, then pads), the number of
        committed slots, the number of tokens that are no pads
    output i64 [2, R, K]: best tokens after the root and after each read place, and the bits of
        their logits f64, which are log-probabilities up to a constant per row

A capture runs it twice and writes the same slots twice. So accepted tokens are read again, not
moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.trees.draft_tree import ROOT
from ragspec.trees.operations import ancestors, depths
from ragspec.verification.causal import CausalTarget
from ragspec.verification.static.buffers import Arena
from ragspec.verification.static.layout import Counters, Layout
from ragspec.verification.static.step import FixedStep, Masks, StepLogits


@dataclass(frozen=True, slots=True)
class LevelShape:
    """The shape of one call: C pending tokens, pads included, and K choices after a place."""

    tree: TreeShape
    levels: int  # that are read
    pending: int
    slots: int
    vocab_size: int
    choices: int


class ReadPlaces:
    """The places of a tree that have children, level by level; the model reads these.

    Attributes:
        rows: Row of the root (-1) and of each read place in the output.
        parents: Number of each read place's parent; -1 is the root.
        bounds: First and last read place of each level.
    """

    def __init__(self, tree: TreeShape, levels: int) -> None:
        self.tree = tree
        depths, inner = tree.depths, sorted({*tree.parents} - {ROOT})
        by_level = [[p for p in inner if depths[p] == level] for level in range(1, levels + 1)]
        self.places = [place for level in by_level for place in level]
        self.rows = {place: row for row, place in enumerate([ROOT, *self.places])}
        self.bounds = list(pairwise(accumulate(map(len, by_level), initial=0)))
        self.parents = [self.rows[tree.parents[place]] - 1 for place in self.places]

    def picks(self, level: int, k: int) -> list[int]:
        """Return the indices of a level's tokens among the k choices after each parent place."""
        first, last = self.bounds[level]
        before = self.bounds[level - 1][0] if level else ROOT
        pairs = zip(self.parents[first:last], self.places[first:last], strict=True)
        return [(parent - before) * k + self.tree.ranks[place] for parent, place in pairs]


read_places = lru_cache(maxsize=64)(ReadPlaces)


class LevelStep(FixedStep[tuple[Tensor]]):
    """Drafts one static tree with the first row of an arena; see the module."""

    def __init__(self, target: CausalTarget, masks: Masks, arena: Arena, shape: LevelShape) -> None:
        from ragspec.verification.model_cache import step_cache  # imports transformers

        device = arena.device
        read = read_places(shape.tree, shape.levels)
        sizes = [shape.pending, *(last - first for first, last in read.bounds)]
        name = f"levels_{'x'.join(map(str, sizes))}_of_{shape.slots}"
        super().__init__(1, shape.pending + 2, device, name)
        self.shape = shape
        self._logits, self._masks = StepLogits(target.model), masks
        self._keeps, self._input_size = target.keeps_logits, target.input_size
        self._windows = tuple(dict.fromkeys(masks.windows.values()))
        self._bounds = [(0, shape.pending), *read.bounds]
        picks = (read.picks(level, shape.choices) for level in range(len(read.bounds)))
        self._picks = [torch.tensor(each, device=device) for each in picks]
        self._chain = _still(range(ROOT, shape.pending - 1), device)
        self._tree = _still(read.parents, device)
        self._counters = {
            n: Counters.of(n, shape.slots, target.model.dtype, device)
            for n in (shape.pending, len(read.places))
        }
        self._columns = [torch.zeros(1, n, dtype=torch.int64, device=device) for n in sizes]
        self._caches = [step_cache(arena, 1, shape.slots, columns) for columns in self._columns]

    def run(self) -> tuple[Tensor]:
        """Return the output for the packet; the read tokens stay in the cache."""
        pending = self.shape.pending
        lengths, count = self.packet[:, pending], self.packet[:, pending + 1]
        chain = self._chain.behind(lengths)
        masks = self._visible(chain, lengths - 1)
        logits = self._forward(0, self.packet[:, :pending], chain, masks, count - 1)
        choices = [self._best(logits)]
        base = lengths + count
        tree = self._tree.behind(base)
        masks = self._visible(tree, base - 1) if self._picks else []
        for level, picks in enumerate(self._picks, 1):
            tokens = choices[-1][0].reshape(-1).index_select(0, picks)
            if self._input_size < self.shape.vocab_size:
                tokens = tokens.clamp_max(self._input_size - 1)  # of probability 0; never kept
            logits = self._forward(level, tokens[None], tree, masks, None)
            choices.append(self._best(logits))
        values = torch.cat([value for _, value in choices])
        tokens = torch.cat([token for token, _ in choices])
        return (torch.stack([tokens, values.view(torch.int64)]),)

    def _visible(self, layout: Layout, last: Tensor) -> list[Tensor]:
        """Return the masks of a layout's queries, one [1, n, S] per attention window.

        Args:
            last: Slot of the last committed token, i64 [1].
        """
        counters = self._counters[layout.columns.shape[1]]
        plain = layout.plain_mask(last, counters)
        return [layout.windowed(plain, counters, window) for window in self._windows]

    def _forward(
        self, number: int, tokens: Tensor, layout: Layout, masks: list[Tensor], last: Tensor | None
    ) -> Tensor:
        """Return the logits [n, V] of a level's queries, or only of the `last`, i64 [1]."""
        span = slice(*self._bounds[number])
        self._columns[number].copy_(layout.columns[:, span])
        by_window = {w: each[:, None, span] for w, each in zip(self._windows, masks, strict=True)}
        keep = {"logits_to_keep": last} if self._keeps and last is not None else {}
        inputs = tokens, layout.positions[:, span], self._masks.of(by_window.__getitem__)
        logits = self._logits(*inputs, self._caches[number], **keep)[0]
        if last is not None and not keep:
            logits = logits.index_select(0, last)
        return fit(logits, self.shape.vocab_size)

    def _best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits if logits.dtype == torch.float64 else logits.float()
        values, tokens = scores.topk(self.shape.choices, dim=-1)
        return tokens, values.double()


def _still(parents: Sequence[int], device: torch.device) -> Layout:
    """Return the layout of a tree, parents first, at position 0."""
    above, steps = np.array(parents, dtype=np.int64), np.arange(len(parents))
    level = depths(above)
    parts = ancestors(above), level, level - 1, steps
    return Layout(*(torch.from_numpy(each)[None].to(device) for each in parts))


def fit(logits: Tensor, size: int) -> Tensor:
    """Return logits [n, V] cut off or padded with -inf to the target's vocabulary size."""
    width = logits.shape[-1]
    if width == size:
        return logits
    if width > size:
        return logits[:, :size]
    return torch.nn.functional.pad(logits, (0, size - width), value=float("-inf"))
