"""The tree of most tokens per second, step by step: `AutoBudget` and its sessions.

Three decisions are made for each step.
- Whether to draft, by the expected acceptance: sources that cheaply know how likely their best
  draft is (the length of a match, a known neighbour) report it first. A draft is made if its gain
  at this expected acceptance is more than the tokens that could be had in its time. Otherwise a
  trial is due now and then, which may cost a small share of all time.
- Whether to ask a source after others, likewise, by what it added to them at an equal claim of
  theirs: a draft model is idle while a quotation is being copied. The larger of two claims is too
  large on average, so the claims themselves would not do.
- How much of the draft to verify: the tokens of this step for its time, not of the run on average.
  A sure token is worth a plain step if nothing else can be drafted, and little in the middle of a
  quotation, where the next step would draft it too.

Sequences that share a forward choose one number of nodes against the cost of the whole forward, and
the likeliest nodes of all drafts fill it. Expected acceptance as the one currency of all sources
is SuffixDecoding's view (arXiv 2411.04975). The decisions are our own design.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ragspec.budget.base import BudgetPolicy, BudgetSession, FixedBudget
from ragspec.budget.calibration import Calibration, Claims
from ragspec.budget.forward_cost import ForwardCost
from ragspec.budget.gains import BUCKETS, OUTLIER, Experience, Gain, faded
from ragspec.errors import UnknownNameError
from ragspec.rules.base import Step
from ragspec.sampling.settings import whole
from ragspec.trees.draft_tree import SAMPLED_KINDS, DraftTree
from ragspec.trees.operations import keep_best, keep_order

LARGEST = len(BUCKETS) - 1  # bucket of a draft
MARGIN = 0.03  # share of a plain step's tokens by which a draft must be better


class GoodputSession(BudgetSession):
    """The budget of one sequence, which shares `experience` and `cost` with the others.

    The milliseconds of drafting and of the host that it learns are those of one sequence.

    Attributes:
        rows: Sequences that share the forward.
        counts: Positions of each of them, in one list for all; empty while unknown.
        gain: That of drafts at this step's expected acceptance.
        extra: Milliseconds of this step's sources that must pay for themselves; the time of the
            others is the price of drafting.
    """

    def __init__(self, experience: Experience, cost: ForwardCost) -> None:
        super().__init__(BUCKETS[LARGEST])
        self.experience, self.cost, self.length, self.rows = experience, cost, 0, 1
        self.counts: Sequence[int] = ()
        self.calibration = Calibration(experience.claims)
        self.gain = experience.gain("", None)
        self.extra = self._plain = 0.0
        self._open: list[tuple[DraftTree, Claims]] = []  # the appraised trees of this step
        self._bucket = LARGEST  # size class of this step's draft; 0: drafting does not pay
        # The gain of the source being asked, and how many trees there were before it.
        self._asking: tuple[Gain, int] | None = None
        self._tried: list[tuple[str, Gain, int, int]] = []  # source, gain, trees before and after
        self._skipped: dict[str, int] = {}
        self._proposed = self._verified = False
        self._samples: int | None = None  # nodes to keep of the next sampled draft; None: all

    @property
    def reason(self) -> str | None:
        """Why speculation was off; None if a draft was verified, or none was ever proposed."""
        if self._verified or (self._bucket and not self._proposed):
            return None
        return "no draft was expected to save time on this text and device"

    def milliseconds(self, counts: Sequence[int]) -> float:
        """Return those of a forward, given the positions of each sequence."""
        return 1000.0 * self.cost.seconds(self.cost.positions(counts), self.length)

    def allowance(self, length: int, rows: int = 1) -> int:
        """Start a step, and return the largest number of nodes; see `nodes` and `share`."""
        self.length, self.rows = length, rows
        plain = self.milliseconds([1] * rows) + self.experience.host * rows
        self.rate, self._plain = rows * self.experience.rate(plain), plain / rows
        self.gain, self._bucket, self.extra = self.experience.gain("", None), LARGEST, 0.0
        self._tried, self._asking, self._open = [], None, []
        return self.size

    def nodes(self, expected_acceptance: float | None, budget: int) -> int:
        """Return how many nodes to draft; 0 if no draft pays and no trial is due."""
        if expected_acceptance is not None:
            expected_acceptance = self.calibration.shifted(expected_acceptance)
        self.gain = self.experience.gain("", expected_acceptance)
        drafts = self.gain.allows(self.rate, self._plain)
        self._bucket = min(LARGEST, round(self.gain.size)) if drafts else 0
        return min(BUCKETS[self._bucket], budget)

    def share(self, source: str, budget: int) -> int:
        """Return the nodes that a source may draft; 0 if it does not pay and no trial is due."""
        best = max((float(tree.accept_prob.max()) for tree, _ in self._open), default=0.0)
        gain = self.experience.gain(source, best)
        if not gain.allows(self.rate, self._plain):
            steps = self._skipped[source] = self._skipped.get(source, 0) + 1
            self.rested[source] = f"{steps} of its steps, as it costs more time than it saves"
            self._asking = None
            return 0
        self._asking = gain, len(self._open)
        return budget

    def appraise(self, tree: DraftTree) -> DraftTree:
        """Return a source's tree with corrected claims, and record it for `observe`."""
        appraised, claims = self.calibration.appraise(tree)
        self._open.append((appraised, claims))
        return appraised

    def spent(self, source: str, milliseconds: float) -> None:
        """Learn the source's cost from the milliseconds of its draft."""
        asking, self._asking = self._asking, None
        if asking is not None:
            asking[0].learn_cost(milliseconds)
            self._tried.append((source, *asking, len(self._open)))
            self.extra += milliseconds

    def fit(self, tree: DraftTree) -> DraftTree:
        """Return the part of the tree of most tokens per time; possibly the empty tree."""
        return fit_together([self], [tree])[0]

    def offer(self, tree: DraftTree) -> "Offer | None":
        """Return the expected gain of a draft; None if there is no node."""
        if not len(tree):
            if self._bucket:
                self.gain.learn(0.0)
            return None
        self._proposed = True
        tree = tree if self._open else self.appraise(tree)
        claims = tree.accept_prob.tolist()
        order = keep_order(tree, claims)
        accept_prob = [claims[node] for node in order]
        return Offer(self, tree, order, accept_prob, list(accumulate(accept_prob, initial=0.0)))

    def take(self, offer: "Offer", size: int, price: float) -> DraftTree:
        """Return the first `size` nodes of a draft, and learn its gain.

        Args:
            price: The time of verifying a node, in tokens.
        """
        if self._bucket:
            self.gain.learn(offer.gains[size] - price * size)
            self.gain.learn_size(self._bucket, bisect_right(BUCKETS, size) - 1)
        if offer.tree.kind in SAMPLED_KINDS:
            size = self._before_draw(size, len(offer.order))
        return keep_best(offer.tree, size, offer.order)

    def _before_draw(self, size: int, last: int) -> int:
        """Return how many of `last` sampled nodes to keep, as settled by the draft before.

        The `size` of this draft may depend on its sampled tokens, so it settles the next draft. See
        `trees.operations.keep_order`.
        """
        settled, self._samples = self._samples, size if size < last else None
        return last if settled is None else min(settled, last)

    def observe(self, step: Step) -> None:
        """Learn from the outcome of the draft, and from the times of the step."""
        nodes = len(step.tree)
        if self._bucket:
            self._verified = self._verified or nodes > 0
            self._learn_gains(step)
        counts = self.counts or [nodes + 1]
        self._learn_times(step, self.milliseconds(counts))
        if self.cost.learned is not counts:  # another sequence may have reported this forward
            self.cost.learned = counts
            seconds = 0.001 * step.milliseconds.get("verify", 0.0)
            self.cost.learn(self.cost.positions(counts), self.length, seconds)

    def _learn_gains(self, step: Step) -> None:
        """Learn how claims fared, and the gain of each source that must pay for itself.

        Such a source is charged for the time that its nodes added to the forward. If a trial paid,
        the next one is due at once.
        """
        learn, tree = self.calibration.learn, step.tree
        followed = [learn(*appraised, step.tokens) for appraised in self._open]
        self.gain.learn_outcome(max(followed, default=0), self.rate)
        for source, gain, before, after in self._tried:
            nodes = sum(tree.sources[each] == source for each in tree.source.tolist())
            # The first node adds most: a source that drafts alone pays for drafting at all.
            counts = len(tree) + 1, len(tree) + 1 - nodes
            added = self.milliseconds(counts[:1]) - self.milliseconds(counts[1:])
            more = max(followed[:after], default=0) - max(followed[:before], default=0)
            gain.learn(more - self.rate * added)
            gain.learn_outcome(more - self.rate * added, self.rate)

    def _learn_times(self, step: Step, forward: float) -> None:
        """Learn from a step's milliseconds; the sequences that shared it are taken to be alike."""
        experience, spent, rows = self.experience, step.milliseconds, self.rows
        host = (spent.get("host", 0.0) + spent.get("commit", 0.0)) / rows
        usual, extra = experience.host, self.extra
        if not self._bucket or host < usual or not usual:
            experience.host = faded(usual, host)
        if self._bucket:
            if "draft" in spent:  # a draft also pays for what it adds to the host's time
                late = max(0.0, min(host, OUTLIER * usual) - usual)
                self.gain.learn_cost(max(0.0, spent["draft"] / rows - extra) + late)
            extra += self.gain.cost
        experience.learn_step(len(step.tokens), forward + rows * (experience.host + extra))


