"""Whether the documents speak of a question at all, told from what the search found.

The best passage is asked for the question's words, rare ones counting most (by their inverse
document frequency, that of BM25). Where it has few of them, and the best cosine of dense search
is low too, nothing was found that an answer could rest on. The bounds were chosen on questions
whose documents are known, put to their own and to others (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_COVERAGE, LEAST_COSINE = 0.35, 0.35


@dataclass(frozen=True, slots=True)
class Support:
    """What the best passages have of a question.

    coverage: share of its words, by rarity, in the best one; None where words are not indexed.
    cosine: of the nearest one; None without dense search.
    """

    coverage: float | None
    cosine: float | None

    @property
    def covered(self) -> bool:
        """Whether an answer may rest on it: by one of both measures, or where words are unknown."""
        if self.coverage is None or self.coverage >= LEAST_COVERAGE:
            return True
        return self.cosine is not None and self.cosine >= LEAST_COSINE
