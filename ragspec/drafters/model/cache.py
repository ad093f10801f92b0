"""The cache of a draft model: one text and, above it, a draft that grows forward by forward.

A draft tree needs one forward per level. The nodes that were read so far stay in the speculative
slots; each new one attends to the text, to its ancestors among them and to itself. What the target
accepts of a draft stays in the cache, found by its tokens: the verified tree may hold other
drafters' nodes, or lack some of these.
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
from ragspec.verification.kv_cache import SlotCache
from ragspec.verification.tree_attention import TreeView, model_configs

_FIRST_SIZE = 64


KnownDistribution = tuple[int, list[int], list[float]]
"""(node, tokens [k], chances [k]): what follows the node, most preferred first; -1 is the root.
A chance is the estimated probability that the target's choice there is that token."""


class DraftCache:
    """One row of text in a draft model. Call it inside a `lease`.

    vocab_size: V of the distributions that are returned, the target's; the draft model's own
    vocabulary may be padded to another size. capacity: slots to begin with.
    """

    def __init__(self, model: CausalTarget, vocab_size: int, capacity: int = _FIRST_SIZE) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.forwards = 0
        self._configs = model_configs(model.model)
        self._packs = Packed(pack(model.model))
        self._cache = SlotCache(1, capacity, model.copies)
        self._slots: dict[tuple[int, int], int] = {}
        self._depths: list[int] = []
        # seen[i, j]: draft slot i sees draft slot j. The last row is the root's, which sees none.
        self._visible = np.zeros((_FIRST_SIZE + 1, _FIRST_SIZE), dtype=np.bool_)

    def __len__(self) -> int:
        """Return the committed tokens in the cache."""
        return self._cache.book.lengths[0]

    def lease(self) -> AbstractContextManager[None]:
        """Let the model attend through `tree_attention`, with its packs, inside the block."""
        return lend(self.model.model, self._configs, self._packs)

    def readable(self, tokens: Sequence[int]) -> bool:
        """Return whether the model can go on from this text: its context and its vocabulary."""
        limit = self.model.max_length
        if limit is not None and len(tokens) > limit:
            return False
        return max(tokens[min(len(self), len(tokens) - 1) :]) < self.model.input_size

    def room(self, tokens: Sequence[int]) -> int:
        """Return how deep a draft below this text may be, by the model's context."""
        limit = self.model.max_length
        return 1 << 30 if limit is None else limit - len(tokens) + 1

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read what the cache lacks of the committed text; return the root's logits [1, V].

        An unfinished draft is dropped. The root is always read again, for its logits.
        """
        self._keep(len(tokens) - 1)
        start, fresh = len(self), list(tokens[len(self) :])
        n = len(fresh)
        causal = start == 0 or n == 1
        visible = None if causal else np.tri(n, dtype=np.bool_)
        logits = self._forward(fresh, list(range(start, start + n)), visible, 1)
        self._cache.commit([range(n)])
        return logits

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> Tensor:
        """Read n draft nodes below earlier ones; return their logits [n, V].

        above: the slot of each one's parent, -1 for the root. Slots count from 0 in the order in
        which nodes are read.
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
        known = None if n == 1 and related.all() else related
        return self._forward(tokens, positions, known, n)

    def _root(self) -> int:
        """Return the logical position of the root, which was read."""
        return len(self) - 1

    @property
    def drafted(self) -> int:
        """The number of draft nodes that were read since the last commit."""
        return len(self._depths)

    def commit(self, tokens: Sequence[int]) -> None:
        """Keep what the draft holds of the emitted tokens, drop the rest of it.

        The last token is the next root and is not kept: its logits will be asked for.
        """
        if not self._depths:
            return
        selected: list[int] = []
        at = ROOT
        for token in tokens[:-1]:
            result = self._slots.get((at, token))
            if result is None:
                break
            selected.append(result)
            at = result
        self._cache.commit([selected])
        self._slots.clear()
        self._depths.clear()

    def _keep(self, length: int) -> None:
        """Drop the draft, and the root where it was read before; keep `length` tokens."""
        self.commit(())
        if length < len(self):
            self._cache.truncate(0, length)

    def _forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        visible: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None,
        keep: int,
    ) -> Tensor:
        """Run one forward over n new slots; return the logits of the last `keep`: [keep, V].

        positions: logical positions of all speculative slots, the n new ones last. seen bool
        [n, m]: which of those slots each new one sees, None where plain causality is right.
        """
        device, n = self.model.device, len(tokens)
        self._before(n)
        # One array, so that one copy brings it to the device.
        numbers = torch.from_numpy(np.array([[*positions, *tokens, len(self)]])).to(device)
        m = len(positions)
        view = TreeView(
            lengths=numbers[0, -1:],
            positions=numbers[:, m - n : m],
            slot_positions=numbers[:, :m],
            related=None if visible is None else torch.from_numpy(visible)[None].to(device),
        )
        self.forwards += 1
        logits = self.model.forward(numbers[:, m : m + n], view, self._cache, keep)
        return fitted(logits[0], self.vocab_size)

    def _before(self, n: int) -> None:
        """Make ready for a forward over n tokens; nothing by default, as the slots grow."""

    def _grow(self, needed: int) -> None:
        size = self._visible.shape[1]
        if needed > size:
            grown = np.zeros((2 * needed + 1, 2 * needed), dtype=np.bool_)
            grown[:size, :size] = self._visible[:size]
            self._visible = grown
        # Slots are used again step after step: clear what an earlier draft left.
        self._visible[len(self._depths) : needed] = False


@dataclass(frozen=True, slots=True)
class DraftState:
    """What a draft grows from and how far it may grow.

    cache: holds the text, its last token (the root) included. logits [1, V]: the draft model's at
    the root. budget: the most nodes. depth: the deepest node. min_expected_gain: growth ends when
    the next forward is expected to add fewer accepted nodes.
    """

    cache: DraftCache
    logits: Tensor
    context: DraftContext
    budget: int
    depth: int
    min_expected_gain: float


def fitted(logits: Tensor, size: int) -> Tensor:
    """Return logits [n, V] over the target's vocabulary: padding cut off, or put at -inf."""
    width = logits.shape[-1]
    if width == size:
        return logits
    if width > size:
        return logits[:, :size]
    return torch.nn.functional.pad(logits, (0, size - width), value=float("-inf"))
