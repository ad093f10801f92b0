"""Selection: the source with the longest match drafts alone, as in SAM-Decoding.

SAM-Decoding (arXiv 2411.10666): the longest suffix that occurred before, in the text itself or in a
corpus (whose matches count some tokens less), is continued if it is long enough; otherwise another
drafter drafts. `Select` is that choice, `MatchDrafter` the paper's own draft from the text.
Deviations: any drafters may be sources, and their trees are taken, not only chains; the latest
occurrence is continued instead of the first, and the copy repeats at the end of the text.
Thresholds are those of the paper's code.
"""

from collections.abc import Sequence
from itertools import cycle, islice, takewhile
from math import inf

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.fuse import Combined, SourcesSession, as_kind
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.needs import Needs
from ragspec.retrievers.indexes.context_index import ContextIndex
from ragspec.retrievers.indexes.suffix_automaton import ROOT_STATE
from ragspec.retrievers.methods.prompt_lookup import chain_accept_prob
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter
from ragspec.sampling.settings import checked_number
from ragspec.trees.draft_tree import DraftTree

MOST, FACTOR = 40, 4  # a match of m tokens is continued by 1 + 4 m tokens, at most 40


class MatchDrafter(Drafter):
    """Copies the tokens behind the latest occurrence of the longest match."""

    method = Method("the same text, longest match", "SAM-Decoding", colour=5)
    name = "match"
    needs = Needs(texts=True)

    def open(self, request: DraftRequest) -> "MatchSession":
        """Return a session that has indexed the prompt and the texts of `request`."""
        return MatchSession(ContextIndex(request))


class MatchSession(DraftSession):
    """The index of one row, and the length of its last match; see `MatchDrafter`."""

    def __init__(self, index: ContextIndex) -> None:
        self._index = index
        self.matched: int = 0

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` nodes, no deeper than the remaining tokens."""
        index, automaton = self._index, self._index.automaton
        index.follow(context.tokens)
        state = automaton.match()
        self.matched = automaton.length[state]
        n = min(budget, context.remaining - 1, MOST, 1 + FACTOR * self.matched)
        if state == ROOT_STATE or n < 1:
            return DraftTree.empty()
        start, end = automaton.latest[state] + 1, len(automaton)
        # Text that repeats is likely to repeat again: behind its end the copy itself is copied.
        copied = islice(cycle(automaton.tokens[start : start + n]), n)
        tokens = list(takewhile(lambda token: token < automaton.vocab_size, copied))
        chances = chain_accept_prob(self.matched, len(tokens))
        origin = [index.origin(start + i % (end - start)) for i in range(len(tokens))]
        return DraftTree.chain(tokens, MatchDrafter.name, accept_prob=chances, origin=origin)


class Select(Combined):
    """Lets one drafter draft: the source with the longest match, or the fallback if all are short.

    Args:
        sources: Drafters that report their match (context, match, suffix, lookup or REST), in order
            of trust.
        discount: Subtracted from the match of every source but the first.
        threshold: Match below which the fallback drafts, if there is one.

    Raises:
        InputError: There is no source, or a setting is no number.
    """

    method = Method(
        "text or store, else `recycling`",
        "SAM-Decoding",
        make=lambda sources: Select(
            [MatchDrafter(), *sources.past()],
            NeighbourDrafter() if sources.top_k_feedback else None,
        ),
        uses=frozenset({"store"}),
    )

    def __init__(
        self,
        sources: Sequence[Drafter],
        fallback: Drafter | None = None,
        *,
        threshold: float = 5.0,
        discount: float = 5.0,
    ) -> None:
        if not isinstance(sources, Sequence) or not sources:
            raise InputError(f"got {sources!r} as sources; expected a list of drafters.")
        super().__init__("select", [*sources, *([] if fallback is None else [fallback])])
        self.threshold = checked_number(threshold, "threshold", -inf)
        self.discounts = [0.0, *[checked_number(discount, "discount", -inf)] * (len(sources) - 1)]

    def open(self, request: DraftRequest) -> "SelectSession":
        """Return a session that holds one session of every drafter."""
        return SelectSession(self, request)


class SelectSession(SourcesSession):
    """The drafters of one row; see `Select`."""

    _drafter: Select
    matched = 0

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the tree of one drafter, at most `budget` nodes."""
        discounts, kind = self._drafter.discounts, self._drafter.kind
        best, most, self.matched = DraftTree.empty(kind), float("-inf"), 0
        for source, discount in zip(self._sources, discounts, strict=False):  # not the fallback
            tree = source.propose(context, budget)
            if not len(tree):
                continue
            if source.matched is None:
                raise InputError(
                    f"drafter {source.name!r} does not tell the length of its match; expected a "
                    "session with `matched`. Pass it as the fallback, or fuse the drafters."
                )
            if (score := source.matched - discount) > most:
                best, most, self.matched = tree, score, source.matched
        sure = most >= self._drafter.threshold
        for fallback in () if sure else self._sources[len(discounts) :]:  # one at most
            if len(tree := fallback.propose(context, budget)):
                best, self.matched = tree, fallback.matched or 0
        return as_kind(best, kind)
