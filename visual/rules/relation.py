"""Relations of the relaxed rules: the codes that a drafted code may stand for.

For a drafted code c and the target's distribution p a relation names the codes A(c), without c. If
the target chooses one of them, the rule may emit c instead. The *mass* is p(A(c)). The relaxed
distribution has p(c) + mass at c, nothing on A(c), and p elsewhere, so that its total variation
from p is the mass.

`nearest_within` is LANTERN's (arXiv 2410.03355): the longest nearest-first prefix of the k nearest
codes whose mass is at most delta. `nearest_by_ratio` is LANTERN++'s (arXiv 2502.06352): at most
(lam - 1) p(c), so that c becomes at most lam times as likely. `same_cluster` is GSD's (arXiv
2508.07747) with a fixed partition, where the paper forms one around each draft. The published code
reads one number as delta up to 1 and as lambda above; here they are two settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import mul

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError, RuleError
from ragspec.sampling.settings import whole
from ragspec.visual.checks import check_setting
from ragspec.visual.rules.codebook import CodeNeighbours, CodePartition, Codes

Distribution = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """The codes that each drafted code may stand for.

    Attributes:
        near: The codes that may be related to each code, nearest first; V in all.
        bound: Maps the probability of a code under p to the mass that its related codes may have.
        nothing: Whether no code with any probability is ever related: the rule is the walk.
    """

    near: Sequence[Codes] | Codes
    bound: Callable[[float], float]
    nothing: bool

    @property
    def size(self) -> int:
        """The number of codes V of the code-book."""
        return len(self.near)


def nearest(
    neighbours: CodeNeighbours, k: int | None, bound: Callable[[float], float], nothing: bool
) -> Relation:
    """Return the relation of the k nearest codes within a bound; None for all of the table.

    Raises:
        InputError: k is beyond the table.
    """
    count = neighbours.k if k is None else whole(k)
    if count is None or not 0 <= count <= neighbours.k:
        raise InputError(
            f"got k={k!r}; the table holds {neighbours.k} neighbours of each code. Give a whole"
            " number of at most that, or build a table with more."
        )
    return Relation(neighbours.rows[:, :count], bound, nothing or count == 0)


def nearest_within(
    neighbours: CodeNeighbours, k: int | None = None, delta: float = 0.1
) -> Relation:
    """Return LANTERN's relation: the nearest codes whose mass is at most delta.

    A code without probability stands for no other: filters keep it out of the image.

    Raises:
        InputError: delta is outside [0, 1), or k is beyond the table.
    """
    check_setting("delta", delta)
    return nearest(neighbours, k, partial(_if_likely, delta), delta == 0.0)


def nearest_by_ratio(
    neighbours: CodeNeighbours, k: int | None = None, lam: float = 2.0
) -> Relation:
    """Return LANTERN++'s: the nearest codes that make the code at most lam times as likely.

    Raises:
        InputError: lam is below 1 or not finite, or k is beyond the table.
    """
    check_setting("lam", lam)
    return nearest(neighbours, k, partial(mul, lam - 1.0), lam == 1.0)


def same_cluster(partition: CodePartition) -> Relation:
    """Return GSD's relation over fixed clusters: all codes of one cluster stand for each other.

    A code without probability stands for none, so that fixed and removed codes stay.
    """
    alone = not any(map(len, partition.mates))
    return Relation(partition.mates, partial(_if_likely, inf), alone)


def _if_likely(mass: float, p: float) -> float:
    return mass if p > 0.0 else 0.0


def related(relation: Relation, code: int, p: Distribution) -> Codes:
    """Return A(code) under p [V], nearest first: the longest prefix of `near` within the bound."""
    codes = relation.near[code]
    masses = p[codes].cumsum()
    return codes[: int(masses.searchsorted(relation.bound(float(p[code])), side="right"))]


def check_size(relation: Relation, size: int) -> None:
    """Raise RuleError unless the target's distribution is over the codes of the relation."""
    if size != relation.size:
        raise RuleError(
            f"the target chooses among {size} codes, the rule's table is of a code-book of "
            f"{relation.size}; expected one code-book. Build the table from the target's own."
        )
