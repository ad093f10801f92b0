"""The context index: the texts, the prompt and the committed output of one request.

It is a suffix automaton over the further texts of the request (a separator behind each), the prompt
and the growing output, and maps positions to documents.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragspec.drafters.base import DraftRequest
from ragspec.retrievers.indexes.suffix_automaton import ROOT_STATE, SuffixAutomaton
from ragspec.trees.draft_tree import NO_ORIGIN

_LABEL_TOKENS = 24  # of the label and the title in front of a document; longer ones are rare
_QUERY_TOKENS = 96
_OFFERED = 4
_TEMPERATURE = 2.0


class RequestText:
    """The further texts of a request, with a separator behind each, then the prompt and the output.

    Attributes:
        base: Position of the prompt's first token.
        ranges: The parts that are text of documents.
    """

    def __init__(self, request: DraftRequest) -> None:
        self.ranges: list[DocumentRange] = []
        self.base = 0
        for text in request.texts:
            end = self.base + len(text.tokens)
            self.ranges.append(DocumentRange(self.base, end, text.document, text.offset))
            self.base = end + 1
        for start, end, *place in sorted(request.spans):
            self.ranges.append(DocumentRange(self.base + start, self.base + end, *place))
        self._starts = [r.start for r in self.ranges]

    def origin(self, position: int) -> tuple[int, int]:
        """Return (document, token offset) of a position, (-1, -1) outside of documents."""
        at = bisect_right(self._starts, position) - 1
        if at < 0 or position >= self.ranges[at].end:
            return NO_ORIGIN
        r = self.ranges[at]
        return r.document, r.offset + position - r.start


class ContextIndex(RequestText):
    """Every substring of the request's text so far, in the suffix automaton `automaton`."""

    def __init__(self, request: DraftRequest) -> None:
        super().__init__(request)
        self.automaton = SuffixAutomaton(request.vocab_size)
        for text in request.texts:
            self.automaton.extend(text.tokens, text.document >= 0)
            self.automaton.separate()
        marks = [False] * len(request.prompt)
        for start, end, *_ in request.spans:
            marks[start:end] = [True] * (end - start)
        self.automaton.extend(request.prompt, marks)

    def follow(self, tokens: list[int]) -> None:
        """Append the newly committed tokens; `tokens` are the prompt and the output."""
        self.automaton.extend(tokens[len(self.automaton) - self.base :])

    def suffixes(self) -> list[int]:
        """Return the states of the suffixes that occurred before, longest first."""
        automaton, states = self.automaton, []
        state = automaton.match()
        while state > ROOT_STATE:
            states.append(state)
            state = automaton.link[state]
        return states


@dataclass(frozen=True, slots=True)
class DocumentRange:
    """A part of an index: tokens[start:end] is text of `document` from token `offset` on."""

    start: int
    end: int
    document: int
    offset: int


def sentence_ends(tokens: Sequence[int], ranges: Sequence[DocumentRange]) -> frozenset[int]:
    """Return the token ids that end at least two in five documents, mostly a full stop."""
    last = Counter(tokens[r.end - 1] for r in ranges if r.end > r.start)
    return frozenset(token for token, n in last.items() if n * 5 >= 2 * len(ranges))


class QuotationStarts:
    """Ranked sentence starts of the documents in one prompt.

    Args:
        tokens: Text of the index, read when a document is first needed.
        ranges: Its parts that are documents.
        query: Token ids of the question.
        ends: Token ids after which a sentence starts, None to infer them from the documents' ends.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        ranges: Sequence[DocumentRange],
        query: Sequence[int],
        ends: Collection[int] | None = None,
    ) -> None:
        self._tokens = tokens
        self._ranges = sorted(ranges, key=lambda r: r.start)
        self._opens = [r.start for r in self._ranges]
        self._query = np.asarray(query[-_QUERY_TOKENS:], dtype=np.int64)
        ends = sentence_ends(tokens, ranges) if ends is None else ends
        self._ends = np.fromiter(ends, dtype=np.int64)
        self._ranked: dict[int, list[tuple[int, float]]] = {}

    def after(self, position: int) -> list[tuple[int, float]]:
        """Return (position, share of the probability) of the best starts, best first.

        They are in the document that begins shortly after `position`, if one does.
        """
        at = bisect_left(self._opens, position + 1)
        if at == len(self._opens) or self._opens[at] > position + _LABEL_TOKENS:
            return []
        if at not in self._ranked:
            self._ranked[at] = self._rank(self._ranges[at])
        return self._ranked[at]

    def _rank(self, r: DocumentRange) -> list[tuple[int, float]]:
        ids = np.asarray(self._tokens[r.start : r.end], dtype=np.int64)
        ended = np.isin(ids, self._ends)
        opens = np.concatenate(([True], ended[:-1] & ~ended[1:]))
        starts = np.flatnonzero(opens)
        weights = _overlap(ids, np.cumsum(opens) - 1, len(starts), self._query)
        share = np.exp((weights - weights.max()) / _TEMPERATURE)
        share /= share.sum()
        best = np.argsort(-share, kind="stable")[:_OFFERED]
        return [(r.start + int(starts[i]), float(share[i])) for i in best]


def _overlap(
    ids: NDArray[np.int64], sentence: NDArray[np.int64], n: int, query: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the summed rarity of the query tokens in each sentence: f64 [n]."""
    shared = np.isin(ids, query)
    stride = int(ids.max()) + 1
    pairs = np.unique(sentence[shared] * stride + ids[shared])
    which, token = pairs // stride, pairs % stride
    rarity = np.log(1.0 + n / (np.bincount(token, minlength=stride)[token] + 0.5))
    return np.bincount(which, weights=rarity, minlength=n).astype(np.float64)
