"""The context drafter: copy the tokens that followed the last tokens earlier in the request.

The longest suffix of the text that occurred earlier (in the prompt, in further texts of the
request, or in the output itself) is continued, as in prompt lookup and SAM-Decoding (arXiv
2411.10666). Deviations: continuations form one tree, grown best first by estimated acceptance, with
shorter matches as branches (the escape of PPM, Cleary and Witten 1984); acceptance is looked up by
match length and corrected by what the target accepts; the first token of a quotation, which no
match can find, is drafted from the sentence starts of the document just named (see
`QuotationStarts`).
"""

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Ratio
from ragspec.drafters.method import Method
from ragspec.needs import Needs
from ragspec.retrievers.indexes.context_index import ContextIndex, QuotationStarts
from ragspec.retrievers.indexes.suffix_automaton import ROOT_STATE
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import NO_ORIGIN, ROOT, DraftTree

# Probability that the target follows the text, by match length (0, 1, 2, ...; the last for all
# longer), and that a shorter match holds after the longest failed. Measured on gold answers.
ACCEPT_PRIOR = (0.0, 0.45, 0.52, 0.85, 0.92, 0.93, 0.94, 0.955, 0.96, 0.97, 0.975)
ACCEPT_PRIOR_AFTER_MISS = (0.0, 0.2, 0.25, 0.35, 0.4, 0.45)
# Probability that a quotation starts right after the label of its document.
QUOTES = 0.6

_CHILDREN = 4
_WIDE = 12
_FLOOR = 0.02
_QUOTE_LENGTH = 3
_PRIORS = (*ACCEPT_PRIOR, *ACCEPT_PRIOR_AFTER_MISS, QUOTES)  # by key
_QUOTE_KEY = len(_PRIORS) - 1
_LONGEST = len(ACCEPT_PRIOR) - 1
_ONE_PLACE = -1
_PRIOR, _DECAY = 8.0, 0.97
_Offer = tuple[float, int, int, int, int, int, int, int, float]  # a _Node's fields, cheaper to make


class _Node(NamedTuple):
    """A candidate node, ordered so that a heap yields the likeliest first.

    Attributes:
        cost: Minus the acceptance probability.
        state: State of the automaton, -1 for the single place `position`.
        length: Length of the match.
        key, prior: Row of `_PRIORS`, and its probability before any correction.
    """

    cost: float
    parent: int
    level: int
    token: int
    state: int
    length: int
    position: int
    key: int
    prior: float


class ContextDrafter(Drafter):
    """Drafts from the text of the request itself: prompt, retrieved texts, output.

    Args:
        sentence_ends: Token ids after which a quotation may start. None infers them from the ends
            of the request's documents; an empty collection drafts no quotation starts.
    """

    method = Method("prompt, passages, output", "SAM-Decoding, PLD", colour=0)
    name = "context"
    needs = Needs(texts=True)

    def __init__(self, sentence_ends: Collection[int] | None = None) -> None:
        self._sentence_ends = sentence_ends

    def open(self, request: DraftRequest) -> "ContextSession":
        """Return a session that has indexed the prompt and the texts of `request`."""
        return ContextSession(request, self._sentence_ends)


