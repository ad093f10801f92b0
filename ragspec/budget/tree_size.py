"""The tree of most tokens per second, step by step: the sessions of AutoBudget.

`fit` chooses the size of the tree that gives most tokens for the time of this step, not of the run
on average. A sure token is worth a plain step if nothing else can be drafted, and little in the
middle of a quotation, where the next step would draft it too. The adviser decides whether to draft
and how many nodes to request (see `source_choice`).

Rows that share a forward decide together (`fit_together`), as all are as wide as the widest. One
width is chosen against the cost of the whole forward over the rows alive now, and every row fills
it with the nodes most likely to be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ragspec.budget.base import BudgetSession, Settings
from ragspec.budget.cost_curve import CostCurve, CostLine, SharedCost
from ragspec.budget.gains import BUCKETS, OUTLIER, Experience
from ragspec.budget.source_choice import SourceChoice
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import SAMPLED_KINDS, DraftTree
from ragspec.trees.operations import keep_best, keep_order


@dataclass(frozen=True, slots=True)
class Offer:
    """The draft of one row: its nodes, likeliest first, and the expected tokens of the first n."""

    tree: DraftTree
    order: Sequence[int]
    last: int
    gains: Sequence[float]

    def gain(self, size: int) -> float:
        """Return the tokens expected of the best `size` nodes."""
        return self.gains[min(size, len(self.gains) - 1)]


class GoodputSession:
    """The policy for one row, which shares `experience` and `cost` with the other rows.

    The milliseconds of drafting and of the host that it learns are those of one row.
    """

    def __init__(
        self, settings: Settings, experience: Experience, cost: CostCurve | SharedCost
    ) -> None:
        self.settings = settings
        self.experience = experience
        self.cost = cost
        self.adviser = SourceChoice(experience, settings)
        self._plain = 0.0  # milliseconds of a plain step at the present length
        self._line = CostLine([])  # of forwards at the present length
        self._drafts = 0
        self._proposed = self._verified = False
        self._samples: int | None = None  # nodes to keep of the next sampled draft; None: all
        self._last: tuple[Step, float, int, float, int] | None = None  # times come a step late

    @property
    def reason(self) -> str | None:
        """Why speculation was off; None if a draft was verified, or none was ever proposed."""
        if self._verified or (self.adviser.bucket and not self._proposed):
            return None
        return "no draft was expected to save time on this text and device"

    def allowance(self, length: int) -> int:
        """Return the largest number of nodes; the adviser chooses how many are worth it."""
        self._line, alive = self.cost.line(length), self.cost.alive
        self._plain = 1000.0 * self._line.seconds[0] + self.experience.host * alive
        self.adviser.begin(self._rate(), self._plain / alive)
        return self.settings.maximum

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the part of the tree of most tokens per time; possibly the empty tree."""
        return fit_together([self], [tree], [length])[0]

    def offer(self, tree: DraftTree) -> Offer | None:
        """Return the expected gain of a draft; None for an empty one."""
        if not len(tree):
            self.adviser.learn_draft([0.0] * (self.adviser.bucket + 1), 0)
            return None
        self._proposed = True
        tree = self.adviser.appraised(tree)
        accept_prob = tree.accept_prob.tolist()
        order = keep_order(tree, accept_prob)
        gains = list(accumulate((accept_prob[node] for node in order), initial=0.0))
        return Offer(tree, order, len(tree), gains)

    def take(self, offer: Offer, best: int, prices: Sequence[float]) -> DraftTree:
        """Return the part of a draft that the forward has room for, and learn its gain.

        Args:
            best: The bucket that was chosen for all rows.
            prices: The price of every bucket that was requested, in tokens.
        """
        request = self.adviser.bucket
        bucket, last = min(best, request), offer.last
        net = [offer.gain(BUCKETS[i]) - prices[i] for i in range(request + 1)]
        self.adviser.learn_draft(net, bucket if BUCKETS[bucket] <= last else 0)
        size = min(BUCKETS[best], last)
        if offer.tree.kind in SAMPLED_KINDS:
            size = self._before_draw(size, last)
        return keep_best(offer.tree, size, offer.order)

    @property
    def drafting(self) -> float:
        """The expected milliseconds of this row's draft."""
        return self.experience.draft.of(BUCKETS[self.adviser.bucket])

    def _before_draw(self, size: int, last: int) -> int:
        """Return how many of `last` sampled nodes to keep, as settled by the draft before.

        The `size` of this draft may depend on its sampled tokens, so it settles the next draft. See
        `trees.operations.keep_order`.
        """
        settled, self._samples = self._samples, size if size < last else None
        return last if settled is None else min(settled, last)

    def observe(self, step: Step, length: int) -> None:
        """Learn from the outcome of the draft, and from the times of the step before."""
        request, alive = BUCKETS[self.adviser.bucket], self.cost.alive
        self._verified = self._verified or len(step.tree) > 0
        self.adviser.learn_step(step, self._line, self._rate() / alive)
        if self._last is not None:
            self._learn_times(*self._last)
        rows = self.cost.width or len(step.tree) + 1
        forward, verify = 1000.0 * self._line.at(rows), step.milliseconds.get("verify", 0.0)
        self._last = step, forward, request, self.adviser.extra, alive
        self.cost.refine(rows, length, verify / 1000.0)

    def _learn_times(
        self, step: Step, forward: float, request: int, extra: float, alive: int
    ) -> None:
        """Learn from a step's milliseconds; a draft also pays for what it adds to the host's.

        `forward` are the expected milliseconds of the forward, `extra` those of sources that pay
        for themselves. The `alive` rows that shared the step are taken to be alike.
        """
        experience, spent = self.experience, step.milliseconds
        usual = experience.host
        host = (spent.get("host", 0.0) + spent.get("commit", 0.0)) / alive
        if not request or not usual or host < usual:
            experience.learn_host(host)
        if request:
            self._drafts += 1
            if "draft" in spent and self._drafts > 1:  # the first may hold a prefill
                late = max(0.0, min(host, OUTLIER * usual) - usual)
                experience.draft.learn(request, max(0.0, spent["draft"] / alive - extra) + late)
            extra += experience.draft.of(request)
        time = forward + alive * (experience.host + extra)
        experience.learn_step(len(step.tokens), time)

    def _rate(self) -> float:
        """Return the tokens per millisecond of all rows now, at least those of plain decoding."""
        tokens, time = self.experience.tokens, self.experience.time
        rate = max(tokens / time if time > 0.0 else 0.0, 1.0 / self._plain)
        return rate * self.cost.alive


