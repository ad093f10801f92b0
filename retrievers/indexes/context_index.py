"""The context index: one request's texts, prompt and output, kept in step with what is committed.

A suffix automaton over the further texts of the request (each behind its own border), the prompt
and the growing output, and where its places lie in documents.
"""

from __future__ import annotations

from bisect import bisect_right

from ragspec.drafters.base import DraftRequest
from ragspec.retrievers.indexes.quotation_starts import DocumentRange
from ragspec.retrievers.indexes.suffix_automaton import (
    ROOT_STATE,
    Accelerate,
    SuffixAutomaton,
    Text,
)
from ragspec.trees.draft_tree import NO_ORIGIN


class ContextIndex:
    """Every substring of the request's text so far.

    automaton: of all tokens. base: the place of the prompt's first token in it. ranges: the parts
    that are text of documents. accelerate: see `SuffixAutomaton.build_texts`.
    """

    def __init__(self, request: DraftRequest, accelerate: Accelerate = "auto") -> None:
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
        self.automaton.build_texts([*texts, (request.prompt, marks)], accelerate)
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
