"""The cache of a feature head: one text and, above it, a draft that feeds on its own guesses.

A slot holds the pair of a token and the target's state at the token before it. Of the text these
states are the target's own and are told, parts of the prompt at once and then step by step; pairs
stand where their tokens do in the text, so that a part that is not told leaves a gap. Below the
root a node is paired with the state that the head guessed at its parent. So nothing of a draft is
kept: what was accepted is read again, with the states that the target has told meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.eagle.head import DraftVocabulary, FeatureHead
from ragspec.drafters.model.cache import DraftCache
from ragspec.verification.causal import CausalTarget
from ragspec.verification.kv_cache import SlotCache
from ragspec.verification.tree_attention import TreeView, tree_view


class HeadModel(CausalTarget):
    """A head as something that reads tokens: it is given the states before them, see `states`.

    vocabulary: the tokens that it may draft; None: all.
    states [copies, n, H]: for the next forward. guessed [copies, n, H]: what came of the last.
    first: the position of the token in slot 0.
    """

    def __init__(
        self, head: FeatureHead, target: CausalTarget, vocabulary: DraftVocabulary | None = None
    ) -> None:
        self.head = head
        self.vocabulary = vocabulary
        self.target = target
        self.model = head.layer
        self.vocab_size, self.input_size = target.vocab_size, target.input_size
        self.max_length, self.copies = target.max_length, target.copies
        self.device, self.dtype = target.device, target.dtype
        self.keeps_logits = True
        self.states = self.guessed = torch.empty(0)
        self.first = 1

    def forward(
        self, tokens: Tensor, view: TreeView, cache: SlotCache, keep: int | Tensor
    ) -> Tensor:
        """Return the target's logits [1, k, V] of the last k guesses; see `CausalTarget`."""
        with tree_view(view), torch.no_grad():
            embedded = self.target.embed(tokens)
            self.guessed = self.head(embedded, self.states, view.positions, cache)
            cache.advance(tokens.shape[1])
            rows = slice(-keep, None) if isinstance(keep, int) else keep
            states = self.guessed[:, rows].to(self.dtype)
            if self.vocabulary is not None:
                return self.vocabulary.spread(self.vocabulary(states))
            return self.target.head_logits(states, view.positions[:, rows] + self.first)


class HeadCache(DraftCache):
    """One row of text in a head. Call it inside a `lease`; see `DraftCache`."""

    def __init__(self, model: HeadModel, vocab_size: int, capacity: int) -> None:
        super().__init__(model, vocab_size, capacity)
        self._head = model
        self._places: list[int] = []  # of the tokens whose states are known, in the text
        self._states = torch.empty(0)
        self._guessed = torch.empty(0)

    def notify(self, states: Tensor, first: int | None = None) -> None:
        """Learn the target's states [copies, n, H] at n tokens of the text.

        first: the position of the first of them, behind all that was told; None: the next one.
        """
        known = len(self._places)
        if first is None:
            first = self._places[-1] + 1 if known else 0
        if not known:
            self._head.first = first + 1
            self._states = states.new_empty(states.shape[0], 0, states.shape[2])
        end = known + states.shape[1]
        if end > self._states.shape[1]:
            grown = states.new_empty(states.shape[0], 2 * end, states.shape[2])
            grown[:, :known] = self._states[:, :known]
            self._states = grown
        self._states[:, known:end] = states
        self._places.extend(range(first, first + states.shape[1]))

    def readable(self, tokens: Sequence[int]) -> bool:
        """Return whether the states of the text's end are known, and it may be read."""
        pairs = self._pairs(len(tokens))
        known = pairs > 0 and self._places[pairs - 1] == len(tokens) - 2
        return known and super().readable(tokens)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read what the cache lacks of the text; return the root's logits [1, V]."""
        end = self._pairs(len(tokens))
        self._keep(end - 1)
        start = len(self)
        places = self._places[start:end]
        fresh = [tokens[place + 1] for place in places]
        n = len(fresh)
        causal = start == 0 or n == 1
        visible = None if causal else np.tri(n, dtype=np.bool_)
        self._head.states = self._states[:, start:end]
        positions = [place - self._places[0] for place in places]
        logits = self._forward(fresh, positions, visible, 1)
        self._guessed = self._head.guessed[:, -1:]
        self._cache.commit([range(n)])
        return logits

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> Tensor:
        """Read n draft nodes, see `DraftCache.extend`; logits [n, V].

        Their parents must have been read by earlier calls: a node needs the guess above it.
        """
        parents = torch.tensor(above, device=self._guessed.device) + 1
        self._head.states = self._guessed[:, parents]
        logits = super().extend(tokens, above)
        self._guessed = torch.cat([self._guessed, self._head.guessed], 1)
        return logits

    def commit(self, tokens: Sequence[int]) -> None:
        """Drop the draft: its pairs were guesses."""
        super().commit(())

    def _root(self) -> int:
        return self._places[len(self) - 1] - self._places[0]

    def _pairs(self, length: int) -> int:
        """Return how many pairs there are of the first so many tokens of the text."""
        return bisect_left(self._places, length - 1)
