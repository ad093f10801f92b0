"""Relaxed acceptance as a walk with a neighbour relation: LANTERN, LANTERN++ and GSD.

At a node the target samples its code t with its noise. If a child has t, the walk descends to it.
Else, if t is one of the codes A(c) that a child c stands for, beside c (children in tree order), it
descends to c and so emits c in place of t. Else it emits t and stops. The *mass* is p(A(c)).

For one deterministic candidate this has LANTERN's distribution (Jang et al., arXiv 2410.03355;
LANTERN++: Park et al., arXiv 2502.06352) exactly: p(c) + mass at c, nothing on A(c), and p
elsewhere, so that its total variation from p is the mass. Three properties are added. The choice is
coupled to plain decoding: images of one seed are the same until a code is replaced, and bit for bit
if nothing is relaxed. No draft distribution q is needed, so the rule judges any draft. P(emitted
code is not t) bounds the total variation, so it is reported, and kept within a budget (see
`tv_budget`). With several children the codes that they stand for add up: c deterministic candidates
may spend c delta at a position.

For GSD's partition the cluster of the emitted code is always that of t: the distribution of the
clusters is the target's. A greedy target has all its mass on t, so that LANTERN and LANTERN++ never
relax it; the published code does, by the probabilities before temperature. It also reads one number
as delta up to 1 and as lambda above; here they are two settings.

`least_gain` is our addition. Every replaced code costs the same likeness, but saves as many codes
as the draft expects below it. A code is only replaced if at least `least_gain` codes are expected.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import inf
from typing import Self, TypeVar

from ragspec.errors import InputError, RuleError
from ragspec.needs import Needs
from ragspec.rules.base import Rule, TargetView, Verdict
from ragspec.rules.walk import Walk, descend
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import promised
from ragspec.visual.checks import check_setting
from ragspec.visual.rules.codebook import CodeNeighbours, CodePartition, Codes, Distribution
from ragspec.visual.rules.tv_budget import APPROXIMATE, TVBudget

Table = TypeVar("Table", CodeNeighbours, CodePartition)


class RelaxedWalk(Rule):
    """A walk in which a drafted code stands for the codes near it, up to a mass that `bound` sets.

    Every row counts its spending in the rule that `open` returns.

    Args:
        near: The codes that each of V codes may stand for, nearest first.
        tv_budget: See `TVBudget`; a number is a budget that is spent first come, first served.
        least_gain: A drafted code stands for others only if this many nodes are expected below.

    Raises:
        InputError: `least_gain` or `tv_budget` is no number, negative or not finite.
    """

    name = "relaxed-walk"
    needs = Needs(probabilities=True)

    def __init__(
        self,
        near: Sequence[Codes] | Codes,
        tv_budget: TVBudget | float | None = None,
        least_gain: float = 0.0,
    ) -> None:
        check_setting("least_gain", least_gain)
        self.near, self.least_gain = near, least_gain
        if tv_budget is not None and not isinstance(tv_budget, TVBudget):
            tv_budget = TVBudget(tv_budget)
        self.tv_budget = tv_budget
        off = self.tv_budget is not None and self.tv_budget.total == 0.0
        self.relaxes = not off and self.bound(1.0) > 0.0 and any(map(len, near))
        self.spent = 0.0  # sum of the excess of the row's positions
        self.drafted = True  # whether the row has judged a draft: others have the plain codes
        self.bounds = True  # whether every draft so far was deterministic: others end the bound

    @property
    def label(self) -> str:
        """The guarantee of a row so far; a draft that is not deterministic ends a bound."""
        if not self.relaxes or not self.drafted:
            return Walk.label
        if self.tv_budget is None or not self.bounds or self.tv_budget.total >= 1.0:
            return APPROXIMATE
        return f"bounded(tv<={float(self.tv_budget.total)})"  # unrounded: never below the bound

    def bound(self, p: float) -> float:
        """Return the most mass that a code of probability p may stand for."""
        raise NotImplementedError

    def related(self, code: int, p: Distribution) -> Codes:
        """Return A(code) under p [V], nearest first: the longest prefix of `near` in the bound."""
        codes = self.near[code]
        masses = p[codes].cumsum()
        return codes[: int(masses.searchsorted(self.bound(float(p[code])), "right"))]

    def check_size(self, size: int) -> None:
        """Raise RuleError unless the target chooses among the codes of the rule's code-book."""
        if size != len(self.near):
            raise RuleError(
                f"the target chooses among {size} codes, the rule's table is of a code-book of "
                f"{len(self.near)}; expected one code-book. Build the table from the target's own."
            )

    def open(self) -> Self:
        """Return the rule for one row, with its budget unspent."""
        row = copy(self)
        row.spent, row.bounds, row.drafted = 0.0, True, False
        return row

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path, the code that follows it, and each position's excess.

        Raises:
            RuleError: Target, draft and rule are not over the same codes.
        """
        if not self.relaxes:
            exact = Walk().judge(tree, target)
            return replace(exact, excess=(0.0,) * (len(exact.path) + (exact.token is not None)))
        if len(tree):
            self.drafted = True
            self.bounds &= tree.kind is DraftKind.DETERMINISTIC
            self.check_size(max(len(self.near), int(tree.tokens.max()) + 1))
        tokens, budget = tree.tokens.tolist(), self.tv_budget
        below, excess = promised(tree), list[float]()

        def decide(node: int, siblings: Sequence[int]) -> tuple[int | None, int]:
            code, spent = target.token(node), 0.0
            offered = {tokens[child]: child for child in siblings}
            eligible = [each for each, child in offered.items() if below[child] >= self.least_gain]
            chosen = code if code in offered else None
            left = inf if budget is None else budget.left(target.index(node), self.spent)
            if eligible and tree.kind is not DraftKind.COUPLED:
                p = self._distribution(target, node)
                stand_in, spent = self._shares(list(offered), eligible, code, p, left)
                chosen = stand_in if chosen is None else chosen
            elif eligible and chosen is None:
                chosen = self._stand_in(eligible, code, target, node, left)
                spent = 0.0 if chosen is None else 1.0
            self.spent += spent
            excess.append(spent)
            return (None if chosen is None else offered[chosen]), code

        return replace(descend(tree, target, decide), excess=tuple(excess))

    def _stand_in(
        self, drafted: Sequence[int], code: int, target: TargetView, node: int, left: float
    ) -> int | None:
        """Return the first drafted code that stands for the target's, or None."""
        near = [each for each in drafted if code in self.near[each]]
        if left < 1.0 or not near:
            return None
        p = self._distribution(target, node)  # computed only if needed
        return next((each for each in near if code in self.related(each, p)), None)

    def _shares(
        self, drafted: list[int], eligible: Sequence[int], code: int, p: Distribution, left: float
    ) -> tuple[int | None, float]:
        """Return the drafted code that stands for the target's, and the mass of all replaced codes.

        The mass does not depend on the target's choice. A prefix ends before it exceeds `left`.
        """
        chosen, spent = None, 0.0
        if left <= 0.0:
            return chosen, spent
        fresh = p.copy()  # mass of codes that no drafted code is or stands for yet
        fresh[drafted] = 0.0
        for each in eligible:
            codes = self.related(each, p)
            masses = fresh[codes].cumsum()
            count = int(masses.searchsorted(left - spent, side="right"))
            if not count:
                continue
            codes = codes[:count]
            spent += float(masses[count - 1])
            fresh[codes] = 0.0
            if chosen is None and code in codes:
                chosen = each
        return chosen, spent

    def _distribution(self, target: TargetView, node: int) -> Distribution:
        p: Distribution = target.probabilities(node).numpy()
        self.check_size(len(p))
        return p


