"""The adviser of one row's sources: whose claims to trust how far, and whom to ask at all.

A drafter of several sources (see `fuse`) asks it before a costly source works, and lets it correct
every tree. Whether a source is asked is a matter of what it added to the sources before it when
they had promised as much as now: a draft model is idle while a quotation is being copied. The
tokens by which the text followed the tree further with the source than without are weighed against
the time that it takes. What was claimed would not do: the larger of two claims is too large on
average, and along a chain this adds up. Sources that do not pay are asked again now and then.

Whether anything is drafted at all is a matter of the outlook: sources that know at next to no cost
how likely their best draft is (the length of a match, a known neighbour) say so first, and at
outlooks at which drafts did not win their own time back, none is made.

The corrections follow SuffixDecoding's view (arXiv 2411.04975) that expected acceptance is the one
currency of all sources; who is asked is our own design.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ragspec.acceptance.base import Step
from ragspec.budget.calibration import Appraisal, Calibration
from ragspec.budget.experience import Experience
from ragspec.budget.gains import CHEAP, FREE, LEVELS, Upkeep
from ragspec.trees.draft_tree import DraftTree

EXPLORING = 0.06  # of the time may go to a costly source where little is known of it


COSTLY_NODES = 8  # what a source that must be worth its time is asked for at most


class Claims:
    """An adviser that corrects claims and asks everyone: what a fixed budget needs."""

    def __init__(self, calibration: Calibration, learns: bool = True) -> None:
        self.calibration = calibration
        self.learns = learns
        self._open: list[Appraisal] = []

    @property
    def rate(self) -> float:
        """0: a fixed budget has no use for the price of time."""
        return 0.0

    @property
    def used(self) -> bool:
        """Whether trees of the present step have been appraised."""
        return bool(self._open)

    def promising(self, outlook: float | None) -> bool:
        """True: a fixed budget is there to be used."""
        return True

    def allowance(self, source: str, budget: int) -> int:
        """Return the budget: a fixed number of nodes is best chosen among all there are."""
        return budget

    def appraise(self, tree: DraftTree, root: int) -> DraftTree:
        """Return the tree with corrected reach, and keep it until its outcome is known."""
        appraisal = self.calibration.appraise(tree, root)
        self._open.append(appraisal)
        return replace(tree, reach=np.asarray(appraisal.reach, dtype=np.float32))

    def spent(self, source: str, milliseconds: float) -> None:
        """Costs do not matter here."""

    def rests(self, source: str) -> bool:
        """False: a fixed budget asks everyone."""
        return False

    def taught(self, source: str, milliseconds: float) -> None:
        """Costs do not matter here."""

    def learn(self, tokens: Sequence[int]) -> int:
        """Count what came of the step's trees; returns the most nodes that the text followed."""
        return max(self._outcomes(tokens), default=0)

    def _outcomes(self, tokens: Sequence[int]) -> list[int]:
        """Count what came of the trees, and return how far the text followed each of them."""
        opened, self._open = self._open, []
        return [self.calibration.learn(each, tokens) for each in opened] if self.learns else []


@dataclass(slots=True)
class _Trial:
    """A source that was asked, and its trees: open[before:after].

    level: of the promise before it; None where it was cheap enough to be asked anyhow.
    """

    source: str
    level: int | None
    before: int
    after: int


