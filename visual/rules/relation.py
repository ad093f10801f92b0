"""Relations of the relaxed rules: the codes that a drafted code may stand for.

For a drafted code c and the target's distribution p a relation names the codes A(c), without c. If
the target chooses one of them, the rule may emit c instead. The *mass* is p(A(c)). The relaxed
distribution has p(c) + mass at c, nothing on A(c), and p elsewhere, so that its total variation
from p is the mass.

`NearestWithin` is LANTERN's (arXiv 2410.03355): the longest nearest-first prefix of the k nearest
codes whose mass is at most delta. `NearestByRatio` is LANTERN++'s (arXiv 2502.06352): at most
(lam - 1) p(c), so that c becomes at most lam times as likely. `SameCluster` is GSD's (arXiv
2508.07747) with a fixed partition, where the paper forms one around each draft. The published code
reads one number as delta up to 1 and as lambda above; here they are two settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError, RuleError
from ragspec.visual.checks import is_number, whole
from ragspec.visual.rules.codebook import CodeNeighbours, CodePartition, Codes

Distribution = NDArray[np.float64]


class Relation(Protocol):
    """The codes that each drafted code may stand for.

    Attributes:
        size: The number of codes V of the code-book.
    """

    size: int

    @property
    def nothing(self) -> bool:
        """Whether no code with any probability is ever related, so that the rule is the walk."""

    def near(self, code: int) -> Codes:
        """Return the codes that may be related to `code`, nearest first."""

    def bound(self, code: int, p: Distribution) -> float:
        """Return the mass that the prefix of `near(code)` may have under the distribution p [V]."""


class NearestCodes:
    """The k nearest codes, of any mass.

    Args:
        k: Neighbours that count; None for all of the table, 0 relates nothing.

    Raises:
        InputError: k is beyond the table.
    """

    def __init__(self, neighbours: CodeNeighbours, k: int | None = None) -> None:
        count = neighbours.k if k is None else whole(k)
        if count is None or not 0 <= count <= neighbours.k:
            raise InputError(
                f"got k={k!r}; the table holds {neighbours.k} neighbours of each code. Give a whole"
                " number of at most that, or build a table with more."
            )
        self.k = count
        self.size = neighbours.size
        self.neighbours = neighbours
        self._rows = neighbours.rows[:, : self.k]

    @property
    def nothing(self) -> bool:
        """Whether k is 0."""
        return self.k == 0

    def near(self, code: int) -> Codes:
        """Return the k nearest codes, nearest first."""
        return cast(Codes, self._rows[code])

    def bound(self, code: int, p: Distribution) -> float:
        """Return infinity: all near codes are related."""
        return inf


class NearestWithin(NearestCodes):
    """LANTERN: the nearest codes whose mass is at most delta.

    Raises:
        InputError: delta is outside [0, 1), or k is beyond the table.
    """

    def __init__(self, neighbours: CodeNeighbours, k: int | None = None, delta: float = 0.1):
        super().__init__(neighbours, k)
        if not (is_number(delta) and 0.0 <= delta < 1.0):
            raise InputError(
                f"got delta={delta!r}; expected a probability mass from 0 to below 1. A factor on "
                "the draft's own probability is `lam` of lantern++."
            )
        self.delta = delta

    @property
    def nothing(self) -> bool:
        """Whether k or delta is 0."""
        return self.k == 0 or self.delta == 0.0

    def bound(self, code: int, p: Distribution) -> float:
        """Return delta, 0 for a code without probability: filters keep it out of the image."""
        return self.delta if p[code] > 0.0 else 0.0


class NearestByRatio(NearestCodes):
    """LANTERN++: the nearest codes that make the code at most lam times as likely.

    Raises:
        InputError: lam is below 1 or not finite, or k is beyond the table.
    """

    def __init__(self, neighbours: CodeNeighbours, k: int | None = None, lam: float = 2.0):
        super().__init__(neighbours, k)
        if not (is_number(lam) and 1.0 <= lam < inf):
            raise InputError(
                f"got lam={lam!r}; expected a factor of at least 1 (1 relaxes nothing). A bound on "
                "the neighbours' own mass is `delta` of lantern."
            )
        self.lam = lam

    @property
    def nothing(self) -> bool:
        """Whether k is 0 or lam 1."""
        return self.k == 0 or self.lam == 1.0

    def bound(self, code: int, p: Distribution) -> float:
        """Return (lam - 1) p(code)."""
        return (self.lam - 1.0) * float(p[code])


class SameCluster:
    """GSD over fixed clusters: all codes of one cluster stand for each other."""

    def __init__(self, partition: CodePartition) -> None:
        self.partition = partition
        self.size = partition.size

    @property
    def nothing(self) -> bool:
        """Whether every code is alone in its cluster."""
        return all(not len(mates) for mates in self.partition.mates)

    def near(self, code: int) -> Codes:
        """Return the other codes of the cluster."""
        return self.partition.mates[code]

    def bound(self, code: int, p: Distribution) -> float:
        """Return infinity for a code with any probability under p, else 0.

        Fixed codes of an image, and those that top-k removed, therefore stay as they are.
        """
        return inf if p[code] > 0.0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Related:
    """The codes that a drafted code stands for, nearest first, and their mass under p."""

    codes: Codes
    mass: float


def related(relation: Relation, code: int, p: Distribution) -> Related:
    """Return A(code) under p [V], the longest prefix of near(code) within the bound."""
    codes = relation.near(code)
    masses = p[codes].cumsum()
    count = int(masses.searchsorted(relation.bound(code, p), side="right"))
    return Related(codes[:count], float(masses[count - 1]) if count else 0.0)


def check_size(relation: Relation, size: int) -> None:
    """Raise RuleError unless the target's distribution is over the codes of the relation."""
    if size != relation.size:
        raise RuleError(
            f"the target chooses among {size} codes, the rule's table is of a code-book of "
            f"{relation.size}; expected one code-book. Build the table from the target's own."
        )
