"""Where a quotation may start: sentences of a document, ranked by what the prompt asks.

A suffix match can only continue a copy that has begun; at its first token there is nothing to
match. Answers with citations repeat the label of a document first ("[2]", a file name, a title).
After a label that stands shortly before a document in the prompt, the sentences of that document
are offered, ranked by their overlap with the question, weighted by how rare the shared tokens are.
It is retrieval once more, one level below passages, and it needs no tokenizer: the tokens that end
documents end sentences. Our own design; no paper.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
