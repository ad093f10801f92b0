"""Suffix decoding: the suffix match with the most expected accepted tokens drafts.

SuffixDecoding (arXiv 2411.04975), section 4: for every suffix of at most `depth` tokens that
occurred before, the tree of its continuations is grown best first by the share of occurrences, to
at most factor * match + offset nodes. The score of a tree is the sum of its nodes' path
probabilities. The highest score wins, over an index of this request (prompt and output) and one of
past outputs. Deviations:
- The local tree is the context automaton: suffixes with the same occurrences are grown once.
- Ties favour the longer match, and growth ends at the first suffix whose cap cannot win.
- Past outputs are any other drafter (a store of them, or several fused), compared by expected
  accepted tokens.
- Acceptance probabilities correct the shares by the length of the match.
"""

import math
from heapq import heappop, heappush

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.drafters.fuse import Combined, Fuse, SourcesSession, as_kind
from ragspec.drafters.method import Method
from ragspec.needs import Needs
from ragspec.retrievers.indexes.context_index import ContextIndex
from ragspec.retrievers.methods.prompt_lookup import chain_accept_prob
from ragspec.sampling.settings import checked_count, checked_number
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import keep_best

Node = tuple[float, int, int, int, int]
"""(minus the path probability, parent, depth, token, state), as a heap orders them."""


class SuffixDrafter(Combined):
    """Drafts the continuations of the text's suffixes, in the text and in past outputs.

    Args:
        past: A drafter over earlier outputs, such as `store.drafter()`.
        factor, offset: A match of m tokens gives at most factor * m + offset nodes.
        depth: Tokens of the longest suffix that counts.
        least: Nodes of a smaller path probability are left out.

    Raises:
        InputError: A setting is out of range.
    """

    method = Method(
        "the text and past outputs",
        "SuffixDecoding",
        make=lambda sources: SuffixDrafter(_joined(sources.past())),
        uses=frozenset({"store"}),
        colour=5,
    )
    name = "suffix"

    def __init__(
        self,
        past: Drafter | None = None,
        *,
        factor: float = 1.0,
        offset: float = 0.0,
        depth: int = 64,
        least: float = 0.1,
    ) -> None:
        super().__init__(self.name, [] if past is None else [past], Needs(texts=True))
        self.factor = checked_number(factor, "factor")
        self.offset = checked_number(offset, "offset", -math.inf)
        self.depth = checked_count(depth, "depth")
        self.least = checked_number(least, "least", most=1.0)

    def cap(self, matched: int, budget: int) -> int:
        """Return the most nodes for a match of `matched` tokens."""
        return min(budget, int(self.factor * matched + self.offset))

    def open(self, request: DraftRequest) -> "SuffixSession":
        """Return a session that has indexed the prompt and the texts of `request`."""
        return SuffixSession(self, request)


class SuffixSession(SourcesSession):
    """The index of one row and its session of past outputs; see `SuffixDrafter`."""

    _drafter: SuffixDrafter
    matched = 0

    def __init__(self, drafter: SuffixDrafter, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        self._index = ContextIndex(request)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the better tree of the text and the past outputs, at most `budget` nodes."""
        self._index.follow(context.tokens)
        self.matched, nodes = self._local(budget, context.remaining - 1)
        tree = self._tree(self.matched, nodes)
        for source in self._sources:  # the past outputs, if any
            past = source.propose(context, budget)
            if source.matched is not None:
                past = keep_best(past, self._drafter.cap(source.matched, budget))
            if float(past.accept_prob.sum()) > float(tree.accept_prob.sum()):
                tree, self.matched = past, source.matched or 0
        return as_kind(tree, self._drafter.kind)

    def _local(self, budget: int, deepest: int) -> tuple[int, list[Node]]:
        """Return the match and the nodes of the best-scored suffix of this text."""
        drafter, lengths = self._drafter, self._index.automaton.length
        best: tuple[int, list[Node]] = (0, [])
        most = 0.0
        suffixes = self._index.suffixes() if budget > 0 and deepest > 0 else []
        newest = set(suffixes)
        for state in suffixes:
            matched = min(lengths[state], drafter.depth)
            cap = drafter.cap(matched, budget)
            if cap < 1 or cap <= most:
                break
            nodes = self._grow(state, cap, deepest, newest)
            if (score := -sum(node[0] for node in nodes)) > most:
                best, most = (matched, nodes), score
        return best

    def _grow(self, state: int, cap: int, deepest: int, newest: set[int]) -> list[Node]:
        """Return the at most `cap` likeliest nodes below a suffix, parents first.

        Args:
            newest: States that also end at the newest token, which their counts leave out.
        """
        automaton, least = self._index.automaton, self._drafter.least
        count, nodes = automaton.count, list[Node]()
        heap: list[Node] = [(-1.0, ROOT, 0, -1, state)]
        while heap and len(nodes) < cap:
            node = heappop(heap)
            if node[2]:
                nodes.append(node)
            cost, _, depth, _, at = node
            if depth == deepest or not count[at]:
                continue
            parent = len(nodes) - 1
            scale = cost / count[at]
            for token, child in automaton.children(at):
                # On text that repeats one token, counts may lag (see the automaton).
                share = max(scale * ((count[child] + (child in newest)) or 1), cost)
                if share <= -least:
                    heappush(heap, (share, parent, depth + 1, token, child))
        return nodes

    def _tree(self, matched: int, nodes: list[Node]) -> DraftTree:
        if not nodes:
            return DraftTree.empty()
        # Probability that a copy behind the match holds for 0, 1, 2 ... tokens.
        follows = [1.0, *chain_accept_prob(matched, max(node[2] for node in nodes)).tolist()]
        return DraftTree.build(
            [node[3] for node in nodes],
            [node[1] for node in nodes],
            SuffixDrafter.name,
            accept_prob=[-node[0] * follows[node[2]] for node in nodes],
            origin=[self._index.origin(self._index.automaton.cited[node[4]]) for node in nodes],
        )


def _joined(past: list[Drafter]) -> Drafter | None:
    """Return one drafter over all past outputs, None without any."""
    if len(past) > 1:
        return Fuse(past, "past")
    return past[0] if past else None
