"""Prompt lookup: the tokens behind an earlier occurrence of the last few tokens.

After Saxena's prompt-lookup-decoding (2023) and transformers' `PromptLookupCandidateGenerator`:
n-grams from the longest down to the shortest, the leftmost occurrence, a chain of a fixed length.
Deviations: the request's further texts are searched too; acceptance probabilities depend on the
length of the match; the end of the text and forbidden tokens are left to the rule.
"""

from array import array

import numpy as np
from numpy.typing import NDArray

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.method import Method
from ragspec.needs import Needs
from ragspec.retrievers.indexes.context_index import RequestText
from ragspec.retrievers.methods.context import ACCEPT_PRIOR
from ragspec.sampling.settings import checked_count
from ragspec.trees.draft_tree import DraftTree

_BORDER = -1


class LookupDrafter(Drafter):
    """Copies the tokens that followed an earlier occurrence of the last few tokens.

    Args:
        longest, shortest: Sizes of the n-grams to look for, the longest first (transformers and
            Saxena: 2 and 3 down to 1).
        tokens: Most tokens to copy.

    Raises:
        InputError: A size is below 1, or `shortest` is above `longest`.
    """

    method = Method("the same text, by its last tokens", "PLD", colour=7)
    name = "lookup"
    needs = Needs(texts=True)

    def __init__(self, longest: int = 3, shortest: int = 1, tokens: int = 10) -> None:
        self.shortest = checked_count(shortest, "shortest")
        self.longest = checked_count(longest, "longest", self.shortest)
        self.tokens = checked_count(tokens, "tokens")

    def open(self, request: DraftRequest) -> "LookupSession":
        """Return a session that holds the request's tokens."""
        return LookupSession(self, request)


class LookupSession(DraftSession):
    """The tokens of one row, and the size of the last matched n-gram; see `LookupDrafter`."""

    def __init__(self, drafter: LookupDrafter, request: DraftRequest) -> None:
        self._drafter = drafter
        self.matched: int = 0
        self._text = RequestText(request)
        texts = (token for text in request.texts for token in (*text.tokens, _BORDER))
        self._tokens = array("i", texts)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` nodes, no deeper than the remaining tokens."""
        self._tokens.extend(context.tokens[len(self._tokens) - self._text.base :])
        n = min(budget, context.remaining - 1, self._drafter.tokens)
        start = self._find() if n > 0 else -1
        if start < 0:
            self.matched = 0
            return DraftTree.empty()
        copied = self._tokens[start : start + n].tolist()
        copied = copied[: copied.index(_BORDER)] if _BORDER in copied else copied
        chances = chain_accept_prob(self.matched, len(copied))
        origin = [self._text.origin(start + i) for i in range(len(copied))]
        return DraftTree.chain(copied, self._drafter.name, accept_prob=chances, origin=origin)

    def _find(self) -> int:
        """Return the position behind the match, to copy from, -1 without a match."""
        drafter, held = self._drafter, np.frombuffer(self._tokens, np.intc)
        starts = np.flatnonzero(held[:-1] == held[-1]) + 1
        starts, first = starts[held[starts] != _BORDER], -1
        for n in range(1, min(drafter.longest, len(held) - self._text.base) + 1):
            if n > 1:
                starts = starts[starts >= n]
                starts = starts[held[starts - n] == held[-n]]
            if not len(starts):
                break
            if n >= drafter.shortest:
                self.matched, first = n, int(starts[0])
        return first


def chain_accept_prob(matched: int, n: int) -> NDArray[np.float32]:
    """Return the acceptance f32 [n] of a copy of n tokens behind a match of `matched` tokens."""
    chances = [ACCEPT_PRIOR[min(matched + i, len(ACCEPT_PRIOR) - 1)] for i in range(n)]
    return np.cumprod(np.asarray(chances, dtype=np.float64)).astype(np.float32)