class Lantern(RelaxedWalk):
    """LANTERN: a drafted code stands for the nearest codes whose mass is at most delta.

    A code without probability stands for no other: filters keep it out of the image.

    Args:
        neighbours: Table of the target's code-book.
        k: Nearest codes to consider; None for all of the table.
        delta: The largest mass, from 0 to below 1.

    Raises:
        InputError: delta is outside its limits, or k is beyond the table.
    """

    name = "lantern"
    relaxed_by = "delta"

    def __init__(
        self,
        neighbours: CodeNeighbours | None = None,
        k: int | None = None,
        delta: float = 0.1,
        tv_budget: TVBudget | float | None = None,
        least_gain: float = 0.0,
    ) -> None:
        check_setting("delta", delta)
        self.delta = delta
        super().__init__(expect_table(self.name, neighbours).nearest(k), tv_budget, least_gain)

    def bound(self, p: float) -> float:
        """Return delta; 0 for a code without probability."""
        return self.delta if p > 0.0 else 0.0


class LanternPlus(RelaxedWalk):
    """LANTERN++: the mass is at most (lam - 1) p(c), so c becomes at most lam times as likely.

    Args:
        neighbours, k: See `Lantern`.
        lam: At least 1.

    Raises:
        InputError: lam is outside its limits, or k is beyond the table.
    """

    name = "lantern++"
    relaxed_by = "lam"

    def __init__(
        self,
        neighbours: CodeNeighbours | None = None,
        k: int | None = None,
        lam: float = 2.0,
        tv_budget: TVBudget | float | None = None,
        least_gain: float = 0.0,
    ) -> None:
        check_setting("lam", lam)
        self.lam = lam
        super().__init__(expect_table(self.name, neighbours).nearest(k), tv_budget, least_gain)

    def bound(self, p: float) -> float:
        """Return (lam - 1) p."""
        return (self.lam - 1.0) * p


class GSD(RelaxedWalk):
    """GSD (arXiv 2508.07747) over fixed clusters, where the paper forms one around each draft.

    A drafted code stands for all codes of its cluster; one without probability for none, so that
    fixed and removed codes stay.
    """

    name = "gsd"
    relaxed_by = "partition"

    def __init__(
        self,
        partition: CodePartition | None = None,
        tv_budget: TVBudget | float | None = None,
        least_gain: float = 0.0,
    ) -> None:
        super().__init__(expect_table(self.name, partition).mates, tv_budget, least_gain)

    def bound(self, p: float) -> float:
        """Return no bound; 0 for a code without probability."""
        return inf if p > 0.0 else 0.0


def expect_table(rule: str, table: Table | None) -> Table:
    """Return the table of a rule; raise InputError if it is None, as for a rule by name alone."""
    if table is None:
        raise InputError(
            f"rule {rule!r} needs to know which codes look alike. Make the rule with "
            f"ragspec.visual.rules.make_rule({rule!r}, codebook), or use ImagePipeline."
        )
    return table
