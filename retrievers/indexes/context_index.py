"""The context index: one request's texts, prompt and output, kept in step with what is committed.

A suffix automaton over the further texts of the request (each behind its own border), the prompt
and the growing output, and where its places lie in documents.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragspec.drafters.base import DraftRequest
from ragspec.retrievers.indexes.suffix_automaton import ROOT_STATE, SuffixAutomaton, Text
from ragspec.trees.draft_tree import NO_ORIGIN


class ContextIndex:
    """Every substring of the request's text so far.

    Attributes:
        automaton: Of all tokens.
        base: The place of the prompt's first token in it.
        ranges: The parts that are text of documents.
    """

    def __init__(self, request: DraftRequest) -> None:
        self.automaton = SuffixAutomaton(request.vocab_size)
        self.ranges: list[DocumentRange] = []
        texts: list[Text] = []
        self.base = 0
        for text in request.texts:
            end = self.base + len(text.tokens)
            self.ranges.append(DocumentRange(self.base, end, text.document, text.offset))
            texts.append((text.tokens, text.document >= 0))
            self.base = end + 1
        marks = [False] * len(request.prompt)
        for start, end, document, offset in sorted(request.spans):
            marks[start:end] = [True] * (end - start)
            place = DocumentRange(self.base + start, self.base + end, document, offset)
            self.ranges.append(place)
        self.automaton.build_texts([*texts, (request.prompt, marks)])
        self._starts = [r.start for r in self.ranges]

    @property
    def matched(self) -> int:
        """Length of the longest suffix of the text that occurred before."""
        return self.automaton.length[self.automaton.match()]

    def follow(self, tokens: list[int]) -> None:
        """Bring the index up to the committed tokens (prompt and output)."""
        self.automaton.extend(tokens[len(self.automaton) - self.base :])

    def suffixes(self) -> list[int]:
        """Return the states of the suffixes that occurred before, longest first."""
        automaton, result = self.automaton, []
        state = automaton.match()
        while state > ROOT_STATE:
            result.append(state)
            state = automaton.link[state]
        return result

    def origin(self, position: int) -> tuple[int, int]:
        """Return (document, token offset) of a place in the index, (-1, -1) where it has none."""
        at = bisect_right(self._starts, position) - 1
        if at < 0 or position >= self.ranges[at].end:
            return NO_ORIGIN
        r = self.ranges[at]
        return r.document, r.offset + position - r.start


# A label and a title lie between; longer ones are rare.
_LABEL_TOKENS = 24
_QUERY_TOKENS = 96
_OFFERED = 4
_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class DocumentRange:
    """tokens[start:end] of an index is text of `document` from token `offset` on."""

    start: int
    end: int
    document: int
    offset: int


def sentence_ends(tokens: Sequence[int], ranges: Sequence[DocumentRange]) -> frozenset[int]:
    """Return the token ids that end at least two in five of the documents (a full stop, mostly)."""
    last = Counter(tokens[r.end - 1] for r in ranges if r.end > r.start)
    return frozenset(token for token, n in last.items() if n * 5 >= 2 * len(ranges))


class QuotationStarts:
    """Ranked sentence starts of the documents in one prompt.

    tokens: the text of the index, read when a document is first asked for; ranges: its document
    parts; query: token ids of the question; ends: token ids after which a sentence starts, None
    to infer them from the ends of the documents.
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
        known = sentence_ends(tokens, ranges) if ends is None else ends
        self._ends = np.fromiter(known, dtype=np.int64)
        self._ranked: dict[int, list[tuple[int, float]]] = {}

    def after(self, position: int) -> list[tuple[int, float]]:
        """Return (position, share of the probability) of the best starts, best first.

        They lie in the document that begins shortly after `position`; none where none does.
        """
        at = bisect_left(self._opens, position + 1)
        if at == len(self._opens) or self._opens[at] > position + _LABEL_TOKENS:
            return []
        ranked = self._ranked.get(at)
        if ranked is None:
            ranked = self._ranked[at] = self._rank(self._ranges[at])
        return ranked

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
    """Return per sentence the summed rarity of the query tokens in it: f64 [n]."""
    request = np.isin(ids, query)
    stride = int(ids.max()) + 1
    pairs = np.unique(sentence[request] * stride + ids[request])
    which, token = pairs // stride, pairs % stride
    spread = np.bincount(token, minlength=stride)
    rarity = np.log(1.0 + n / (spread[token] + 0.5))
    return np.bincount(which, weights=rarity, minlength=n).astype(np.float64)
