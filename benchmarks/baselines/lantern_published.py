"""LANTERN and LANTERN++ in the form that was published: relaxed rejection sampling.

LANTERN, Jang et al. (arXiv 2410.03355); LANTERN++, Park et al. (arXiv 2502.06352). At a node with
the target's law p a drawn code x is kept with probability min(1, (p(x) + p(A(x))) / q(x)), A(x)
the codes it stands for (see `relation`); siblings are tried in turn against what is left of p. For
deterministic candidates, LANTERN's trees, q is taken to be 1 at the candidate; for candidates that
were drawn, LANTERN++'s trees, it is the law that they were drawn from.

What is left after a rejection is a choice. "paper": N[(p' - q)+], p' the relaxed law of the
rejected code, so that the codes it stood for are gone. "optimal": N[(p - q)+], which for one drawn
candidate gives the least total variation at this acceptance: accepted relaxed less accepted exact.

Here delta bounds no total variation once candidates are drawn: p even over 100 codes, q even over
50 of them and delta 0.05 accept everything, so that the output is q, half away from p. A picture of
the same seed is another one even where nothing is relaxed. `lantern` has neither fault; this form
is for comparison. Deviations from the published code, which departs from the paper: only A(x)
leaves the residual, not all k + 1 nearest codes; where a residual is empty p stays, not the even
law; neighbours are those of the normalised code-book.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import torch

from ragspec.errors import InputError
from ragspec.rules.base import TargetView, Verdict
from ragspec.rules.rejection import (
    EXACT_FOR_LABEL,
    check_draws,
    children_of,
    draft_distribution,
    draw,
    normalised,
    path_to,
    ratio,
)
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.visual.rules.codebook import CodeNeighbours
from ragspec.visual.rules.lantern import expect_table
from ragspec.visual.rules.relation import (
    NearestByRatio,
    NearestWithin,
    Relation,
    check_size,
    related,
    relaxed_distribution,
)
from ragspec.visual.rules.tv_budget import APPROXIMATE

Residual = Literal["optimal", "paper"]


class RelaxedRejection:
    """Keep a code with the probability of all that it stands for; see the module's text.

    residual: "optimal" or "paper". The excess of a position is the chance by which the relaxation
    raised acceptance of the codes that were tried. On average over draws, for one candidate, it is
    the total variation for the residual "optimal", and less than it for "paper" over drawn ones.
    For several siblings and "optimal" it is an upper bound. Raises InputError for another residual.
    """

    name = "relaxed-rejection"
    accepts = frozenset(DraftKind) - {DraftKind.COUPLED}

    def __init__(self, relation: Relation, residual: Residual = "optimal") -> None:
        if residual not in get_args(Residual):
            raise InputError(f"got residual={residual!r}; expected 'optimal' or 'paper'.")
        self.relation = relation
        self.residual = residual

    @property
    def label(self) -> str:
        """`exact-for(distribution)` where nothing is relaxed, else `approximate`."""
        return EXACT_FOR_LABEL if self.relation.nothing else APPROXIMATE

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path, the code that follows it, and each position's excess.

        Raises RuleError for a tree that it cannot judge or another code-book.
        """
        fixed = tree.kind is DraftKind.DETERMINISTIC
        if not fixed:
            check_draws(self, tree)
        tokens, children = tree.tokens.tolist(), children_of(tree)
        node, siblings = ROOT, children[ROOT]
        excess: list[float] = []
        while True:
            p, index = target.probabilities(node), target.index(node)
            check_size(self.relation, len(p))
            selected, spent = None, 0.0
            if siblings:
                q = None if fixed else draft_distribution(tree, node, p)
                uniform = partial(target.noise.uniform, index, NoiseUse.ACCEPT)
                codes = [tokens[sibling] for sibling in siblings]
                selected, p, spent = self._try(codes, p, q, tree.kind, uniform)
            excess.append(spent)
            if selected is None:
                code = draw(p, target.noise, index)
                return Verdict(path_to(tree, node), code, tuple(excess))
            node = siblings[selected]
            if target.ends(node):
                return Verdict(path_to(tree, node), None, tuple(excess))
            twins = [sibling for sibling in siblings if tokens[sibling] == tokens[node]]
            siblings = [child for twin in twins for child in children[twin]]

    def _try(
        self,
        codes: Sequence[int],
        p: torch.Tensor,
        q: torch.Tensor | None,
        kind: DraftKind,
        uniform: Callable[[int], float],
    ) -> tuple[int | None, torch.Tensor, float]:
        """Return the rank that is kept, or None and what is left of p [V], and the excess."""
        spent = 0.0
        for rank, code in enumerate(codes):
            sample = _certain(code, p) if q is None else q
            distribution = p.numpy()
            among = related(self.relation, code, distribution)
            exact = ratio(p, sample, code)
            relaxed = exact + among.mass / float(sample[code])
            spent += min(1.0, relaxed) - min(1.0, exact)
            if uniform(rank) < relaxed:
                return rank, p, spent
            whole = p
            if self.residual == "paper":
                whole = torch.from_numpy(relaxed_distribution(distribution, code, among))
            p = normalised(whole - sample, p)
            if q is not None and kind is DraftKind.SAMPLED_WITHOUT_REPLACEMENT:
                q = q.index_fill(0, torch.tensor([code]), 0.0)
                q = q / q.sum()
        return None, p, spent


class LanternRejection(RelaxedRejection):
    """LANTERN as published; neighbours, k and delta as in `lantern.Lantern`."""

    name = "lantern-rejection"
    relaxed_by = "delta"

    def __init__(
        self,
        neighbours: CodeNeighbours | None = None,
        k: int | None = None,
        delta: float = 0.1,
        residual: Residual = "optimal",
    ) -> None:
        super().__init__(NearestWithin(expect_table(self.name, neighbours), k, delta), residual)


class LanternPlusRejection(RelaxedRejection):
    """LANTERN++ as published; neighbours, k and lam as in `lantern.LanternPlus`."""

    name = "lantern++-rejection"
    relaxed_by = "lam"

    def __init__(
        self,
        neighbours: CodeNeighbours | None = None,
        k: int | None = None,
        lam: float = 2.0,
        residual: Residual = "optimal",
    ) -> None:
        super().__init__(NearestByRatio(expect_table(self.name, neighbours), k, lam), residual)


def _certain(code: int, like: torch.Tensor) -> torch.Tensor:
    """Return the law that has all its mass on the code, f64 [V]."""
    distribution = torch.zeros_like(like)
    distribution[code] = 1.0
    return distribution