class Economy(Claims):
    """An adviser that also weighs what a source adds against the time that it takes.

    extra: milliseconds of this step that went to sources which had to be worth it; the time of
    the others is the price of drafting at all. declined: nothing was drafted at this outlook.
    """

    def __init__(self, experience: Experience, probe_share: float, learns: bool = True) -> None:
        super().__init__(experience.calibration, learns)
        self._experience = experience
        self._probe_share = probe_share
        self._rate = self._plain = 0.0
        self._nodes = 0
        self._trials: list[_Trial] = []
        self.extra = 0.0
        self.declined = False
        self._outlook: int | None = None
        self._waiting = 0  # steps in a row that were declined,
        self._waited = 0  # and how many there were right before this one

    @property
    def rate(self) -> float:
        """Tokens per millisecond at present; 0 where nothing is learned, for repeatable runs."""
        return self._rate if self.learns else 0.0

    def begin(self, rate: float, plain: float, budget: int) -> None:
        """Start a step: tokens per millisecond, milliseconds of a plain step, nodes asked for."""
        self._rate, self._plain, self._nodes = rate, plain, budget
        self._trials, self.extra = [], 0.0
        self._outlook, self.declined, self._waited = None, False, 0

    def promising(self, outlook: float | None) -> bool:
        """Return False where drafts at such an outlook did not pay and no trial of it is due."""
        if outlook is None:
            return True
        worth, self._outlook = self._experience.asking, bisect_right(LEVELS, outlook)
        price = self._experience.draft.of(self._nodes) / max(self._plain, 1e-9)
        share = self._probe_share
        self.declined = not worth.unknown(self._outlook) and not worth.pays(
            self._outlook, price, price / share if share else inf, self.learns
        )
        if self.declined:
            self._waiting += 1
        else:  # sources that wait for a trial waited meanwhile: they may be why nothing paid
            self._waited, self._waiting = self._waiting, 0
        return not self.declined

    def learn_gain(self, gain: float) -> None:
        """Learn what drafting won at this outlook, in plain steps and less the price of nodes."""
        if self._outlook is not None and not self.declined and self.learns:
            self._experience.asking.learn(self._outlook, gain)

    def allowance(self, source: str, budget: int) -> int:
        """Return 0 unless the source is cheap, little known, worth its time, or due for a probe."""
        worth = self._experience.source(source)
        self._nodes = budget
        price = worth.cost.of(budget)
        if price <= FREE * self._plain:
            if source in self._experience.upkeep:
                self._trials.append(_Trial(source, None, len(self._open), len(self._open)))
            return budget
        if price > CHEAP * self._plain:
            self._nodes = min(budget, COSTLY_NODES)
            price = worth.cost.of(self._nodes)
        level = self._promise()
        share = EXPLORING if worth.unknown(level) else self._probe_share
        pause = price / (share * self._plain) if share else inf
        if not worth.pays(level, price * self._rate, pause, self.learns, 1 + self._waited):
            return 0
        self._trials.append(_Trial(source, level, len(self._open), len(self._open)))
        return self._nodes

    def spent(self, source: str, milliseconds: float) -> None:
        """Learn the source's cost."""
        trial = self._trials[-1] if self._trials else None
        if trial is not None and trial.source == source:
            trial.after = len(self._open)
            self.extra += 0.0 if trial.level is None else milliseconds
        if self.learns:
            self._experience.source(source).cost.learn(self._nodes, milliseconds)
            self._charge(source, milliseconds)

    def rests(self, source: str) -> bool:
        """Return whether teaching the source did not pay; some texts try it all the same."""
        books = self._experience.upkeep.get(source)
        return books is not None and books.rests(self.learns)

    def taught(self, source: str, milliseconds: float) -> None:
        """Charge the source for the time that it took to tell it of a step."""
        if self.learns:
            books = self._experience.upkeep.setdefault(source, Upkeep())
            books.step()
            self._charge(source, milliseconds)

    def _charge(self, source: str, milliseconds: float) -> None:
        books = self._experience.upkeep.get(source)
        if books is not None:
            books.spent += self._rate * milliseconds

    def learn_step(self, step: Step, price: Callable[[int], float]) -> int:
        """Count what came of the claims, and of asking the sources that had to be worth it.

        price: the tokens that could be had in the time which so many of the nodes added to the
        forward; what only one source offered, it pays.
        """
        trials, self._trials = self._trials, []
        found = self._outcomes(step.tokens)
        if self.learns:
            for trial in trials:
                self._learn_trial(trial, found, price(nodes_of(step.tree, trial.source)))
        return max(found, default=0)

    def _learn_trial(self, trial: _Trial, found: Sequence[int], price: float) -> None:
        """Count what a source added to those before it, and to all others; price: of its nodes."""
        source, before, after = trial.source, trial.before, trial.after
        if trial.level is not None:
            gain = max(found[:after], default=0) - max(found[:before], default=0)
            self._experience.source(source).learn(trial.level, gain - price)
        books = self._experience.upkeep.get(source)
        if books is not None:
            others = max((*found[:before], *found[after:]), default=0)
            books.brought += max(found, default=0) - others - price

    def _promise(self) -> int:
        """Return how much the trees so far promise for the next token, as an index into LEVELS."""
        best = max((max(each.reach, default=0.0) for each in self._open), default=0.0)
        return bisect_right(LEVELS, best)


def nodes_of(tree: DraftTree, source: str) -> int:
    """Return how many nodes of a tree are named after a source."""
    if source not in tree.sources:
        return 0
    return int((tree.source == tree.sources.index(source)).sum())
