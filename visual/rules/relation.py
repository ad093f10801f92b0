"""Relations of the relaxed rules: the codes that a drafted code may stand for.

For a drafted code c and the target's distribution p a relation names the codes A(c), without c. If
the target chooses one of them, the rule may emit c instead. The *mass* is p(A(c)). The relaxed
distribution has p(c) + mass at c, nothing on A(c), and p elsewhere, so that its total variation
from p is the mass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError, RuleError
from ragspec.sampling.settings import whole
from ragspec.visual.rules.codebook import CodeNeighbours, Codes

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
