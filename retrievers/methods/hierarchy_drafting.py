"""Hierarchy Drafting (arXiv 2502.05609): databases in order of temporal locality, as one tree.

The context (this prompt and output) drafts first, then the model's earlier answers, then a corpus
of other text. The form "ngram" has the paper's databases (section 3; level 5, guess 7, answers
queried with the last token, the corpus with the last 2, then 1 tokens). The form "trie" is our own:
suffixes of any length with counts, in place of n-grams after one token. Deviations in both: see
`ngrams`; the corpus is not padded with random tokens; nodes are counted instead of branches, and
shared prefixes once; answers are looked up in their store, as REST does, instead of in a list of
their most frequent n-grams; each database keeps a part of the budget for its sure nodes, so none
can starve the others; other nodes are taken by their acceptance probability, whichever database
offers them. In the trie form the target's second choices (see `token_recycling`) replace
Lookahead's n-grams of the context.
"""

from collections.abc import Sequence
from typing import Literal

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.drafters.fuse import Combined, SourcesSession, as_kind
from ragspec.drafters.method import GLOBAL, Method, Sources
from ragspec.errors import InputError
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.ngrams import GUESS, LEVEL, NGramDrafter
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter
from ragspec.sampling.settings import checked_number
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best, overlay, select, share_out

Form = Literal["trie", "ngram"]
PREVIOUS = 2
RESERVE = 0.2
SURE = 0.1
ANSWERS, TEXT = "answers", "statistics"  # names of the sources in reports

Store = CorpusIndex | Drafter


def fill(
    tree: DraftTree, offers: Sequence[int], sources: int, budget: int, reserve: int
) -> set[int]:
    """Return the nodes of a merged tree that fill a budget, with all their ancestors.

    Args:
        offers: By node, the sources that offer it as bits, the first source lowest.
        reserve: Nodes reserved for each later source, if it has as many of at least `SURE`.
    """
    parents, accept_prob = tree.parents.tolist(), tree.accept_prob.tolist()
    best = sorted(range(len(tree)), key=lambda node: -accept_prob[node])
    certain = [node for node in best if accept_prob[node] >= SURE]
    waiting = [min(reserve, sum(offers[node] >> i & 1 for node in certain)) for i in range(sources)]
    rounds = [(certain, 1 << i, budget - sum(waiting[i + 1 :])) for i in range(sources)]
    chosen: set[int] = set()
    for nodes, bits, room in [*rounds, (best, ~0, budget)]:
        for node in nodes:
            if len(chosen) >= room:
                break
            if offers[node] & bits:
                _take(node, parents, chosen, room)
    return chosen


def _take(node: int, parents: Sequence[int], chosen: set[int], room: int) -> None:
    """Add a node and its ancestors to the chosen ones, if they all fit."""
    path = []
    while node >= 0 and node not in chosen:
        path.append(node)
        node = parents[node]
    if len(chosen) + len(path) <= room:
        chosen.update(path)


class HierarchyDrafter(Combined):
    """Drafts from the context, the model's own answers and a corpus, in this order.

    Args:
        model_store: The model's earlier answers, as a `CorpusIndex` or a drafter. None leaves the
            level out.
        corpus: Other text, likewise.
        level, guess: In the n-gram form, tokens of an n-gram, and n-grams of the context after a
            token.
        lookahead: The context also learns from tokens that the target did not choose.
        reserve: Share of the budget that each later level keeps for nodes of at least `SURE`.

    Attributes:
        most_nodes: Limit of every tree besides the budget, None for no limit.

    Raises:
        InputError: The form or a database is of another kind, a size is out of range, or the
            reserves leave the first level nothing.
    """

    method = Method(
        "levels of stores",
        "Hierarchy Drafting",
        make=lambda sources: _over(sources),
        uses=frozenset({"store"}),
        colour=4,
    )

    def __init__(
        self,
        model_store: Store | None = None,
        corpus: Store | None = None,
        *,
        form: Form = "trie",
        level: int = LEVEL,
        guess: int = GUESS,
        lookahead: bool = True,
        reserve: float = RESERVE,
    ) -> None:
        if form not in ("trie", "ngram"):
            raise InputError(f"got form {form!r}; expected 'trie' or 'ngram'.")
        drafters: list[Drafter] = [ContextDrafter()]
        if form == "ngram":
            drafters = [NGramDrafter(level=level, guess=guess, lookahead=lookahead)]
        for store, name, longest in ((model_store, ANSWERS, 1), (corpus, TEXT, PREVIOUS)):
            if isinstance(store, CorpusIndex):  # a drafter has its own name
                options = {"longest": longest, "depth": level - 1} if form == "ngram" else {}
                drafters.append(store.drafter(GLOBAL, name=name, **options))
            elif store is not None:
                drafters.append(store)
        if lookahead and form == "trie":
            drafters.append(NeighbourDrafter())
        super().__init__("hierarchy", drafters)
        self.reserve = checked_number(reserve, "reserve", most=1.0)
        if self.reserve * (len(drafters) - 1) >= 1.0:
            raise InputError(
                f"got a reserve of {reserve} and {len(drafters)} levels; expected less than the "
                "whole budget reserved for the later ones."
            )
        self.most_nodes = guess * (level - 1) if form == "ngram" else None

    def open(self, request: DraftRequest) -> "HierarchySession":
        """Return a session that holds one session of every level."""
        return HierarchySession(self, request)


class HierarchySession(SourcesSession):
    """The levels of one row, in order; see `HierarchyDrafter`."""

    _drafter: HierarchyDrafter

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a tree of at most `budget` nodes, filled level after level."""
        drafter, kind = self._drafter, self._drafter.kind
        if drafter.most_nodes is not None:
            budget = min(budget, drafter.most_nodes)
        trees = [source.propose(context, budget) for source in self._sources if budget > 0]
        offered = [as_kind(tree, kind) for tree in trees if len(tree)]
        if not offered:
            return DraftTree.empty(kind)
        if len(offered) == 1:
            return keep_best(offered[0], budget)
        merged, offers = overlay([(tree, 1 << i) for i, tree in enumerate(offered)])
        if len(merged) <= budget:
            return share_out(merged)
        chosen = fill(merged, offers, len(offered), budget, int(drafter.reserve * budget))
        return share_out(select(merged, sorted(chosen)))


def _over(sources: Sources) -> HierarchyDrafter:
    named = (sources.history, ANSWERS), (sources.corpus, TEXT)
    stores = [each and each.drafter(sources.scope, name=name) for each, name in named]
    return HierarchyDrafter(*stores, lookahead=sources.top_k_feedback)
