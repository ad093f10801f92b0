"""LANTERN and LANTERN++ as published: relaxed rejection sampling.

LANTERN, Jang et al. (arXiv 2410.03355); LANTERN++, Park et al. (arXiv 2502.06352). At a node with
the target's distribution p the rule accepts a sampled code x with probability
min(1, (p(x) + p(A(x))) / q(x)), A(x) the codes that x stands for (see `codebook`). It tries
siblings in turn against the residual of p. For deterministic candidates, LANTERN's trees, q is 1 at
the candidate. For sampled candidates, LANTERN++'s trees, q is their distribution.

The residual after a rejection is a choice. "paper": N[(p' - q)+], p' the relaxed distribution of
the rejected code, without the codes that it stood for. "optimal": N[(p - q)+], which for one
sampled candidate gives the least total variation at this acceptance.

With sampled candidates delta bounds no total variation. If p is uniform over 100 codes, q over 50
of them and delta is 0.05, all are accepted: the output is q, half away from p. A picture of the
same seed differs even if nothing is relaxed. `lantern` has neither fault; this form is for
comparison. Deviations from the published code, which departs from the paper: only A(x) leaves the
residual, not all k + 1 nearest codes. If a residual is empty p stays, not the uniform distribution.
Neighbours are those of the normalised code-book.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch

from ragspec.errors import InputError
from ragspec.needs import Needs
from ragspec.rules.base import EXACT_FOR_LABEL, Rule, TargetView, Verdict
from ragspec.rules.rejection import check_draws, draft_distribution, draw, normalised, ratio
from ragspec.rules.walk import descend
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.rules.codebook import CodeNeighbours
from ragspec.visual.rules.lantern import Lantern, LanternPlus, RelaxedWalk, expect_table
from ragspec.visual.rules.tv_budget import APPROXIMATE
from tests.support.codes import relaxed_distribution

Residual = Literal["optimal", "paper"]


class RelaxedRejection(Rule):
    """Accept a code with the probability of all codes that it stands for; see the module.

    The excess of a position is the acceptance that the relaxation gained for the tried codes. For
    one candidate its mean is the total variation with the residual "optimal", and less with "paper"
    and sampled candidates. For several siblings and "optimal" it is an upper bound.

    Args:
        relaxed: The rule that names the codes that a code stands for.
        residual: "optimal" or "paper".

    Raises:
        InputError: The residual is unknown.
    """

    name = "relaxed-rejection"
    accepts = frozenset(DraftKind) - {DraftKind.COUPLED}
    needs = Needs(probabilities=True)

    def __init__(self, relaxed: RelaxedWalk, residual: Residual = "optimal") -> None:
        if residual not in get_args(Residual):
            raise InputError(
                f"Expected residual 'optimal' or 'paper', got {residual!r}. Choose one."
            )
        self.relaxed = relaxed
        self.residual = residual

    @property
    def label(self) -> str:
        """`exact-for(distribution)` if nothing is relaxed, else `approximate`."""
        return APPROXIMATE if self.relaxed.relaxes else EXACT_FOR_LABEL

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path, the code that follows it, and each position's excess.

        Raises:
            RuleError: The tree is of another kind or the code-book of another size.
        """
        fixed = tree.kind is DraftKind.DETERMINISTIC
        if not fixed:
            check_draws(self, tree)
        tokens = tree.tokens.tolist()
        excess: list[float] = []

        def decide(node: int, siblings: Sequence[int]) -> tuple[int | None, int]:
            p, index = target.probabilities(node), target.index(node)
            self.relaxed.check_size(len(p))
            rank, spent = None, 0.0
            if siblings:
                q = None if fixed else draft_distribution(tree, node, p)
                uniform = partial(target.noise.uniform, index, NoiseUse.ACCEPT)
                codes = [tokens[sibling] for sibling in siblings]
                rank, p, spent = self._try(codes, p, q, tree.kind, uniform)
            excess.append(spent)
            if rank is None:
                return None, draw(p, target.noise, index)
            return siblings[rank], tokens[siblings[rank]]

        return replace(descend(tree, target, decide), excess=tuple(excess))

    def _try(
        self,
        codes: Sequence[int],
        p: torch.Tensor,
        q: torch.Tensor | None,
        kind: DraftKind,
        uniform: Callable[[int], float],
    ) -> tuple[int | None, torch.Tensor, float]:
        """Return the accepted rank or None, p [V] or its residual, and the excess."""
        spent = 0.0
        for rank, code in enumerate(codes):
            draft = _one_hot(code, p) if q is None else q
            distribution = p.numpy()
            among = self.relaxed.related(code, distribution)
            exact = ratio(p, draft, code)
            relaxed = exact + float(distribution[among].sum() / draft[code])
            spent += min(1.0, relaxed) - min(1.0, exact)
            if uniform(rank) < relaxed:
                return rank, p, spent
            whole = p
            if self.residual == "paper":
                whole = torch.from_numpy(relaxed_distribution(distribution, code, among))
            p = normalised(whole - draft, p)
            if q is not None and kind is DraftKind.SAMPLED_WITHOUT_REPLACEMENT:
                q = q.index_fill(0, torch.tensor([code]), 0.0)
                q = q / q.sum()
        return None, p, spent


class LanternRejection(RelaxedRejection):
    """LANTERN as published, with the arguments of `lantern.Lantern`."""

    name = "lantern-rejection"
    relaxed_by = "delta"

    def __init__(
        self,
        neighbours: CodeNeighbours | None = None,
        k: int | None = None,
        delta: float = 0.1,
        residual: Residual = "optimal",
    ) -> None:
        table = expect_table(self.name, neighbours)
        super().__init__(Lantern(table, k, delta), residual)


class LanternPlusRejection(RelaxedRejection):
    """LANTERN++ as published, with the arguments of `lantern.LanternPlus`."""

    name = "lantern++-rejection"
    relaxed_by = "lam"

    def __init__(
        self,
        neighbours: CodeNeighbours | None = None,
        k: int | None = None,
        lam: float = 2.0,
        residual: Residual = "optimal",
    ) -> None:
        table = expect_table(self.name, neighbours)
        super().__init__(LanternPlus(table, k, lam), residual)


def _one_hot(code: int, like: torch.Tensor) -> torch.Tensor:
    """Return the distribution f64 [V] with all mass on the code."""
    distribution = torch.zeros_like(like)
    distribution[code] = 1.0
    return distribution
