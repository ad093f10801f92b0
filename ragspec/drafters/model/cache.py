"""The KV cache of a draft model: one text and a draft that grows level by level.

A draft tree needs one forward per level. The nodes of earlier levels stay in the speculative slots.
A new node attends to the text, to its ancestors and to itself. Accepted nodes stay in the cache.
They are identified by their tokens, because the verified tree may lack some of these nodes or have
nodes of other drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.base import DraftContext
from ragspec.trees.draft_tree import ROOT
from ragspec.verification.causal import CausalTarget
from ragspec.verification.cpu_weights import Packed, lend, pack
from ragspec.verification.sequence_cache import BatchCache, SequenceCache
from ragspec.verification.tree_attention import TreeView, model_configs

_FIRST_SIZE = 64


class DraftCache:
    """The KV cache of one row in a draft model; call its methods inside a `lease`.

    Args:
        vocab_size: V of the target, the size of returned logits. The draft model's vocabulary may
            be padded to another size.
        capacity: Initial number of slots.
    """

    def __init__(self, model: CausalTarget, vocab_size: int, capacity: int = _FIRST_SIZE) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.forwards = 0
        self._configs = model_configs(model.model)
        self._packs = Packed(pack(model.model))
        self._cache = SequenceCache(capacity, model.copies)
        self._slots: dict[tuple[int, int], int] = {}
        self._depths: list[int] = []
        # [i, j]: draft slot i attends to draft slot j. The last row is the root's: to none.
        self._visible = np.zeros((_FIRST_SIZE + 1, _FIRST_SIZE), dtype=np.bool_)

    def __len__(self) -> int:
        """Return the number of committed tokens in the cache."""
        return self._cache.length

    def lease(self) -> AbstractContextManager[None]:
        """Return a context in which the model uses `tree_attention` and its packed weights."""
        return lend(self.model.model, self._configs, self._packs)

    def readable(self, tokens: Sequence[int]) -> bool:
        """Return whether the text fits the model's context length and vocabulary."""
        limit = self.model.max_length
        if limit is not None and len(tokens) > limit:
            return False
        return max(tokens[min(len(self), len(tokens) - 1) :]) < self.model.input_size

    def room(self, tokens: Sequence[int]) -> int:
        """Return the depth of draft that the model's context length allows below this text."""
        limit = self.model.max_length
        return 1 << 30 if limit is None else limit - len(tokens) + 1

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read the missing part of the committed text; return the root's logits [1, V].

        An unfinished draft is dropped. The root is always read again, for its logits.
        """
        self._keep(len(tokens) - 1)
        return self._read(tokens[len(self) :], range(len(self), len(tokens)))

    def _read(self, fresh: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Read and commit n tokens; return the logits [1, V] after the last one."""
        n = len(fresh)
        causal = len(self) == 0 or n == 1
        logits = self._forward(fresh, positions, None if causal else np.tri(n, dtype=np.bool_), 1)
        self._cache.commit(range(n))
        return logits

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> Tensor:
        """Read n draft nodes below earlier ones; return their logits [n, V].

        Args:
            above: Slot of each node's parent, -1 for the root. Slots count from 0 in the order of
                reading.
        """
        n, before = len(tokens), len(self._depths)
        self._grow(before + n)
        for slot, (token, parent) in enumerate(zip(tokens, above, strict=True), start=before):
            self._slots.setdefault((parent, token), slot)
            self._depths.append(1 if parent == ROOT else self._depths[parent] + 1)
            self._visible[slot] = self._visible[parent]
            self._visible[slot, slot] = True
        related = self._visible[before : before + n, : before + n]
        root = self._root()
        positions = [root + depth for depth in self._depths]
        visible = None if n == 1 and related.all() else related
        return self._forward(tokens, positions, visible, n)

    def _root(self) -> int:
        """Return the logical position of the root."""
        return len(self) - 1

    @property
    def drafted(self) -> int:
        """The number of draft nodes read since the last commit."""
        return len(self._depths)

    def commit(self, tokens: Sequence[int]) -> None:
        """Keep the draft's nodes on the path of the emitted tokens; drop its other nodes.

        The last token is the next root. It is not kept, because its logits are needed.
        """
        if not self._depths:
            return
        path: list[int] = []
        for token in tokens[:-1]:
            slot = self._slots.get((path[-1] if path else ROOT, token))
            if slot is None:
                break
            path.append(slot)
        self._cache.commit(path)
        self._slots.clear()
        self._depths.clear()

    def _keep(self, length: int) -> None:
        """Drop the draft and all tokens after the first `length`, the root included."""
        self.commit(())
        if length < len(self):
            self._cache.truncate(length)

    def _forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        visible: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None,
        keep: int,
    ) -> Tensor:
        """Run one forward over n new slots; return the logits of the last `keep`: [keep, V].

        Args:
            positions: Logical positions of all m speculative slots, the n new ones last.
            visible: Slots that each new one attends to, bool [n, m]; None for plain causality.
        """
        device, n = self.model.device, len(tokens)
        self._before(n)
        # One array, so that it takes one copy to the device.
        numbers = torch.from_numpy(np.array([[*positions, *tokens, len(self)]])).to(device)
        m = len(positions)
        view = TreeView(
            lengths=numbers[0, -1:],
            positions=numbers[:, m - n : m],
            slot_positions=numbers[:, :m],
            related=None if visible is None else torch.from_numpy(visible)[None].to(device),
        )
        self.forwards += 1
        cache = BatchCache([self._cache])
        logits = self.model.forward(numbers[:, m : m + n], view, cache, keep)
        return fitted(logits[0], self.vocab_size)

    def _before(self, n: int) -> None:
        """Prepare a forward over n tokens; nothing by default, because the slots grow."""

    def _grow(self, needed: int) -> None:
        size = self._visible.shape[1]
        if needed > size:
            grown = np.zeros((2 * needed + 1, 2 * needed), dtype=np.bool_)
            grown[:size, :size] = self._visible[:size]
            self._visible = grown
        # Slots are used again in every step: clear the rows of an earlier draft.
        self._visible[len(self._depths) : needed] = False


@dataclass(frozen=True, slots=True)
class DraftState:
    """The start of a draft and the limits of its growth.

    Attributes:
        cache: Contains the text, the root included.
        logits: The draft model's logits at the root [1, V].
        budget: Largest number of nodes.
        depth: Largest depth of a node.
        min_expected_gain: Growth ends when the next forward is expected to add fewer accepted
            nodes.
    """

    cache: DraftCache
    logits: Tensor
    context: DraftContext
    budget: int
    depth: int
    min_expected_gain: float


def fitted(logits: Tensor, size: int) -> Tensor:
    """Return logits [n, V] cut off or padded with -inf to the target's vocabulary size."""
    width = logits.shape[-1]
    if width == size:
        return logits
    if width > size:
        return logits[:, :size]
    return torch.nn.functional.pad(logits, (0, size - width), value=float("-inf"))
