"""The KV cache of a draft head: one text and a draft that continues from predicted states.

A slot holds a token paired with the hidden state at the token before it. For the text these are the
target's states, which arrive for the end of the prompt and then step by step. Below the root a node
is paired with the state that the head predicted at its parent. So no slot of a draft is kept:
accepted tokens are read again, with the target's own states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ragspec.drafters.heads.graph import HeadGraph
from ragspec.drafters.heads.head import DraftHead
from ragspec.drafters.model.cache import DraftCache
from ragspec.verification.batch_cache import BatchCache
from ragspec.verification.causal import CausalTarget
from ragspec.verification.tree_attention import View, tree_view


class HeadModel(CausalTarget):
    """A draft head with the interface of a `CausalTarget`; set `states` before each forward.

    Args:
        rows: See `DraftHead.rows`; a `HeadGraph` has its own.

    Attributes:
        states: Hidden states before the tokens of the next forward [copies, n, H].
        guessed: Hidden states that the last forward predicted [copies, n, H].
        first: Position of the token in slot 0.
    """

    def __init__(
        self, head: DraftHead | HeadGraph, target: CausalTarget, rows: nn.Module | None = None
    ) -> None:
        self.head, self._rows = head, rows
        self.target = target
        self.model = head.layers
        self.vocab_size, self.input_size = target.vocab_size, target.input_size
        self.max_length, self.copies = target.max_length, target.copies
        self.keeps_logits = True
        self.states = self.guessed = torch.empty(0)
        self.first = 1

    @property
    def device(self) -> torch.device:
        """The device of the target."""
        return self.target.device

    def project(self, states: Tensor) -> Tensor:
        """Return what the head reads of its taps."""
        with torch.no_grad():
            return self.head.project(states).to(self.target.dtype)

    def forward(self, tokens: Tensor, view: View, cache: BatchCache, keep: int | Tensor) -> Tensor:
        """Return the logits [1, k, v] of the last k predicted states; see `CausalTarget`."""
        n = tokens.shape[1]
        with tree_view(view), torch.no_grad():
            embedded = self.head.embed(self.target, tokens)
            if isinstance(self.head, HeadGraph):
                last = torch.arange(n - keep, n) if isinstance(keep, int) else keep
                logits, self.guessed = self.head.run(embedded, self.states, view, cache, last)
                cache.advance(n)
                return logits
            read, self.guessed = self.head.read(embedded, self.states, view, cache)
            cache.advance(n)
            rows = slice(-keep, None) if isinstance(keep, int) else keep
            states = read[:, rows].to(self.target.dtype)
            if self._rows is not None:
                rows_logits: Tensor = self._rows(states)
                return rows_logits
            return self.target.head_logits(states, view.positions[:, rows] + self.first)


class HeadCache(DraftCache):
    """The KV cache of one row in a draft head; see `DraftCache`."""

    def __init__(self, model: HeadModel, vocab_size: int, capacity: int) -> None:
        super().__init__(model, vocab_size, capacity)
        self._head, self.tokens = model, model.head.tokens
        self._first = self._count = 0  # place of the first token with a state, and their number
        self._states = torch.empty(0)
        self._guessed = torch.empty(0)

    def notify(self, states: Tensor, first: int = 0) -> None:
        """Append the target's states at n tokens of the text.

        Args:
            states: The head's taps side by side [copies, n, H times taps].
            first: Place of the first of all in the text.
        """
        count = self._count
        states = self._head.project(states)
        if not count:
            self._first, self._head.first = first, first + 1
            self._states = states.new_empty(states.shape[0], 0, states.shape[2])
        end = count + states.shape[1]
        if end > self._states.shape[1]:
            grown = states.new_empty(states.shape[0], 2 * end, states.shape[2])
            grown[:, :count] = self._states[:, :count]
            self._states = grown
        self._states[:, count:end] = states
        self._count = end

    def readable(self, tokens: Sequence[int]) -> bool:
        """Return whether the state before the root is there and the text fits the model."""
        pairs = self._pairs(len(tokens))
        complete = pairs > 0 and self._first + pairs == len(tokens) - 1
        return complete and super().readable(tokens)

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read the missing part of the text; return the root's logits [1, v]."""
        end = self._pairs(len(tokens))
        self._keep(end - 1)
        start = len(self)
        self._head.states = self._states[:, start:end]
        fresh = tokens[self._first + start + 1 : self._first + end + 1]
        logits = self._read(fresh, range(start, end))
        self._guessed = self._head.guessed[:, -1:]
        return logits

    def extend(self, tokens: Sequence[int], above: Sequence[int]) -> Tensor:
        """Read n draft nodes; return their logits [n, v], see `DraftCache.extend`.

        Earlier calls must have read their parents: a node needs the predicted state there.
        """
        parents = torch.tensor(above, device=self._guessed.device) + 1
        self._head.states = self._guessed[:, parents]
        logits = super().extend(tokens, above)
        self._guessed = torch.cat([self._guessed, self._head.guessed], 1)
        return logits

    def commit(self, tokens: Sequence[int]) -> None:
        """Drop the draft, whose states are only predicted."""
        super().commit(())

    def _pairs(self, length: int) -> int:
        """Return the number of pairs in the first `length` tokens of the text."""
        return max(0, min(self._count, length - 1 - self._first))
