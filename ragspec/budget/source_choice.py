"""The adviser of one row's sources: whose claims to trust how far, and whom to ask at all.

A drafter of several sources (see `drafters.fuse`) asks it before a source works, and lets it
correct every tree. Three questions are answered alike: what did it bring, as a fading mean, doubted
as far as it varies; is that more than the tokens that could be had in its time; and if not, is a
trial due that may cost a small share of all time?
- Whether and how much to draft at all, by the outlook: sources that know at next to no cost how
  likely their best draft is (the length of a match, a known neighbour) say so first.
- Whether to ask a source after others, by what it added to them when they promised as much: a
  draft model is idle while a quotation is being copied. What was claimed would not do: the larger
  of two claims is too large on average, and along a chain this adds up.
- Whether to teach one that learns from every step of the target, for a whole text.

The corrections follow SuffixDecoding's view (arXiv 2411.04975) that expected acceptance is the one
currency of all sources; who is asked is our own design.
"""

from __future__ import annotations

from bisect import bisect_right

from ragspec.budget.base import Adviser, Settings
from ragspec.budget.cost_curve import CostLine
from ragspec.budget.gains import BUCKETS, DUE, FIRST_TRIAL, OUTLOOKS, Experience, Gain
from ragspec.rules.base import Step

CHEAP, COSTLY_NODES = 0.1, 7  # what costs more plain steps than this is asked for few nodes
EXPLORING = 0.06  # of the time may go to trials of a source of which little is known
TAUGHT = 256  # steps before a source that has to be taught is judged,
TEACHING = 1.0 / 384.0  # the weight of one,
TRIED = 8  # and of the texts for which it rests one in so many tries it all the same


class SourceChoice(Adviser):
    """An adviser that also weighs what is gained against the time that it takes.

    experience: bucket of this step's nodes; 0 where nothing was drafted at this outlook. extra:
    milliseconds of this step that went to sources which had to be worth it; the time of the others
    is the price of drafting at all.
    """

    def __init__(self, experience: Experience, settings: Settings) -> None:
        super().__init__(experience.calibration)
        self._experience = experience
        self._share = settings.probe_share
        self.bucket = self._largest = bisect_right(BUCKETS, settings.maximum) - 1
        self._plain = self.extra = 0.0
        self._nodes, self._expected_acceptance = 0, -1
        self._asking: tuple[Gain, int] | None = None  # a source, and how many trees there were
        self._tried: list[tuple[str, Gain, int, int]] = []  # and those with its own
        self._books: dict[str, float] = {}  # this step's gains of sources that are taught

    def begin(self, rate: float, plain: float) -> None:
        """Start a step: tokens per millisecond, milliseconds of a plain step."""
        for source, net in self._books.items():
            self._experience.taught.setdefault(source, Gain()).learn(net, fading=TEACHING)
        self.rate, self._plain = rate, plain
        self._tried, self._books, self._asking, self.extra = [], {}, None, 0.0
        self._expected_acceptance, self.bucket = -1, self._largest

    def nodes(self, expected_acceptance: float | None, budget: int) -> int:
        """Return how many nodes to ask for in all; 0 where no draft pays and no trial is due."""
        self._expected_acceptance = (
            -1 if expected_acceptance is None else bisect_right(OUTLOOKS, expected_acceptance)
        )
        gain, cost = self._experience.drafts[self._expected_acceptance], self._experience.draft
        self.bucket, net = gain.best(cost, self.rate, self._largest)
        if not gain.known:
            self.bucket = min(self.bucket, FIRST_TRIAL)
        elif net <= 0.0 and not gain.due(cost.of(BUCKETS[self.bucket]) / self._plain, self._share):
            self.bucket = 0
        self._nodes = min(BUCKETS[self.bucket], budget)
        return self._nodes

    def learn_draft(self, net: list[float], best: int) -> None:
        """Learn what the draft brought at this outlook, see `SizedGain.learn_sizes`."""
        if self.bucket:
            self._experience.drafts[self._expected_acceptance].learn_sizes(net, best)

    def allowance(self, source: str, budget: int) -> int:
        """Return 0 unless the source is cheap, little known, worth its time, or due for a trial."""
        self._asking, known = None, self._experience.source(source)
        if known.cost.of(budget) > CHEAP * self._plain:
            budget = min(budget, COSTLY_NODES)
        price = known.cost.of(budget)
        best = max((max(each.accept_prob, default=0.0) for each in self._open), default=0.0)
        gain = known.gains[bisect_right(OUTLOOKS, best)]
        share = self._share if gain.known else EXPLORING
        pays = gain.mean + gain.doubt > price * self.rate
        if not pays and not gain.due(price / self._plain, share):
            self._alone[source] = self._alone.get(source, 0) + 1
            return 0
        self._nodes, self._asking = budget, (gain, len(self._open))
        return budget

    def spent(self, source: str, milliseconds: float) -> None:
        """Learn the source's cost."""
        asking, self._asking = self._asking, None
        if asking is not None:
            self._tried.append((source, *asking, len(self._open)))
            self.extra += milliseconds
        self._experience.source(source).cost.learn(self._nodes, milliseconds)
        if source in self._experience.taught:
            self._book(source, -self.rate * milliseconds)

    def rests(self, source: str) -> bool:
        """Return whether teaching the source did not pay; some texts try it all the same."""
        gain = self._experience.taught.get(source)
        if gain is None or gain.trials < TAUGHT or gain.mean + gain.doubt >= 0.0:
            return False
        gain.passed = (gain.passed + 1) % TRIED
        if gain.passed:
            self._alone[source] = 0
        return gain.passed > 0

    def taught(self, source: str, milliseconds: float) -> None:
        """Charge the source for the time that it took to tell it of a step."""
        self._book(source, -self.rate * milliseconds)

    def _book(self, source: str, tokens: float) -> None:
        steps = tokens / (self.rate * self._plain)
        self._books[source] = self._books.get(source, 0.0) + steps

    def learn_step(self, step: Step, line: CostLine, rate: float) -> None:
        """Count what came of the claims, and of asking the sources that had to be worth it.

        line: what forwards cost. rate: tokens that a millisecond is worth.
        What only one source offered, it pays: the time that its nodes added to the forward.
        """
        result, tree, rows = self.learn(step.tokens), step.tree, len(step.tree) + 1
        if max(result, default=0) > self.rate * self._experience.draft.of(BUCKETS[self.bucket]):
            self._experience.drafts[
                self._expected_acceptance
            ].passed = DUE  # claims may be better than known
        for source, gain, before, after in self._tried:
            current = sum(tree.sources[each] == source for each in tree.source.tolist())
            # The first node adds most: it is where whoever drafts alone pays for drafting at all.
            price = 1000.0 * rate * (line.at(rows) - line.at(rows - current))
            more = max(result[:after], default=0) - max(result[:before], default=0)
            cost = self._experience.source(source).cost.of(COSTLY_NODES)
            gain.learn(more - price, self.rate * cost)
            if source in self._experience.taught:
                others = max((*result[:before], *result[after:]), default=0)
                self._book(source, max(result, default=0) - others - price)
