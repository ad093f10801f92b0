"""Cool-SD, annealed relaxation without a code-book: Li et al. (arXiv 2601.09212).

The code at depth i of a chain, drawn from q, is kept with probability min(1, omega_i p / q), with
omega_i = delta exp(-nu i - mu): the first codes of a draft are relaxed most. After a rejection the
next code comes from N[(p - min(q, omega_i p))+], the best that can be done at this acceptance: the
total variation at a position is what acceptance gained, sum(min(q, omega p)) - sum(min(q, p)).

The paper's text was not at hand, so that mu is our reading: by default it makes delta the mean of
the omega_i over `length` codes. Deviation: an omega below 1 is taken for 1; it would accept less
and change nothing in the law.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isfinite, log
from numbers import Real

import torch

from ragspec.errors import InputError
from ragspec.rules.base import TargetView, Verdict
from ragspec.rules.rejection import (
    EXACT_FOR_LABEL,
    check_chain,
    check_draws,
    draft_distribution,
    draw,
    normalised,
    ratio,
)
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.visual.rules.tv_budget import APPROXIMATE

_MOST = 700.0  # a logarithm above it is that of no finite number


@dataclass(frozen=True, slots=True)
class Cool:
    """Keep each drawn code with probability min(1, omega p / q), omega falling with depth.

    delta: how much is relaxed, 1 or less nowhere on average. nu: how fast that falls from code to
    code. mu: see the module's text. length: codes of a usual draft, for the default of mu.
    Raises InputError for values outside their range.
    """

    delta: float = 1.1
    nu: float = 0.7
    mu: float | None = None
    length: int = 5

    name = "cool"
    relaxed_by = "delta"
    accepts = frozenset({DraftKind.SAMPLED})

    def __post_init__(self) -> None:
        numbers = (self.delta, self.nu, 0.0 if self.mu is None else self.mu)
        known = all(isinstance(n, Real) and isfinite(n) for n in numbers)
        known = known and isinstance(self.length, int) and self.length >= 1
        if not (known and self.delta > 0.0 and self.nu >= 0.0 and self._range() <= _MOST):
            raise InputError(
                f"got delta={self.delta}, nu={self.nu}, mu={self.mu}, length={self.length}; "
                "expected delta above 0, nu of at least 0, a whole length of at least 1, and mu "
                "None or a number for which delta exp(-mu) is finite. Published: nu=0.7, delta "
                "1.1 to 2."
            )

    @property
    def label(self) -> str:
        """`exact-for(distribution)` where nothing is relaxed, else `approximate`."""
        return EXACT_FOR_LABEL if self.omega(0) == 1.0 else APPROXIMATE

    def omega(self, depth: int) -> float:
        """Return the factor of the code at a depth, 0 the first of the draft."""
        return max(1.0, self.delta * exp(-self.nu * depth - self._mu()))

    def _mu(self) -> float:
        if self.mu is not None:
            return self.mu
        return log(sum(exp(-self.nu * i) for i in range(self.length)) / self.length)

    def _range(self) -> float:
        """Return the logarithm of the largest number that `omega` meets on its way."""
        return max(0.0, log(self.delta)) - self._mu()

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path, the code that follows it, and each position's excess.

        Raises RuleError where the tree is no chain or lacks its laws q.
        """
        check_draws(self, tree)
        check_chain(self, tree)
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
