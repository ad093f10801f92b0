"""The cache of a draft model whose trees are drafted in one call, over buffers that stay put."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from ragspec.drafters.model.cache import DraftCache
from ragspec.drafters.model.level_step import LevelShape, LevelStep, ReadPlaces
from ragspec.drafters.model.static_tree import PlaceChoices, TreeShape
from ragspec.verification.static.buffers import StackedCache
from ragspec.verification.static.layout import MOST_QUERIES, queries_of, slots_of
from ragspec.verification.static.target import StaticTarget


class LevelCache(DraftCache):
    """One row of text in a draft model that takes steps of fixed shape; see `DraftCache`.

    Prompts, and what is too long for a step, are read as in any other, into the same buffers.
    """

    def __init__(self, target: StaticTarget, vocab_size: int, capacity: int) -> None:
        super().__init__(target, vocab_size, capacity)
        self._target = target
        self._arena = target.lend_arena(1, capacity)
        self._stacked = StackedCache(self._arena.stacks, 1)
        self._cache = self._stacked
        weakref.finalize(self, target.take_back, self._arena).atexit = False

    def draft(self, tokens: Sequence[int], tree: TreeShape, levels: int) -> PlaceChoices | None:
        """Read the text and so many levels of a tree below it, in one call and with one packet.

        Returns the choices after the root and after each place that is read; None where a step of
        fixed width would go beyond the model's context.
        """
        self._keep(len(tokens) - 1)
        if len(tokens) - len(self) > MOST_QUERIES:
            with self.lease():
                self.read(tokens)
            self._keep(len(tokens) - 1)
        start, fresh = len(self), list(tokens[len(self) :])
        pending, places = queries_of(len(fresh)), ReadPlaces(tree, levels)
        limit = self.model.max_length
        if limit is not None and start + pending > limit:
            return None
        needed = start + pending + len(places.places)
        self._reserve(needed)
        slots = slots_of(needed, self._arena.stacks.slots)
        shape = LevelShape(tree, levels, pending, slots, self.vocab_size)
        inputs = np.zeros((1, pending + 2), dtype=np.int64)
        inputs[0, : len(fresh)] = fresh
        inputs[0, pending:] = start, len(fresh)
        make = partial(LevelStep, self._target, self._arena.stacks, shape)
        (packet,) = self._target.take(self._arena, shape, make, inputs, self._configs)
        self.forwards += 1 + len(places.bounds)
        self._cache.book.lengths[0] = len(tokens)
        self._cache.abandon()
        message: torch.Tensor = packet.cpu()
        return PlaceChoices(places.rows, message[0], message[1].view(torch.float64))

    def _before(self, n: int) -> None:
        self._reserve(self._cache.book.read(n))

    def _reserve(self, slots: int) -> None:
        if self._stacked.reserve(slots):
            self._arena.moved()
