"""RASD: a draft model's tree and retrieved trees, pruned by its distribution, as one tree.

RASD (arXiv 2503.03434): each step the draft model grows its tree, and retrieval for the same suffix
gives a retrieval tree. The retrieval tree is pruned by the draft model's distribution, fused with
the draft tree along the longest shared prefixes, and re-ranked to the budget. The paper publishes
no code and its constants were not available: rank 10 and probability 0.01 are ours. Deviations:
- The distribution is used at the root and at every node that the draft model expanded.
- Its probabilities are those of the target's same choice under shared noise (see `coupled`).
- A pruned branch keeps the share of its acceptance that the target granted to such branches so far.
  So a weak draft model cannot silence a better source.
- The tree is judged by `walk`, which is exact for any tree.
A further forward of the draft model over the other retrieved nodes was built and dropped: at 8 and
16 nodes it gave 0.96 to 1.01 times the tokens (docqa, quotation, rag, qa; starter models).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, Ratio
from ragspec.drafters.fuse import Fuse, FuseSession, Source
from ragspec.drafters.method import Method, Sources
from ragspec.errors import InputError
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter
from ragspec.rules.base import Step
from ragspec.sampling.settings import checked_count, checked_number
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import select

_PRIOR, _DECAY = 4.0, 0.97


class Rasd(Fuse):
    """Fuses a drafter's tree with retrieved trees that the drafter's distribution has pruned.

    Args:
        drafter: A model drafter, or any other, None for the target's own second choices. Nothing is
            pruned if its session has no `distributions`.
        retrievers: Drafters over text, in order of trust; None for the text of the request alone.
        prune_rank: A retrieved token survives among so many first choices of the draft model.
        prune_probability: It also survives with this probability; 0 for both prunes nothing.
        grace: Initial share of its acceptance that a pruned branch keeps; later the share follows
            what the target accepts. None drops pruned branches, as the paper does.

    Raises:
        InputError: There is no retriever, or a setting is out of range.
    """

    method = Method(
        "all of these, pruned by a draft model",
        "RASD",
        make=lambda sources: _over(sources),
        uses=frozenset({"store", "draft model"}),
        colour=6,
    )
    open_to_more = False

    def __init__(
        self,
        drafter: Drafter | None = None,
        retrievers: Sequence[Drafter] | None = None,
        *,
        prune_rank: int = 10,
        prune_probability: float = 0.01,
        grace: float | None = 0.25,
        name: str = "rasd",
    ) -> None:
        drafter = NeighbourDrafter() if drafter is None else drafter
        retrievers = [ContextDrafter()] if retrievers is None else retrievers
        if not isinstance(retrievers, Sequence) or not retrievers:
            raise InputError(f"got {retrievers!r} as retrievers; expected at least one in a list.")
        super().__init__([*retrievers, drafter], name)
        self.drafter = drafter
        self.prune_rank = checked_count(prune_rank, "prune_rank", 0)
        self.prune_probability = checked_number(prune_probability, "prune_probability", most=1.0)
        self.grace = None if grace is None else checked_number(grace, "grace", most=1.0)

    def open(self, request: DraftRequest) -> "RasdSession":
        """Return a session that holds one session of every drafter."""
        return RasdSession(self, request)


class RasdSession(FuseSession):
    """The drafters of one row, and the number of pruned nodes; see `Rasd`."""

    _drafter: Rasd

    def __init__(self, drafter: Rasd, request: DraftRequest) -> None:
        super().__init__(drafter, request)
        same = [source for source in self._sources if source.drafter is drafter.drafter]
        self._model: Source | None = same[-1]  # None after a fault in its distributions
        self._ratio = Ratio()  # how often the target takes pruned tokens
        # Claims of this step's pruned tokens, by (node of the draft tree, token).
        self._watched: dict[tuple[int, int], float] = {}
        self._place: dict[tuple[int, int], int] = {}
        self.pruned = 0

    @property
    def share(self) -> float:
        """The share of its acceptance that a pruned branch keeps; 0 drops it."""
        grace = self._drafter.grace
        return 0.0 if grace is None else min(self._ratio.share(_PRIOR, grace), 1.0)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the at most `budget` likeliest nodes of the fused tree."""
        self._watched, self._place = {}, {}
        return super().propose(context, budget)

    def observe(self, step: Step) -> None:
        """Pass the step to every source, and count the pruned tokens on the accepted path."""
        node: int | None = ROOT
        for token in step.tokens if self._watched else ():
            if node is None:
                break
            for (above, pruned), claim in self._watched.items():
                if above == node:
                    self._ratio.learn(claim, pruned == token, _DECAY)
            node = self._place.get((node, token))
        self._watched, self._place = {}, {}
        super().observe(step)

    def _merged(self, parts: dict[Source, DraftTree]) -> DraftTree:
        """Return the parts as one tree, the retrieved ones pruned at nodes with a distribution."""
        model = self._model
        if model is None or model not in parts or len(parts) == 1:
            return super()._merged(parts)
        if surviving := self._surviving(model):
            place = {pair: i for i, pair in enumerate(_pairs(parts[model]))}
            parts = {
                source: tree if source is model else self._prune(tree, place, surviving)
                for source, tree in parts.items()
            }
        return super()._merged(parts)

    def _surviving(self, source: Source) -> dict[int, set[int]]:
        """Return the surviving tokens by node: the first choices, and those likely enough."""
        rank, least = self._drafter.prune_rank, self._drafter.prune_probability
        surviving: dict[int, set[int]] = {}
        if source.session is None or not (rank or least):
            return surviving
        try:
            for node, tokens, chances in source.session.distributions() or ():
                rest = zip(tokens[rank:], chances[rank:], strict=True)
                likely = (token for token, chance in rest if chance >= least > 0.0)
                surviving[node] = {*tokens[:rank], *likely}
        except Exception:  # its tree may still be good
            source.count += 1
            self._model = None
            return {}
        return surviving

    def _prune(
        self, tree: DraftTree, place: dict[tuple[int, int], int], surviving: dict[int, set[int]]
    ) -> DraftTree:
        """Return a retrieved tree with pruned branches scaled down or left out.

        Args:
            place: The draft tree's nodes by (parent, token).
            surviving: The tokens that survive at each node that has a distribution.
        """
        share = self.share
        at, scale = list[int | None](), list[float]()  # the same node of the draft tree
        claimed = tree.accept_prob.tolist()
        for node, (parent, token) in enumerate(_pairs(tree)):
            above, factor = (ROOT, 1.0) if parent == ROOT else (at[parent], scale[parent])
            at.append(None if above is None else place.get((above, token)))
            if above is not None and token not in surviving.get(above, {token}):
                self.pruned += 1
                claim = claimed[node] / (1.0 if parent == ROOT else claimed[parent] or 1.0)
                self._watched[above, token] = max(claim, self._watched.get((above, token), 0.0))
                factor *= share
            scale.append(factor)
        self._place = place
        if min(scale) == 1.0:
            return tree
        scaled = replace(tree, accept_prob=tree.accept_prob * np.asarray(scale, dtype=np.float32))
        return scaled if share else select(scaled, [i for i, chosen in enumerate(scale) if chosen])


def _pairs(tree: DraftTree) -> list[tuple[int, int]]:
    """Return (parent, token) of every node."""
    return list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))


def _over(sources: Sources) -> Fuse:
    retrievers = [ContextDrafter(), *sources.past()]
    drafters = [*sources.models(), *([NeighbourDrafter()] if sources.top_k_feedback else [])]
    if not drafters:
        return Fuse(retrievers, "rasd")  # there is no distribution to prune by
    return Rasd(drafters[0], [*retrievers, *drafters[1:]])
