"""Relaxed acceptance that keeps a picture as likely as it was: LANTERN with a balance.

A drafted code that stands for the target's own, c for t, changes how likely the picture is by
log p(c) - log p(t). LANTERN lets unlikelier codes stand for likelier ones, which adds up: pictures
drift to what the target hardly ever draws. Here the sum of these changes over a picture, its
balance, stays within `band` nats of 0, so that the mean of -log p(code) - H(p) over n codes (see
`nll_gap`) is at most band / n from that of the target. Within it codes are traded: c stands for t
where

    promised(c) + price * (log p(c) - log p(t)) >= 0,    price = exp(-2 balance / band)

with the codes that the draft promises below c, so that nats are spent where they save most, are
dearer the more are owed, and come back wherever a likelier code may stand for an unlikelier one. Of
several such codes the one with the largest sum is taken.

Our own. The law is not the target's: `tv_excess` tells the share of codes that were replaced. The
surprise, which this rule keeps by its making, cannot judge it; Frechet distances can.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, log

from ragspec.errors import InputError
from ragspec.rules.base import TargetView
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.checks import is_number
from ragspec.visual.rules.codebook import CodeNeighbours
from ragspec.visual.rules.lantern import RelaxedRow, RelaxedWalk, expect_table
from ragspec.visual.rules.relation import NearestCodes

BAND = 4.0  # nats


class Even(RelaxedWalk):
    """LANTERN's walk with a balance: a picture's codes stay as likely as the target's own.

    neighbours: of the target's code-book. k: how many are looked at, default all of the table.
    band: the most nats by which the likelihood of a whole picture may have moved at any time.
    Raises InputError for a band that is negative or not finite, or a k beyond the table.
    """

    name = "even"
    relaxed_by = "band"
    weighs = True

    def __init__(
        self, neighbours: CodeNeighbours | None = None, k: int | None = None, band: float = BAND
    ) -> None:
        if not (is_number(band) and 0.0 <= band < inf):
            raise InputError(f"got band={band!r}; expected a number of nats, 0 or more.")
        super().__init__(NearestCodes(expect_table(self.name, neighbours), k))
        self.band = float(band)
        self.relaxes = self.relaxes and self.band > 0.0

    def open(self) -> EvenRow:
        """Return the rule for one picture, with its balance at 0."""
        return EvenRow(self)


class EvenRow(RelaxedRow):
    """An `Even` over one picture; knows how much likelier its codes are than the target's own."""

    def __init__(self, rule: Even) -> None:
        super().__init__(rule)
        self.band = rule.band
        self.balance = 0.0

    def _decide(
        self,
        offered: Mapping[int, int],
        gains: Mapping[int, float],
        code: int,
        target: TargetView,
        node: int,
        kind: DraftKind,
    ) -> tuple[int | None, float]:
        """Return the child to go on with, or None, and whether it replaced the target's code."""
        if code in offered:
            return offered[code], 0.0
        near = [each for each in offered if (self.relation.near(each) == code).any()]
        if not near:
            return None, 0.0
        p = self._distribution(target, node)
        price = exp(-2.0 * self.balance / self.band)
        best = None
        for each in near:
            if p[each] <= 0.0:
                continue
            likelier = log(p[each]) - log(p[code])
            min_expected_gain = gains[each] + price * likelier
            if min_expected_gain < 0.0 or abs(self.balance + likelier) > self.band:
                continue
            if best is None or min_expected_gain > best[0]:
                best = min_expected_gain, likelier, each
        if best is None:
            return None, 0.0
        self.balance += best[1]
        return offered[best[2]], 1.0
