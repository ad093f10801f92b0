"""REST: draft what followed the last tokens in a corpus (arXiv 2311.08252).

Section 3: the longest suffix of 16 to 2 tokens that occurs in a datastore is looked up exactly. The
texts that followed it form a trie by counts, and the most frequent prefixes are drafted.
Deviations:
- The length comes from a binary search (an interval of the suffix array only narrows with length),
  and goes down to one token.
- Counts are exact, or sampled at a stride, never taken from the first rows in lexicographic order.
- No continuation runs into the next document, and shorter suffixes fill the rest of the tree.
- Several segments answer as one text, each weighted by its number of occurrences.
- Nodes are ranked by estimated acceptance, which the budget `auto` corrects (`budget.goodput`).

Nodes have no origin, since a request cannot cite documents of the corpus.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.method import Method
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.indexes.segment import Draft, DraftOptions, Segment
from ragspec.sampling.settings import checked_count
from ragspec.storage.store import checked_scope
from ragspec.trees.draft_tree import ROOT, DraftTree

LONGEST, SHORTEST, DEPTH = 16, 1, 16
_OTHERS = 0.5  # share of the longest match's miss probability for segments with a shorter match
_LEAST = 0.01


class _Corpus(Protocol):
    """The part of a `CorpusIndex` that a REST drafter needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def depth(self) -> int: ...
    def segments(self, scope: str) -> tuple[Segment, ...]: ...
    def fits(self, model: object = None, tokenizer: object = None) -> None: ...


class RestDrafter(Drafter):
    """Drafts from the text of a corpus that is visible in a scope when a request opens.

    Args:
        longest, shortest: Tokens of the suffix that is looked up.
        depth: Levels of the tree; at most the depth of the corpus less `longest`.
        shorter: Lengths to fall back on if the longest match leaves nodes free; () for the longest
            match alone, as in the paper.
        name: Name of the source in reports.

    Raises:
        InputError: A setting is out of range.
    """

    method = Method(
        "a store of text",
        "REST",
        make=lambda sources: sources.past(),
        needs=frozenset({"store"}),
        colour=1,
    )

    def __init__(
        self,
        corpus: _Corpus,
        scope: str = "global",
        *,
        longest: int = LONGEST,
        shortest: int = SHORTEST,
        depth: int = DEPTH,
        shorter: Sequence[int] | None = None,
        name: str = "rest",
    ) -> None:
        if not hasattr(corpus, "segments"):
            raise InputError(f"got {corpus!r} as the corpus; expected that of CorpusIndex.open().")
        self.shortest = checked_count(shortest, "shortest")
        longest = checked_count(longest, "longest", self.shortest)
        depth = checked_count(depth, "depth")
        if (both := longest + depth) > corpus.depth:
            raise InputError(f"longest + depth is {both}; expected at most {corpus.depth}.")
        if shorter is None:
            shorter = [length for length in DraftOptions().shorter if length >= shortest]
        self.name, self.corpus, self.scope = name, corpus, checked_scope(scope)
        self.options = DraftOptions(longest, depth, shorter=tuple(shorter))

    def fits(self, model: object = None, tokenizer: object = None) -> None:
        """Raise StoreError if the corpus was made with another model or tokenizer."""
        self.corpus.fits(model, tokenizer)

    def open(self, request: DraftRequest) -> "RestSession":
        """Return a session over the present text; raise StoreError if the model lacks its ids."""
        if self.corpus.vocab_size > request.vocab_size:
            raise StoreError(
                f"the corpus has {self.corpus.vocab_size} token ids, the model {request.vocab_size}"
                "; expected a corpus built with the model's own tokenizer: build it again."
            )
        return RestSession(self, self.corpus.segments(self.scope))


class RestSession(DraftSession):
    """A snapshot of a corpus for one row; see `RestDrafter`."""

    def __init__(self, drafter: RestDrafter, segments: Sequence[Segment]) -> None:
        self._drafter, self._segments = drafter, segments
        self.matched = 0

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the at most `budget` likeliest nodes, no deeper than the remaining tokens."""
        drafter, options = self._drafter, self._drafter.options
        self.matched, trees = 0, list[tuple[Draft, float]]()
        if budget < 1 or context.remaining < 2:
            return DraftTree.empty()
        tail = context.tokens[-options.max_match :]
        shares = [(self._segments[0], 1.0)] if len(self._segments) == 1 else self._shares(tail)
        for segment, share in shares:
            draft = segment.draft(tail, budget, max_depth=context.remaining - 1, options=options)
            if draft.length >= drafter.shortest and len(draft.tokens):
                trees.append((draft, share))
        if not trees:
            return DraftTree.empty()
        draft, share = trees[0] if len(trees) == 1 else (_pooled(trees, budget), 1.0)
        self.matched = draft.length
        accept_prob = (draft.accept_prob * share).astype(np.float32)
        return DraftTree.build(draft.tokens, draft.parents, drafter.name, accept_prob=accept_prob)

    def _shares(self, tail: list[int]) -> list[tuple[Segment, float]]:
        """Return the segments that match the context, and the weight of each.

        Segments with the longest match share a weight of 1 by occurrences. The others share a part
        of the probability that this match fails; the rest is left to its shorter suffixes.
        """
        options, shortest = self._drafter.options, self._drafter.shortest
        matches = [(each, each.longest_match(tail, options.max_match)) for each in self._segments]
        matches = [pair for pair in matches if pair[1].length >= shortest]
        longest = max((match.length for _, match in matches), default=0)
        total = {True: 0, False: 0}
        for _, match in matches:
            total[match.length == longest] += match.high - match.low
        weights = {True: 1.0, False: _OTHERS * (1.0 - float(options.chances[0, longest, 0]))}
        shares = []
        for segment, match in matches:
            first = match.length == longest
            share = weights[first] * (match.high - match.low) / total[first]
            if share > _LEAST:
                shares.append((segment, share))
        return shares


def _pooled(trees: Sequence[tuple[Draft, float]], budget: int) -> Draft:
    """Return the best nodes of several trees, merged with their probabilities added by share."""
    accept_prob = defaultdict[tuple[int, ...], float](float)  # by path of tokens
    for draft, share in trees:
        paths: list[tuple[int, ...]] = []
        columns = (draft.tokens, draft.parents, draft.accept_prob)
        for token, parent, chance in zip(*(c.tolist() for c in columns), strict=True):
            paths.append((token,) if parent == ROOT else (*paths[parent], token))
            accept_prob[paths[-1]] += share * chance
    best = sorted(accept_prob, key=lambda path: -accept_prob[path])[:budget]
    number = {path: node for node, path in enumerate(best)} | {(): ROOT}
    return Draft(
        np.array([path[-1] for path in best], np.int64),
        np.array([number[path[:-1]] for path in best], np.int64),
        np.array([accept_prob[path] for path in best]),
        max(draft.length for draft, _ in trees),
    )