class ContextSession(DraftSession):
    """The index and the acceptance table of one row; see `ContextDrafter`."""

    def __init__(self, request: DraftRequest, sentence_ends: Collection[int] | None = None) -> None:
        self._texts = ContextIndex(request)
        self._index = self._texts.automaton
        base = self._texts.base
        self._starts: QuotationStarts | None = None
        inside = [r for r in self._texts.ranges if r.start >= base]
        if inside and (sentence_ends is None or sentence_ends):
            question = request.prompt[max(r.end for r in inside) - base :]
            self._starts = QuotationStarts(self._index.tokens, inside, question, sentence_ends)
        # The probabilities of `_PRIORS`, corrected by the acceptance so far.
        self._chances = list(_PRIORS)
        self._ratios = [Ratio() for _ in _PRIORS]
        self._drafted: list[_Node] = []
        self.matched = 0

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` nodes, likeliest first, no deeper than the remaining tokens."""
        self._texts.follow(context.tokens)
        self.matched = self._index.length[self._index.match()]
        self._drafted = self._grow(budget, context.remaining - 1)
        return self._tree(self._drafted)

    def expected_acceptance(self, context: DraftContext) -> float:
        """Return the acceptance probability of the longest match's best continuation."""
        self._texts.follow(context.tokens)
        index = self._index
        if (state := index.match()) <= ROOT_STATE:
            return 0.0
        length = index.length[state]
        if index.cited[state] < 0 and (starts := self._quotations(state, length)):
            return starts[0][1] * self._chances[_QUOTE_KEY]
        share = max((offer[0] for offer in self._offers(state, [])), default=0.0)
        return share * self._chances[min(length, _LONGEST)]

    def observe(self, step: Step) -> None:
        """Correct the acceptance table by what was accepted of the last proposal."""
        if not self._drafted:
            return
        children: dict[int, list[int]] = {}
        for i, node in enumerate(self._drafted):
            children.setdefault(node.parent, []).append(i)
        at = ROOT
        for token in step.tokens:
            offered, at = children.get(at, ()), len(self._drafted)
            for i in offered:
                node = self._drafted[i]
                ratio = self._ratios[node.key]
                ratio.learn(node.prior, node.token == token, _DECAY)
                self._chances[node.key] = min(_PRIORS[node.key] * ratio.share(_PRIOR), 0.99)
                if node.token == token:
                    at = i
        self._drafted = []

    def _grow(self, budget: int, depth: int) -> list[_Node]:
        """Return the likeliest nodes, parents first."""
        nodes: list[_Node] = []
        if budget < 1 or depth < 1:
            return nodes
        heap, taken = list[_Offer](), set[tuple[int, int]]()
        state = self._index.match()
        self._matches(heap, ROOT, 1, state, self._index.length[state], 1.0)
        while heap and len(nodes) < budget:
            node = _Node._make(heappop(heap))
            if (node.parent, node.token) in taken:
                continue
            taken.add((node.parent, node.token))
            nodes.append(node)
            if node.level < depth:
                self._continue(heap, node, len(nodes) - 1)
        return nodes

    def _continue(self, heap: list[_Offer], node: _Node, at: int) -> None:
        """Offer the continuations of `node`, which is node `at` of the tree."""
        accept_prob, level = -node.cost, node.level + 1
        if node.state != _ONE_PLACE:
            self._matches(heap, at, level, node.state, node.length, accept_prob)
            return
        position, tokens = node.position + 1, self._index.tokens
        if position < len(tokens) and tokens[position] < self._index.vocab_size:
            token, length, key = tokens[position], node.length + 1, min(node.length, _LONGEST)
            cost, prior = -accept_prob * self._chances[key], _PRIORS[key]
            heappush(heap, (cost, at, level, token, _ONE_PLACE, length, position, key, prior))

    def _matches(
        self, heap: list[_Offer], at: int, level: int, state: int, length: int, accept_prob: float
    ) -> None:
        """Offer the continuations of `state`, then of its suffixes with the rest of accept_prob."""
        index = self._index
        if index.cited[state] < 0 and (starts := self._quotations(state, length)):
            p, key, size = self._chances[_QUOTE_KEY], _QUOTE_KEY, _QUOTE_LENGTH
            for place, share in starts:
                cost, prior, token = -accept_prob * p * share, QUOTES * share, index.tokens[place]
                heappush(heap, (cost, at, level, token, _ONE_PLACE, size, place, key, prior))
            # Half of the mass stays with the matches, which may continue with the same token.
            accept_prob *= 1.0 - p / 2
        offered: list[int] = []
        while state > ROOT_STATE and accept_prob > _FLOOR:
            if offers := self._offers(state, offered):
                short = min(length, len(ACCEPT_PRIOR_AFTER_MISS) - 1)
                key = len(ACCEPT_PRIOR) + short if offered else min(length, _LONGEST)
                prior, p = _PRIORS[key], self._chances[key]
                for share, place, token, child in offers:
                    cost, claim = -accept_prob * p * share, prior * share
                    offer = cost, at, level, token, child, length + 1, place, key, claim
                    heappush(heap, offer)
                    offered.append(token)
                accept_prob *= 1.0 - p
            state = index.link[state]
            length = index.length[state]

    def _quotations(self, state: int, length: int) -> Sequence[tuple[int, float]]:
        """Return (start, share) of likely sentences of the document whose label is matched."""
        index, base = self._index, self._texts.base
        if self._starts is None or length <= 1:
            return ()
        # The label may also occur in a further text, which comes before the prompt.
        while index.latest[state] < base and index.length[index.link[state]] > 1:
            state = index.link[state]
        end = index.latest[state]
        return self._starts.after(end) if end >= base else ()

    def _offers(self, state: int, offered: list[int]) -> list[tuple[float, int, int, int]]:
        """Return (share, place, token, state) of the likeliest continuations not offered yet."""
        index = self._index
        count, latest, cited = index.count, index.latest, index.cited
        newest = len(index.tokens) - 1  # the only end of a state with count 0
        further, token = index.more.get(state), index.first_token[state]
        if further is None:  # one continuation, as in the middle of a quotation
            if token in offered or not 0 <= token < index.vocab_size:
                return []
            child = index.first_target[state]
            end = latest[child] if count[child] else newest
            return [(1.0, cited[child] if cited[child] >= 0 else end, token, child)]
        ranked = []
        for token, child in index.children(state):
            if token not in offered:
                end = latest[child] if count[child] else newest
                ranked.append((count[child] or 1, end, token, child))
                if len(ranked) == _WIDE:
                    break
        total = sum(offer[0] for offer in ranked)
        return [
            (weight / total, cited[child] if cited[child] >= 0 else end, token, child)
            for weight, end, token, child in sorted(ranked, reverse=True)[:_CHILDREN]
        ]

    def _tree(self, nodes: list[_Node]) -> DraftTree:
        tokens, origin = self._index.tokens, self._texts.origin
        place = [node.position for node in nodes]
        for i in range(len(nodes) - 1, -1, -1):
            # The best child comes last in this order. Its place determines that of its parent, so
            # a quotation stays in one document from node to node.
            parent, before = nodes[i].parent, place[i] - 1
            if parent == ROOT or place[parent] == before or tokens[before] != nodes[parent].token:
                continue
            if origin(before) != NO_ORIGIN:
                place[parent] = before
        return DraftTree.build(
            [node.token for node in nodes],
            [node.parent for node in nodes],
            ContextDrafter.name,
            accept_prob=[-node.cost for node in nodes],
            origin=[origin(p) for p in place],
        )