def fit_together(
    budgets: Sequence[BudgetSession | None], trees: Sequence[DraftTree], lengths: Sequence[int]
) -> list[DraftTree]:
    """Return the parts of the rows' drafts that are worth the time of their shared forward.

    Policies that go by the clock choose its width together; others decide for each row.
    """
    fitted = list(trees)
    offers: dict[int, tuple[GoodputSession, Offer]] = {}
    for row, (budget, tree, length) in enumerate(zip(budgets, trees, lengths, strict=True)):
        if not isinstance(budget, GoodputSession):
            fitted[row] = tree if budget is None else budget.fit(tree, length)
        elif (offer := budget.offer(tree)) is not None:
            offers[row] = budget, offer
    if offers:
        sharing = [budget for budget in budgets if isinstance(budget, GoodputSession)]
        best, prices = _widest(sharing, list(offers.values()))
        for row, (session, offer) in offers.items():
            fitted[row] = session.take(offer, best, prices)
    return fitted


def _widest(
    sharing: Sequence[GoodputSession], offers: Sequence[tuple[GoodputSession, Offer]]
) -> tuple[int, list[float]]:
    """Return the bucket of most tokens less time, and each row's price of every bucket, in tokens.

    Time is priced at the best rate of any width of this forward, and shared by the rows that draft.
    """
    dearest = max((session for session, _ in offers), key=lambda each: each._line.seconds[-1])
    alive, largest = dearest.cost.alive, max(offer.last for _, offer in offers)
    request = max(session.adviser.bucket for session, _ in offers)
    fixed = dearest.experience.host * alive + sum(session.drafting for session in sharing)
    sizes = [min(size, largest) for size in BUCKETS[: request + 1]]
    gains = [sum(offer.gain(size) for _, offer in offers) for size in sizes]
    times = [1000.0 * dearest._line.at(size + 1) + fixed for size in sizes]
    rate = max((alive + gain) / time for gain, time in zip(gains, times, strict=True))
    net = [gain - rate * time for gain, time in zip(gains, times, strict=True)]
    best = max(range(len(net)), key=net.__getitem__)
    if net[best] < net[0] + dearest.settings.margin * alive:
        best = 0
    return best, [rate * time / len(offers) for time in times]
