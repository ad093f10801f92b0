"""The adviser of one row's sources: how far to trust their claims, and which of them to ask.

A drafter of several sources (see `drafters.fuse`) consults it before a source drafts, and lets it
correct every tree. Three decisions are made alike. Is the gain, as a fading mean with its
uncertainty, more than the tokens that could be had in its time? If not, is a trial due, which may
cost a small share of all time?
- Whether and how much to draft, by expected acceptance: sources that cheaply know how likely their
  best draft is (the length of a match, a known neighbour) report it first.
- Whether to ask a source after others, by what it added to them at an equal claim of theirs: a
  draft model is idle while a quotation is being copied. The claims themselves would not do: the
  larger of two claims is too large on average, and along a chain this adds up.
- Whether a source that learns from every step of the target should do so, for a whole text.

The corrections follow SuffixDecoding's view (arXiv 2411.04975) that expected acceptance is the one
currency of all sources. The choice of sources is our own design.
"""

from __future__ import annotations

from bisect import bisect_right

from ragspec.budget.base import Adviser, Settings
from ragspec.budget.cost_curve import CostLine
from ragspec.budget.gains import BUCKETS, FIRST_TRIAL, FORCE_TRIAL, PROB_EDGES, Experience, Gain
from ragspec.rules.base import Step

CHEAP, COSTLY_NODES = 0.1, 7  # plain steps above which a source is costly; the nodes it may draft
EXPLORING = 0.06  # share of the time for trials of a source with few trials so far
MIN_UPDATES = 256  # steps before a source that learns from every step is judged
TEACHING = 1.0 / 384.0  # the weight of one such step
TRIED = 8  # one in so many of the texts that would skip such a source uses it nevertheless


class SourceChoice(Adviser):
    """An adviser that also weighs the tokens gained against the time that they take.

    Attributes:
        bucket: Size class of this step's draft; 0 if drafting does not pay.
        extra: Milliseconds of this step's sources that must pay for themselves; the time of the
            others is the price of drafting.
    """

    def __init__(self, experience: Experience, settings: Settings) -> None:
        super().__init__(experience.calibration)
        self._experience = experience
        self._share = settings.probe_share
        self.bucket = self._largest = bisect_right(BUCKETS, settings.maximum) - 1
        self._plain = self.extra = 0.0
        self._nodes, self._expected_acceptance = 0, -1
        # The gain of the source being asked, and how many trees there were before it.
        self._asking: tuple[Gain, int] | None = None
        self._tried: list[tuple[str, Gain, int, int]] = []  # source, gain, trees before and after
        self._books: dict[str, float] = {}  # gains of learning sources in this step, in plain steps

    def begin(self, rate: float, plain: float) -> None:
        """Start a step, given the tokens per millisecond and the milliseconds of a plain step."""
        for source, net in self._books.items():
            self._experience.updates.setdefault(source, Gain()).learn(net, fading=TEACHING)
        self.rate, self._plain = rate, plain
        self._tried, self._books, self._asking, self.extra = [], {}, None, 0.0
        self._expected_acceptance, self.bucket = -1, self._largest

    def nodes(self, expected_acceptance: float | None, budget: int) -> int:
        """Return how many nodes to draft; 0 if no draft pays and no trial is due."""
        self._expected_acceptance = (
            -1 if expected_acceptance is None else bisect_right(PROB_EDGES, expected_acceptance)
        )
        gain, cost = self._experience.drafts[self._expected_acceptance], self._experience.draft
        self.bucket, net = gain.best(cost, self.rate, self._largest)
        if not gain.known:
            self.bucket = min(self.bucket, FIRST_TRIAL)
        elif net <= 0.0 and not gain.trial_due(
            cost.of(BUCKETS[self.bucket]) / self._plain, self._share
        ):
            self.bucket = 0
        self._nodes = min(BUCKETS[self.bucket], budget)
        return self._nodes

    def learn_draft(self, net: list[float], best: int) -> None:
        """Learn the draft's gain at this expected acceptance, see `SizedGain.learn_sizes`."""
        if self.bucket:
            self._experience.drafts[self._expected_acceptance].learn_sizes(net, best)

    def allowance(self, source: str, budget: int) -> int:
        """Return the nodes that a source may draft; 0 if it does not pay and no trial is due."""
        self._asking, record = None, self._experience.source(source)
        if record.cost.of(budget) > CHEAP * self._plain:
            budget = min(budget, COSTLY_NODES)
        price = record.cost.of(budget)
        best = max((max(each.accept_prob, default=0.0) for each in self._open), default=0.0)
        gain = record.gains[bisect_right(PROB_EDGES, best)]
        share = self._share if gain.known else EXPLORING
        pays = gain.mean + gain.std_err > price * self.rate
        if not pays and not gain.trial_due(price / self._plain, share):
            self._alone[source] = self._alone.get(source, 0) + 1
            return 0
        self._nodes, self._asking = budget, (gain, len(self._open))
        return budget

    def spent(self, source: str, milliseconds: float) -> None:
        """Learn the source's cost from the milliseconds of its draft."""
        asking, self._asking = self._asking, None
        if asking is not None:
            self._tried.append((source, *asking, len(self._open)))
            self.extra += milliseconds
        self._experience.source(source).cost.learn(self._nodes, milliseconds)
        if source in self._experience.updates:
            self._book(source, -self.rate * milliseconds)

    def should_skip(self, source: str) -> bool:
        """Return whether the source's learning does not pay; one text in TRIED uses it anyway."""
        gain = self._experience.updates.get(source)
        if gain is None or gain.trials < MIN_UPDATES or gain.mean + gain.std_err >= 0.0:
            return False
        gain.passed = (gain.passed + 1) % TRIED
        if gain.passed:
            self._alone[source] = 0
        return gain.passed > 0

    def record_cost(self, source: str, milliseconds: float) -> None:
        """Charge the source for the milliseconds that it took to learn from a step."""
        self._book(source, -self.rate * milliseconds)

    def _book(self, source: str, tokens: float) -> None:
        steps = tokens / (self.rate * self._plain)
        self._books[source] = self._books.get(source, 0.0) + steps

    def learn_step(self, step: Step, line: CostLine, rate: float) -> None:
        """Learn how claims fared, and the gain of each source that must pay for itself.

        Such a source is charged for the time that its nodes added to the forward.

        Args:
            line: The cost of forwards at the present length.
            rate: Tokens per millisecond, the price of time.
        """
        followed, tree, rows = self.learn(step.tokens), step.tree, len(step.tree) + 1
        longest = max(followed, default=0)
        if longest > self.rate * self._experience.draft.of(BUCKETS[self.bucket]):
            # The claims may be better than expected: try again at once.
            self._experience.drafts[self._expected_acceptance].passed = FORCE_TRIAL
        for source, gain, before, after in self._tried:
            nodes = sum(tree.sources[each] == source for each in tree.source.tolist())
            # The first node adds most: a source that drafts alone pays for drafting at all.
            price = 1000.0 * rate * (line.at(rows) - line.at(rows - nodes))
            more = max(followed[:after], default=0) - max(followed[:before], default=0)
            cost = self._experience.source(source).cost.of(COSTLY_NODES)
            gain.learn(more - price, self.rate * cost)
            if source in self._experience.updates:
                others = max((*followed[:before], *followed[after:]), default=0)
                self._book(source, longest - others - price)
