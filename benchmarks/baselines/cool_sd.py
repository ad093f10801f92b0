"""Cool-SD, annealed relaxation without a code-book: Li et al. (arXiv 2601.09212).

The rule accepts the code at depth i of a chain, sampled from q, with probability
min(1, omega_i p / q) with omega_i = delta exp(-nu i - mu). It relaxes the first codes of a draft
most. After a rejection it samples the next code from N[(p - min(q, omega_i p))+], which is optimal
at this acceptance: the total variation at a position is the gain in acceptance,
sum(min(q, omega p)) - sum(min(q, p)).

The paper was not available, so mu is our interpretation: by default delta is the mean of the
omega_i over `length` codes. Deviation: an omega below 1 counts as 1, since it would accept less and
leave the distribution the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isfinite, log
from numbers import Real

import torch

from ragspec.errors import InputError
from ragspec.needs import Needs
from ragspec.rules.base import EXACT_FOR_LABEL, Rule, TargetView, Verdict
from ragspec.rules.rejection import check_draws, draft_distribution, draw, normalised, ratio
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.visual.rules.tv_budget import APPROXIMATE

_MAX_LOG = 700.0  # logarithm of about the largest finite number


@dataclass(frozen=True, slots=True)
class Cool(Rule):
    """Accept each sampled code with probability min(1, omega p / q); omega falls with depth.

    Args:
        delta: Strength of the relaxation; 1 or less relaxes nothing on average.
        nu: Rate of its decline from code to code.
        mu: Offset, see the module; None for the default.
        length: Codes of a usual draft, for the default of mu.

    Raises:
        InputError: A value is out of range.
    """

    delta: float = 1.1
    nu: float = 0.7
    mu: float | None = None
    length: int = 5

    name = "cool"
    relaxed_by = "delta"
    accepts = frozenset({DraftKind.SAMPLED})
    needs = Needs(probabilities=True)

    def __post_init__(self) -> None:
        numbers = (self.delta, self.nu, 0.0 if self.mu is None else self.mu)
        finite = all(isinstance(n, Real) and isfinite(n) for n in numbers)
        valid = finite and isinstance(self.length, int) and self.length >= 1
        if not (valid and self.delta > 0.0 and self.nu >= 0.0 and self._range() <= _MAX_LOG):
            raise InputError(
                "Expected delta above 0, nu of at least 0, a whole length of at least 1, and mu "
                f"None or with a finite delta exp(-mu), got delta={self.delta}, nu={self.nu}, "
                f"mu={self.mu}, length={self.length}. Use the published nu=0.7, delta 1.1 to 2."
            )

    @property
    def label(self) -> str:
        """`exact-for(distribution)` if nothing is relaxed, else `approximate`."""
        return EXACT_FOR_LABEL if self.omega(0) == 1.0 else APPROXIMATE

    def omega(self, depth: int) -> float:
        """Return the factor of the code at a depth, 0 the first of the draft."""
        return max(1.0, self.delta * exp(-self.nu * depth - self._mu()))

    def _mu(self) -> float:
        if self.mu is not None:
            return self.mu
        return log(sum(exp(-self.nu * i) for i in range(self.length)) / self.length)

    def _range(self) -> float:
        """Return the logarithm of the largest intermediate number of `omega`."""
        return max(0.0, log(self.delta)) - self._mu()

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path, the code that follows it, and each position's excess.

        Raises:
            RuleError: The tree is no chain or lacks its distributions q.
        """
        check_draws(self, tree, chain=True)
        excess: list[float] = []
        node = ROOT
        while True:
            path = tuple(range(node + 1))
            p, index = target.probabilities(node), target.index(node)
            if node + 1 == len(tree):
                return Verdict(path, draw(p, target.noise, index), (*excess, 0.0))
            q, omega = draft_distribution(tree, node, p), self.omega(node + 1)
            accepted = torch.minimum(q, omega * p)
            excess.append(float((accepted - torch.minimum(q, p)).sum()))
            chance = omega * ratio(p, q, int(tree.tokens[node + 1]))
            if not target.noise.uniform(index, NoiseUse.ACCEPT) < chance:
                code = draw(normalised(p - accepted, p), target.noise, index)
                return Verdict(path, code, tuple(excess))
            node += 1
            if target.ends(node):
                return Verdict((*path, node), None, tuple(excess))
