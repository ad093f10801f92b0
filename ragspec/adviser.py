"""The adviser of one row's sources: whose claims to trust how far, and whom to ask at all.

A drafter of several sources (see `fuse`) asks it before a costly source works, and lets it correct
every tree. Whether a source is asked is a matter of what it added to the sources before it when
they had promised as much as now: a draft model is idle while a quotation is being copied. The
tokens by which the text followed the tree further with the source than without are weighed against
the time that it takes. What was claimed would not do: the larger of two claims is too large on
average, and along a chain this adds up. Sources that do not pay are asked again now and then.

The corrections follow SuffixDecoding's view (arXiv 2411.04975) that expected acceptance is the one
currency of all sources; who is asked is our own design.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Protocol

import numpy as np

from ragspec.calibration import Appraisal, Calibration
from ragspec.draft import ROOT, DraftTree
from ragspec.economics import FREE, LEVELS, Experience

COSTLY_NODES = 8  # what a source that must be worth its time is asked for at most


class Adviser(Protocol):
    """What a drafter may ask while it proposes."""

    @property
    def rate(self) -> float:
        """Tokens per millisecond at present, the price of time; 0 where it is not known."""
        ...

    def allowance(self, source: str, budget: int, so_far: DraftTree) -> int:
        """Return how many nodes to ask a source for after what the ones before it offered."""
        ...

    def spent(self, source: str, milliseconds: float) -> None:
        """Note the time that a source took for its proposal."""
        ...

    def appraise(self, tree: DraftTree, root: int) -> DraftTree:
        """Return a source's tree with the reach that it may be believed; root: the last token."""
        ...

    def added(self, source: str, tree: DraftTree) -> None:
        """Note what has become of the merged tree with a source that was asked."""
        ...

    def weigh(self, tree: DraftTree, offers: Sequence[int]) -> DraftTree:
        """Return a merged tree with its reach corrected by who offers what.

        offers: by node the sources that offer it, as bits.
        """
        ...


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

    def allowance(self, source: str, budget: int, so_far: DraftTree) -> int:
        """Return the budget: a fixed number of nodes is best chosen among all there are."""
        return budget

    def spent(self, source: str, milliseconds: float) -> None:
        """Costs do not matter here."""

    def appraise(self, tree: DraftTree, root: int) -> DraftTree:
        """Return the tree with corrected reach, and keep it until its outcome is known."""
        return self._kept(tree, self.calibration.appraise(tree, root))

    def added(self, source: str, tree: DraftTree) -> None:
        """Nor does what each of them adds."""

    def weigh(self, tree: DraftTree, offers: Sequence[int]) -> DraftTree:
        """Return the merged tree with corrected reach, and keep it likewise."""
        return self._kept(tree, self.calibration.weigh(tree, offers))

    def learn(self, tokens: Sequence[int]) -> int:
        """Count what came of the step's trees; returns the most nodes that the text followed."""
        opened, self._open = self._open, []
        if not self.learns:
            return 0
        return max((self.calibration.learn(each, tokens) for each in opened), default=0)

    def _kept(self, tree: DraftTree, appraisal: Appraisal) -> DraftTree:
        self._open.append(appraisal)
        return replace(tree, reach=np.asarray(appraisal.reach, dtype=np.float32))


class Economy(Claims):
    """An adviser that also weighs what a source adds against the time that it takes.

    extra: milliseconds of this step that went to sources which had to be worth it; the time of
    the others is the price of drafting at all.
    """

    def __init__(self, experience: Experience, probe_share: float, learns: bool = True) -> None:
        super().__init__(experience.calibration, learns)
        self._experience = experience
        self._probe_share = probe_share
        self._rate = self._plain = 0.0
        self._nodes = 0
        self._before: DraftTree | None = None
        self._trials: list[tuple[str, DraftTree, DraftTree]] = []
        self.extra = 0.0

    @property
    def rate(self) -> float:
        """Tokens per millisecond at present; 0 where nothing is learned, for repeatable runs."""
        return self._rate if self.learns else 0.0

    def begin(self, rate: float, plain: float, budget: int) -> None:
        """Start a step: tokens per millisecond, milliseconds of a plain step, nodes asked for."""
        self._rate, self._plain, self._nodes = rate, plain, budget
        self._before = None
        self._trials = []
        self.extra = 0.0

    def allowance(self, source: str, budget: int, so_far: DraftTree) -> int:
        """Return 0 unless the source is cheap, little known, worth its time, or due for a probe."""
        worth = self._experience.source(source)
        self._before, self._nodes = None, budget
        if worth.cost.of(budget) <= FREE * self._plain:
            return budget
        self._nodes = min(budget, COSTLY_NODES)
        price = worth.cost.of(self._nodes)
        pause = price / (self._probe_share * self._plain) if self._probe_share else inf
        if not worth.pays(level_of(so_far), price * self._rate, pause, self.learns):
            return 0
        self._before = so_far
        return self._nodes

    def spent(self, source: str, milliseconds: float) -> None:
        """Learn the source's cost."""
        if self._before is not None:
            self.extra += milliseconds
        if self.learns:
            self._experience.source(source).cost.learn(self._nodes, milliseconds)

    def added(self, source: str, tree: DraftTree) -> None:
        """Keep the trees without and with the source until their outcome is known."""
        if self._before is not None:
            self._trials.append((source, self._before, tree))
        self._before = None

    def learn(self, tokens: Sequence[int]) -> int:
        """Count what came of the claims, and of asking the sources that had to be worth it."""
        trials, self._trials = self._trials, []
        if self.learns:
            for source, before, after in trials:
                gain = followed(after, tokens) - followed(before, tokens)
                self._experience.source(source).learn(level_of(before), gain)
        return super().learn(tokens)


def level_of(tree: DraftTree) -> int:
    """Return how much a tree promises for the next token, as an index into LEVELS."""
    return bisect_right(LEVELS, float(tree.reach.max())) if len(tree) else 0


def followed(tree: DraftTree, tokens: Sequence[int]) -> int:
    """Return how many of the emitted tokens lie on a path of the tree; the last one is no draft."""
    at, depth = ROOT, 0
    for node, (parent, token) in enumerate(
        zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    ):
        if parent == at and depth < len(tokens) - 1 and token == tokens[depth]:
            at, depth = node, depth + 1
    return depth
