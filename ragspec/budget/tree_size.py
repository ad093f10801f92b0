"""The tree of most tokens per second, step by step: the sessions of AutoBudget and FrozenBudget.

`fit` chooses the size of the tree that was proposed. It is that of most tokens for the time of this
very step, and not of the run on average: a token that is sure is worth a plain step where nothing
else can be drafted, and little in the middle of a quotation, where the next step would draft it
too. How much is asked for, and whether at all, is the adviser's matter (see `source_choice`).

Rows of a batch each decide as if all decided alike, so they want `CostCurve.batched`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.acceptance.base import Step
from ragspec.budget.base import Settings
from ragspec.budget.cost_curve import CostCurve, at
from ragspec.budget.gains import BUCKETS, OUTLIER, Experience
from ragspec.budget.source_choice import SourceChoice
from ragspec.trees.draft_tree import DRAWN, DraftTree
from ragspec.trees.operations import keep_best, keep_order


class GoodputSession:
    """The policy for one row. It shares `experience` and `cost` with the other rows."""

    def __init__(self, settings: Settings, experience: Experience, cost: CostCurve) -> None:
        self.settings = settings
        self.experience = experience
        self.cost = cost
        self.adviser = SourceChoice(experience, settings)
        self._plain = 0.0  # milliseconds of a plain step at the present length
        self._line: list[float] = []  # seconds of forwards of each of ROWS at the present length
        self._drafts = 0
        self._proposed = self._verified = False
        self._drawn: int | None = None  # nodes to keep of the next drawn draft; None: all
        self._last: tuple[Step, float, int, float] | None = None  # its times are known a step late

    @property
    def reason(self) -> str | None:
        """Why speculation was off; None where a draft was verified, or none was ever proposed."""
        if self._verified or (self.adviser.asked and not self._proposed):
            return None
        return "no draft was expected to be worth its time on this text and device"

    def allowance(self, length: int) -> int:
        """Return how many nodes may be asked for; the adviser says how many are worth it."""
        self._line = self.cost.line(length)
        self._plain = 1000.0 * self._line[0] + self.experience.host
        self.adviser.begin(self._rate(), self._plain)
        return self.settings.maximum

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the part of the tree of most tokens per time; possibly the empty tree."""
        asked = self.adviser.asked
        if not len(tree):
            self.adviser.learn_draft([0.0] * (asked + 1), 0)
            return tree
        self._proposed = True
        tree = self.adviser.appraised(tree)
        reach = tree.reach.tolist()
        order, last = keep_order(tree, reach), len(tree)
        net = self._nets(reach, order)
        best = max(range(len(net)), key=net.__getitem__)
        if net[best] < net[0] + self.settings.margin:
            best = 0
        self.adviser.learn_draft(net, best if BUCKETS[best] <= last else 0)
        size = min(BUCKETS[best], last)
        if tree.kind in DRAWN:
            size = self._before_draw(size, last)
        return keep_best(tree, size, order)

    def _before_draw(self, size: int, last: int) -> int:
        """Return how many of `last` drawn nodes to keep, as the draft before this one has it.

        size: what this one would have; it may depend on the tokens that were drawn, so it is for
        the next. See `trees.operations.keep_order`.
        """
        settled, self._drawn = self._drawn, size if size < last else None
        return last if settled is None else min(settled, last)

    def _nets(self, reach: Sequence[float], order: Sequence[int]) -> list[float]:
        """Return the expected tokens less the time, in tokens, by bucket that was asked for.

        Time counts at the best rate that any size of this tree would reach.
        """
        gains = [0.0]
        for node in order:
            gains.append(gains[-1] + reach[node])
        asked = self.adviser.asked
        sizes = [min(size, len(order)) for size in BUCKETS[: asked + 1]]
        fixed = self.experience.host + self.experience.draft.of(BUCKETS[asked])
        times = [1000.0 * at(self._line, size + 1) + fixed for size in sizes]
        rate = max((1.0 + gains[n]) / time for n, time in zip(sizes, times, strict=True))
        return [gains[n] - rate * time for n, time in zip(sizes, times, strict=True)]

    def observe(self, step: Step, length: int) -> None:
        """Learn what came of the draft, and what the step before this one took."""
        asked = BUCKETS[self.adviser.asked]
        self._verified = self._verified or len(step.tree) > 0
        self.adviser.learn_step(step, self._line, self._rate())
        if self.settings.learns:
            if self._last is not None:
                self._learn_times(*self._last)
            rows, verify = len(step.tree) + 1, step.milliseconds.get("verify", 0.0)
            self._last = step, 1000.0 * at(self._line, rows), asked, self.adviser.extra
            self.cost.refine(rows, length, verify / 1000.0)

    def _learn_times(self, step: Step, forward: float, asked: int, extra: float) -> None:
        """Learn from a step's milliseconds. What a draft adds to the host's is part of its price.

        forward: those that were expected. extra: those of sources that have a price of their own.
        """
        known, spent = self.experience, step.milliseconds
        usual, host = known.host, spent.get("host", 0.0) + spent.get("commit", 0.0)
        if not asked or not usual or host < usual:
            known.learn_host(host)
        if asked:
            self._drafts += 1
            if "draft" in spent and self._drafts > 1:  # the first may hold a prefill
                late = max(0.0, min(host, OUTLIER * usual) - usual)
                known.draft.learn(asked, spent["draft"] - extra + late)
            extra += known.draft.of(asked)
        time = forward + known.host + extra
        known.learn_step(len(step.tokens), time)

    def _rate(self) -> float:
        """Return the present tokens per millisecond, never below those of plain decoding."""
        known = self.experience
        return max(known.tokens / known.time if known.time > 0.0 else 0.0, 1.0 / self._plain)
