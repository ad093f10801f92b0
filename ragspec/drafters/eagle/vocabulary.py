"""The tokens that a head may draft: the most frequent ones only, as FR-Spec (arXiv 2502.14856).

Most of a small head's time goes into the target's output head, which knows the whole vocabulary;
of 8 thousand frequent tokens it costs a sixth of that, and tokens left out are never drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from ragspec.errors import InputError, UnsupportedModelError
from ragspec.verification.causal import CausalTarget


def frequent_tokens(texts: Sequence[Sequence[int]], size: int, vocab_size: int) -> tuple[int, ...]:
    """Return the `size` most frequent tokens of texts, in the order of their ids.

    Where texts hold fewer, the lowest ids fill up: merges come first that were frequent when the
    tokenizer was made. Ids that can be read but not written do not count. Raises InputError where
    the vocabulary has not so many.
    """
    if not 1 <= size <= vocab_size:
        raise InputError(
            f"got a head's vocabulary of {size} tokens; expected 1 to {vocab_size}, all that the "
            "model has."
        )
    counts = Counter(token for token in chain.from_iterable(texts) if token < vocab_size)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    fill = (token for token in range(vocab_size) if token not in counts)
    return tuple(sorted(token for _, token in zip(range(size), chain(ranked, fill), strict=False)))


class DraftVocabulary(nn.Module):
    """The rows of a target's output head that belong to the tokens of a head.

    tokens i64 [v]: increasing ids. Raises UnsupportedModelError for an output head that is not
    one linear map, and for a target that combines several rows of states (guidance).
    """

    def __init__(self, target: CausalTarget, tokens: torch.Tensor) -> None:
        super().__init__()
        output = target.output_head
        if not isinstance(output, nn.Linear) or target.copies > 1:
            raise UnsupportedModelError(
                f"the output head of {type(target.model).__name__} is no single linear map "
                f"({type(output).__name__}, {target.copies} row(s) a text); expected one for a "
                "reduced vocabulary. Train the head without --vocabulary."
            )
        tokens = tokens.to(output.weight.device)
        self.tokens, self.size = tokens, target.vocab_size
        self.rows = nn.Linear(output.in_features, len(tokens), device="meta")
        self.rows.weight = _frozen(output.weight[tokens])
        self.rows.bias = None if output.bias is None else _frozen(output.bias[tokens])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., v] of states [..., H]."""
        logits: torch.Tensor = self.rows(states)
        return logits

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [..., v] as [..., V]; minus infinity for all other tokens."""
        whole = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        whole[..., self.tokens] = logits
        return whole


def _frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)