@dataclass(frozen=True, slots=True)
class Offer:
    """The draft of one sequence.

    Attributes:
        order: Its nodes in the order in which a budget keeps them.
        accept_prob: Their acceptance probabilities in that order.
        gains: The expected tokens of the first n of them, n from 0.
    """

    session: GoodputSession
    tree: DraftTree
    order: Sequence[int]
    accept_prob: Sequence[float]
    gains: Sequence[float]


def fit_together(
    budgets: Sequence[BudgetSession | None], trees: Sequence[DraftTree]
) -> list[DraftTree]:
    """Return the parts of the sequences' drafts that are worth the time of their shared forward.

    Policies that go by the clock choose its size together; others decide for each sequence.
    """
    fitted, counts = list(trees), list[int]()
    offers: dict[int, Offer] = {}
    drafting = 0.0
    for row, (budget, tree) in enumerate(zip(budgets, trees, strict=True)):
        if isinstance(budget, GoodputSession):
            budget.counts = counts
            drafting += budget.gain.cost if budget._bucket else 0.0
            if (offer := budget.offer(tree)) is not None:
                offers[row] = offer
        elif budget is not None:
            fitted[row] = budget.fit(tree)
    if offers:
        sizes, price = _best_sizes(list(offers.values()), drafting)
        for (row, offer), size in zip(offers.items(), sizes, strict=True):
            fitted[row] = offer.session.take(offer, size, price)
    counts += [1 + len(tree) for tree in fitted]
    return fitted


