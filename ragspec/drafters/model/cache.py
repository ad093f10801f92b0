"""The KV cache of a draft model: one text and a draft that grows level by level.

A draft tree needs one forward per level, or one step of fixed shape for all levels. A forward is
itself such a step if the model has them. The nodes of earlier levels stay in the speculative slots.
A new node attends to the text, to its ancestors and to itself. Accepted nodes stay in the cache.
They are identified by their tokens, because the verified tree may lack some of these nodes or have
nodes of other drafters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafters.model.forward_step import MOST_DRAFTED, ForwardShape, ForwardStep
from ragspec.drafters.model.level_step import LevelShape, LevelStep, fit, read_places
from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.trees.draft_tree import ROOT
from ragspec.verification.batch import Batch, TreeView
from ragspec.verification.causal import CausalTarget
from ragspec.verification.cpu_weights import Packed, pack
from ragspec.verification.prefix_cache import common_length
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.static.buffers import Arena
from ragspec.verification.static.layout import MOST_QUERIES, queries_of, slots_of
from ragspec.verification.tree_attention import Configs, lease, model_configs

Visible = NDArray[np.bool_] | None  # slots that each new one attends to, [n, m]


class DraftCache:
    """The KV cache of one row in a draft model; call `read` and `extend` inside a `lease`.

    Args:
        model: One with steps of fixed shape takes them, and drafts static trees at once (`draft`).
        vocab_size: V of the target. The draft model's vocabulary may be padded to another size.
        capacity: Initial number of slots.

    Attributes:
        tokens: Ids of the tokens that have logits, i64 [v]; None for all V.
        step_type: The class of its forwards of fixed shape.
    """

    tokens: Tensor | None = None
    step_type: type[ForwardStep] = ForwardStep

    def __init__(self, model: CausalTarget, vocab_size: int, capacity: int) -> None:
        self.model, self.vocab_size, self.forwards = model, vocab_size, 0
        self._arena: Arena | None = None
        self._cache = SequenceCache(capacity, model.copies)
        if model.runner is not None:
            self._arena = model.runner.lend_arena(self, 1, capacity)
            self._cache = self._arena.caches[0]
        self._slots: dict[tuple[int, int], int] = {}
        self._ancestors: list[list[int]] = []  # of each slot of the draft, with itself
        self._drafted: list[int] = []  # the tokens of these slots
        self._path: list[int] = []  # those of them that the buffers have, if branches share none

    def __len__(self) -> int:
        """Return the number of committed tokens in the cache."""
        return self._cache.length

    @property
    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """The committed keys and values of each layer, [1, heads, n, width]."""
        return [pair for _, pair in sorted(self._cache.layers(len(self)).items())]

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Let the model use `tree_attention` and its packed weights inside the block."""
        if self.model.runs_alone():
            yield
            return
        configs, packs = self._modules
        leased = lease(self.model.model, configs) if configs else nullcontext()
        with leased, packs:  # a head's graph has no modules to change
            yield

    @cached_property
    def _modules(self) -> tuple[Configs, Packed]:
        """Their inputs for a forward through the modules."""
        return model_configs(self.model.model), Packed(pack(self.model.model))

    def readable(self, tokens: Sequence[int]) -> bool:
        """Return whether the text fits the model's context length and vocabulary."""
        fits = self.room(tokens) > 0
        return fits and max(tokens[min(len(self), len(tokens) - 1) :]) < self.model.input_size

    def room(self, tokens: Sequence[int]) -> int:
        """Return the depth of draft that the model's context length allows below this text."""
        limit = self.model.max_length
        return 1 << 30 if limit is None else limit - len(tokens) + 1

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read the missing part of the committed text; return the root's logits [1, v].

        An unfinished draft is dropped. The root is always read again, for its logits.
        """
        self._keep(len(tokens) - 1)
        return self._read(tokens[len(self) :])

    def _read(self, fresh: Sequence[int], more: int = 0) -> Tensor:
        """Read n tokens, commit all but the last `more`; return the last logits [1 + more, v]."""
        n, start = len(fresh), len(self)
        visible = None if start == 0 or n == 1 else np.tri(n, dtype=np.bool_)
        logits = self._forward(fresh, range(start, start + n), visible, 1 + more)
        self._cache.commit(range(n - more))
        return logits

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> Tensor:
        """Read n draft nodes below earlier ones; return their logits [n, v].

        Args:
            above: Slot of each parent, in the order of reading; -1 for the root.
        """
        n, before = len(tokens), len(self._ancestors)
        for slot, (token, parent) in enumerate(zip(tokens, above, strict=True), start=before):
            self._slots.setdefault((parent, token), slot)
            self._ancestors.append([slot] if parent == ROOT else [*self._ancestors[parent], slot])
        self._drafted += tokens
        if self.model.chains:
            return self._extend_path(before)
        related = np.zeros((n, before + n), dtype=np.bool_)
        for row, path in zip(related, self._ancestors[before:], strict=True):
            row[path] = True
        positions = [len(self) - 1 + len(path) for path in self._ancestors]
        return self._forward(tokens, positions, None if n == 1 and related.all() else related, n)

    def _extend_path(self, first: int) -> Tensor:
        """Read the slots from `first` on, chain by chain, as branches cannot share a forward.

        The buffers have one path, whose part that the next chain does not continue is read over.
        """
        parts, end = list[Tensor](), first
        while end < len(self._ancestors):
            start, path = end, self._ancestors[end]
            end += 1
            while end < len(self._ancestors) and self._ancestors[end] == [*path, end]:
                path, end = self._ancestors[end], end + 1
            same = common_length(path, self._path)
            self._cache.pending, self._path = same, path
            at = range(len(self), len(self) + len(path))
            fresh = [self._drafted[slot] for slot in path[same:]]
            parts.append(self._forward(fresh, at, None, end - start))
        return torch.cat(parts)

    def draft(
        self, tokens: Sequence[int], tree: TreeShape, levels: int, k: int
    ) -> tuple[Tensor, Tensor] | None:
        """Read the text and the first levels of a tree below it, in one call with one copy back.

        Prompts, and texts too long for a step, are read by usual forwards into the same slots.

        Args:
            k: Number of best tokens after each place.

        Returns:
            The best tokens after the root and after each of the `read_places`, best first, i64
            [R, k], and their log-probabilities up to a constant per row, f64 [R, k]. None if the
            model has no steps of fixed shape, one would exceed its context length, or a place has
            more than k children.
        """
        runner, arena, limit = self.model.runner, self._arena, self.model.max_length
        k = min(k, self.vocab_size)
        if arena is None or runner is None or tree.width > k:
            return None
        self.model.check_mode()
        self._keep(len(tokens) - 1)
        if len(tokens) - len(self) > MOST_QUERIES:
            with self.lease():
                self.read(tokens)
            self._keep(len(tokens) - 1)
        start, fresh = len(self), list(tokens[len(self) :])
        pending, places = queries_of(len(fresh)), read_places(tree, levels)
        if limit is not None and start + pending > limit:
            return None
        needed = start + pending + len(places.places)
        arena.reserve(needed)
        shape = LevelShape(tree, levels, pending, slots_of(needed, arena.slots), self.vocab_size, k)
        inputs = np.zeros((1, pending + 2), dtype=np.int64)
        inputs[0, : len(fresh)] = fresh
        inputs[0, pending:] = start, len(fresh)
        make = partial(LevelStep, self.model, runner.masks, arena, shape)
        _, (packet,) = runner.take(arena, shape, make, inputs, self._modules[0])
        self.forwards += 1 + len(places.bounds)
        self._cache.length, self._cache.pending = len(tokens), 0
        received: Tensor = packet.cpu()
        return received[0], received[1].view(torch.float64)

    @property
    def drafted(self) -> int:
        """The number of draft nodes read since the last commit."""
        return len(self._ancestors)

    def commit(self, tokens: Sequence[int]) -> None:
        """Keep the draft's nodes on the path of the emitted tokens; drop its other nodes.

        The last token is the next root. It is not kept, because its logits are needed.
        """
        if not self._ancestors:
            return
        path: list[int] = []
        for token in tokens[:-1]:
            slot = self._slots.get((path[-1] if path else ROOT, token))
            if slot is None:
                break
            path.append(slot)
        path = [*range(common_length(path, self._path))] if self.model.chains else path
        self._cache.commit(path)
        for each in (self._slots, self._ancestors, self._drafted, self._path):
            each.clear()

    def _keep(self, length: int) -> None:
        """Drop the draft and all tokens after the first `length`, the root included."""
        self.commit(())
        if length < len(self):
            self._cache.truncate(length)

    def _forward(
        self, tokens: Sequence[int], positions: Sequence[int], visible: Visible, keep: int
    ) -> Tensor:
        """Run one forward over n new slots; return the logits of the last `keep`: [keep, v].

        Args:
            positions: Logical positions of all m speculative slots, the n new ones last.
            visible: Slots that each new one attends to, bool [n, m]; None for plain causality.
        """
        device, n, before = self.model.device, len(tokens), self._cache.pending
        small = n <= MOST_QUERIES and before + queries_of(n) <= MOST_DRAFTED
        if small and (outputs := self._stepped(tokens, positions, visible)):
            return self._fitted(outputs[0][n - keep : n])
        # One array, so that it takes one copy to the device.
        numbers = torch.from_numpy(np.array([[*positions, *tokens]])).to(device)
        m = len(positions)
        related = None if visible is None else torch.from_numpy(visible)[None].to(device)
        view = TreeView(len(self), numbers[:, m - n : m], numbers[:, :m], related)
        self.forwards += 1
        batch = Batch([self._cache], [view])  # a graph writes into buffers that have room
        return self._fitted(self.model.forward(numbers[:, m:], batch, keep)[0])

    def _fitted(self, logits: Tensor) -> Tensor:
        return logits if self.tokens is not None else fit(logits, self.vocab_size)

    def _stepped(
        self, tokens: Sequence[int], positions: Sequence[int], visible: Visible
    ) -> list[Tensor]:
        """Run a forward as a step of fixed shape; return its outputs, none if there are no such."""
        arena, runner, n = self._arena, self.model.runner, len(tokens)
        if arena is None or runner is None:
            return []
        self.model.check_mode()
        size = queries_of(n)
        arena.reserve(self._cache.extent + size)
        shape = ForwardShape(size, slots_of(self._cache.extent + size, arena.slots))
        if visible is None:
            visible = np.tri(n, len(positions), len(positions) - n, dtype=np.bool_)
        inputs = shape.packet(tokens, positions, visible, len(self))
        make = partial(self.step_type, self.model, runner.masks, arena, shape)
        _, outputs = runner.take(arena, shape, make, inputs, self._modules[0])
        self.forwards += 1
        self._cache.pending += n
        return [torch.clone(each) for each in outputs]  # the next step overwrites them

    def whole(self, logits: Tensor) -> Tensor:
        """Return logits [n, v] as [n, V], with minus infinity for tokens that have none."""
        if self.tokens is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        whole[:, self.tokens] = logits
        return whole
