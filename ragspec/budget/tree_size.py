"""The tree of most tokens per second, step by step: the sessions of AutoBudget and FrozenBudget.

`fit` chooses the size of the tree that was proposed, `allowance` how much to ask for and whether
to ask at all. The size is that of most tokens for the time of this very step, and not of the run
on average: a token that is sure is worth a plain step where nothing else can be drafted, and
little in the middle of a quotation, where the next step would draft it too.

Speculation goes off when the time that it lost, less what it won since, exceeds one plain step.
While it is off the drafter is probed now and then: the net time lost to probes is booked and may
not exceed a small share of the row's time, pauses double after a probe in vain, and a probe that
the text followed halves the evidence against the drafter.

Rows of a batch each decide as if all decided alike, so they want `CostCurve.batched`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragspec.acceptance.base import Step
from ragspec.budget.calibration import UNKNOWN
from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.experience import Experience
from ragspec.budget.gains import BUCKETS, CHEAP, FREE, OUTLIER
from ragspec.budget.source_choice import Economy
from ragspec.trees.draft_tree import DRAWN, DraftTree
from ragspec.trees.operations import keep_best, keep_order

LONGEST_PAUSE = 16  # in pauses that the share for probes would allow
PROBE = BUCKETS.index(4)
SELDOM = 4  # of the steps without a draft, one in so many is learned from
SOMETIMES = 2  # of the drafted ones: the curve is worked out anew after each
SLOW, QUICK = 0.2, 0.34  # weights of a step in the rate of drafting: in use, in a probe


@dataclass(frozen=True, slots=True)
class Settings:
    """What AutoBudget and FrozenBudget are made with; see there."""

    margin: float = 0.03
    probe_share: float = 0.008
    largest: int = len(BUCKETS) - 1
    learns: bool = True


class GoodputSession:
    """The policy for one row. It shares `experience` and `cost` with the other rows."""

    def __init__(self, settings: Settings, experience: Experience, cost: CostCurve) -> None:
        self.settings = settings
        self.experience = experience
        self.cost = cost
        self.chosen: dict[int, int] = {}
        self._plain = 0.0  # milliseconds of a plain step at the present length
        self._asked = 0
        self._calls = 0
        self._proposed = False
        self.adviser = Economy(experience, settings.probe_share, settings.learns)
        self._expected = 0.0
        self._off: bool | None = None
        self._pause, self._countdown = 1, 2
        self._regret = 0.0
        self._passed = 0
        self._costs: Sequence[float] = ()  # seconds of a forward of 0, 1, ... nodes of the draft
        self._late = 0.0  # milliseconds by which drafting lengthened the host's part of a step
        self._before: tuple[dict[str, float], bool] = ({}, False)
        self._drawn: int | None = None  # nodes to keep of the next drawn draft; None: all

    @property
    def reason(self) -> str | None:
        """Why speculation is off or did not pay, in one sentence; None where it did."""
        ratio = self._speedup()
        if self._off:
            return (
                "speculation is off: on this text and device drafting is expected to give "
                f"{ratio:.2f}x the speed of plain decoding"
            )
        if any(size > 0 for size in self.chosen) or not self.chosen:
            return None
        if not self._proposed:
            return "the drafter proposed nothing"
        return (
            "no draft was worth its verification: the tokens expected from it did not make up "
            f"for a longer forward (expected {ratio:.2f}x the speed of plain decoding)"
        )

    def allowance(self, length: int) -> int:
        """Return how many nodes to ask for: 0 while speculation is off, save for probes."""
        experience = self.experience
        self._plain = 1000.0 * self.cost.seconds(1, length) + experience.host
        if self._off is None or not self.settings.learns:
            self._off = self._share() > CHEAP and self._speedup() < 1.0
        asked = min(experience.asked, self.settings.largest)
        if self._off:
            self._countdown -= 1
            asked = min(asked, PROBE) if self._may_probe() else 0
        self._asked = asked
        self.adviser.begin(self._rate(), self._plain, BUCKETS[asked])
        return BUCKETS[asked]

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the part of the tree of most tokens per time; possibly the empty tree."""
        experience = self.experience
        if self.adviser.declined:
            self._asked = 0  # as if drafting were off
            return tree
        if not len(tree):
            self.adviser.learn_gain(0.0)
            if self.settings.learns:
                experience.learn_worth([0.0] * (self._asked + 1), 0)
            return tree
        if not self.adviser.used:  # a drafter that asked for no advice
            tree = self.adviser.appraise(tree, UNKNOWN)
        reach = experience.calibration.foresee(tree)
        order = keep_order(tree, reach)
        costs = self.cost.upto(length)
        gains, net = self._nets(reach, order, costs)
        best = max(range(len(net)), key=net.__getitem__)
        if net[best] < net[0] + self.settings.margin:
            best = 0
        last = len(order)
        if self.settings.learns:
            experience.learn_worth(net, best if BUCKETS[best] <= last else 0)
        self._proposed = self._proposed or last > 0
        size = min(BUCKETS[best], last)
        if tree.kind in DRAWN:
            size = self._before_draw(size, last)
        self._expected = gains[size]
        self._costs = costs[: size + 1]
        added = 1000.0 * max(0.0, costs[size] - costs[0])
        self.adviser.learn_gain(gains[size] - added / max(self._plain, 1e-9))
        return keep_best(tree, size, order)

    def _before_draw(self, size: int, last: int) -> int:
        """Return how many of `last` drawn nodes to keep, as the draft before this one has it.

        size: what this one would have; it may depend on the tokens that were drawn, so it is for
        the next. See `trees.operations.keep_order`.
        """
        settled, self._drawn = self._drawn, size if size < last else None
        return last if settled is None else min(settled, last)

    def _nets(
        self, reach: Sequence[float], order: Sequence[int], costs: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Return the expected tokens by number of nodes, and by bucket the tokens less the time.

        Time counts at the best rate that any size of this tree would reach. costs: seconds of
        forwards of 1, 2, ... rows.
        """
        gains = [0.0]
        for node in order:
            gains.append(gains[-1] + reach[node])
        last = len(order)
        top = self._asked or self.settings.largest
        sizes = [min(size, last) for size in BUCKETS[: top + 1]]
        fixed = self.experience.host + self.experience.draft.of(BUCKETS[self._asked])
        times = [1000.0 * costs[size] + fixed for size in sizes]
        rate = max((1.0 + gains[n]) / time for n, time in zip(sizes, times, strict=True))
        return gains, [gains[n] - rate * time for n, time in zip(sizes, times, strict=True)]

    def observe(self, step: Step, length: int) -> None:
        """Learn from a step, and switch speculation off or on."""
        size = len(step.tree)
        self.chosen[size] = self.chosen.get(size, 0) + 1
        if not self._asked and not size:
            self._pass(step, length)
            return
        followed = self.adviser.learn_step(step, self._price)
        if not self.settings.learns:
            return
        experience, settings, spent = self.experience, self.settings, step.milliseconds
        if size:
            experience.calibration.look_back(step.tree, step.tokens)
        if "verify" in spent and self._calls % SOMETIMES == 0:
            self.cost.refine(size + 1, length, spent["verify"] / 1000.0)
        self._learn_host(spent)
        self._plain = 1000.0 * self.cost.seconds(1, length) + experience.host
        time = 1000.0 * self.cost.seconds(size + 1, length) + experience.host
        if self._asked:
            self._calls += 1
            if "draft" in spent and self._calls > 1:  # the first may hold a prefill
                drafting = spent["draft"] - self.adviser.extra + self._late
                experience.draft.learn(BUCKETS[self._asked], drafting)
            time += experience.draft.of(BUCKETS[self._asked])
            weight = QUICK if self._off else SLOW
            experience.drafted.learn(1.0 + self._expected, time, weight)
            if self._off:
                # A draft model that reads up on the text takes longer than its drafts tell.
                late = spent.get("draft", 0.0) - experience.draft.of(BUCKETS[self._asked])
                gain = len(step.tokens) - (time + max(late, 0.0)) / self._plain
                experience.earn(gain, self._probe_price())
                self._judge_probe(followed)
            else:
                self._regret += time / self._plain - 1.0 - self._expected
                self._regret = max(0.0, self._regret)
                if self._regret > 1.0 and self._share() > FREE:
                    self._off = True  # the rate may still hold claims since proved wrong
                    experience.drafted.learn(1.0 + self._expected, time, 1.0)
        time += self.adviser.extra
        experience.earn(settings.probe_share * time / self._plain, self._probe_price())
        experience.overall.learn(len(step.tokens), time, 0.05)
        if self._asked:
            experience.choose_asked(self._rate(), self.settings.largest)
        self._asked, self._expected = 0, 0.0

    def _pass(self, step: Step, length: int) -> None:
        """Learn from a step for which nobody drafted: of one in so many, in place of the others."""
        experience, spent = self.experience, step.milliseconds
        self._passed += 1
        if not self.settings.learns or self._passed % SELDOM:
            return
        if "verify" in spent:
            self.cost.refine(1, length, spent["verify"] / 1000.0)
        self._learn_host(spent)
        experience.earn(SELDOM * self.settings.probe_share, self._probe_price())
        experience.overall.learn(len(step.tokens), self._plain, SELDOM * 0.05)

    def _learn_host(self, spent: dict[str, float]) -> None:
        """Learn the host time of a step; what a draft adds to it is part of the draft's price."""
        known, drafted = (spent, self._asked > 0) if "host" in spent else self._before
        if "host" in known:  # it may be known a step late
            host = known["host"] + known.get("commit", 0.0)
            usual = self.experience.host
            if drafted and usual:
                self._late = max(0.0, min(host, OUTLIER * usual) - usual)
            if not drafted or host < usual or not usual:
                self.experience.learn_host(host)
        self._before = (spent, self._asked > 0)

    def _price(self, nodes: int) -> float:
        """Return the tokens that could be had in the time that the last nodes added to the forward.

        The first node adds most: it is where drafting at all is paid for, by whoever drafts alone.
        """
        size = len(self._costs) - 1
        if size < 1 or not nodes:
            return 0.0
        added = self._costs[size] - self._costs[max(0, size - nodes)]
        return 1000.0 * self._rate() * max(0.0, added)

    def _rate(self) -> float:
        """Return the present tokens per millisecond, never below those of plain decoding."""
        plain = 1.0 / self._plain if self._plain > 0.0 else 0.0
        return max(plain, self.experience.overall.value)

    def _share(self) -> float:
        """Return the cost of drafting in plain steps."""
        asked = BUCKETS[min(self.experience.asked, self.settings.largest)]
        return self.experience.draft.of(asked) / max(self._plain, 1e-9)

    def _speedup(self) -> float:
        """Return the tokens per time of drafted steps over those of plain ones; 1 if unknown."""
        drafted = self.experience.drafted
        return drafted.value * self._plain if drafted.steps >= 3 else 1.0

    def _may_probe(self) -> bool:
        """Tell whether the pause is over and the time lost to probes leaves room for one."""
        settings = self.settings
        if not settings.learns or settings.probe_share == 0.0 or self._countdown > 0:
            return False
        return self._probe_price() <= self.experience.credit

    def _probe_price(self) -> float:
        """Return what a probe costs, in plain steps."""
        cost = self.experience.draft.of(BUCKETS[min(self.experience.asked, PROBE)])
        return cost / max(self._plain, 1e-9)

    def _judge_probe(self, followed: int) -> None:
        """Turn speculation on if drafting pays again, else set the next pause."""
        if self._speedup() > 1.0 + self.settings.margin:
            self._off, self._regret, self._pause, self._countdown = False, 0.0, 1, 2
        elif followed:
            self.experience.calibration.fade(0.5)
            self._pause, self._countdown = 1, 1
        else:
            self._countdown = int(self._pause * (2.0 + self._share() / self.settings.probe_share))
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