def _best_sizes(offers: Sequence[Offer], drafting: float) -> tuple[list[int], float]:
    """Return the nodes of each draft that give most tokens less time, and the price of a node.

    Time is priced at the best rate of any size of this forward.

    Args:
        drafting: The milliseconds of all drafts.
    """
    session = max((offer.session for offer in offers), key=lambda each: each.length)
    rows = session.rows
    fixed = session.experience.host * rows + drafting
    others = [1] * (rows - len(offers))
    last = bisect_left(BUCKETS, max(len(offer.order) for offer in offers))
    choices = [_likeliest(offers, nodes, session.cost.widths) for nodes in BUCKETS[: last + 1]]
    tokens, times = [], []
    for sizes in choices:
        tokens.append(rows + sum(o.gains[n] for o, n in zip(offers, sizes, strict=True)))
        times.append(session.milliseconds([1 + n for n in sizes] + others) + fixed)
    rate = max(n / time for n, time in zip(tokens, times, strict=True))
    net = [n - rate * time for n, time in zip(tokens, times, strict=True)]
    best = max(range(len(net)), key=net.__getitem__)
    if net[best] < net[0] + MARGIN * rows:
        best = 0
    return choices[best], rate * (times[best] - times[0]) / max(1, sum(choices[best]))


def _likeliest(offers: Sequence[Offer], nodes: int, widths: Sequence[int]) -> list[int]:
    """Return how many nodes of each draft to verify, `nodes` of each on average.

    In packed forwards those are the likeliest of all drafts. Padded ones have room for as many of
    each draft.
    """
    if len(offers) == 1 or widths:
        return [min(nodes, len(offer.order)) for offer in offers]
    pooled = sorted((-prob, i) for i, offer in enumerate(offers) for prob in offer.accept_prob)
    sizes = [0] * len(offers)
    for _, i in pooled[: nodes * len(offers)]:
        sizes[i] += 1
    return sizes


class AutoBudget(BudgetPolicy):
    """Chooses whether to draft and how much; all sequences opened here learn together."""

    name = "auto"
    needs_cost = True

    def __init__(self) -> None:
        self.experience = Experience()
        self._cost: ForwardCost | None = None

    def open(self, cost: ForwardCost | None = None) -> GoodputSession:
        """Return the budget of one sequence, which learns the cost of forwards."""
        cost = self._cost = cost or self._cost or ForwardCost()
        return GoodputSession(self.experience, cost)


def make_budget(spec: int | str | BudgetPolicy) -> BudgetPolicy:
    """Return the policy for "auto" or a number of nodes; a policy is returned as it is.

    Raises:
        InputError: The number is below 0.
        UnknownNameError: The word is another.
    """
    if isinstance(spec, str) and spec.strip().lstrip("-").isdecimal():
        spec = int(spec)
    if (nodes := whole(spec)) is not None:
        return FixedBudget(nodes)
    if spec == "auto":
        return AutoBudget()
    if isinstance(spec, BudgetPolicy):
        return spec
    raise UnknownNameError(
        f"got budget {spec!r}, expected 'auto' or a number of draft nodes (0 = plain decoding)."
    )
