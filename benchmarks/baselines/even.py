"""Relaxed acceptance that preserves the likelihood of a picture: LANTERN with a balance.

A drafted code c that replaces the target's code t changes the log-likelihood of the picture by
log p(c) - log p(t). LANTERN replaces probable codes by improbable ones, and these changes add up:
pictures drift to regions of low probability. Here the sum of the changes over a picture, its
balance, stays within `band` nats of 0. The mean of -log p(code) - H(p) over n codes (see `nll_gap`)
is thus at most band / n from that of the target. Within the band c replaces t if

    promised(c) + price * (log p(c) - log p(t)) >= 0,    price = exp(-2 balance / band)

with the codes that the draft promises below c. So the rule spends nats if they save most, at a
price that rises with the debt, and earns them if a more probable code replaces a less probable one.
The rule takes the code with the largest sum.

This rule is ours. Its distribution is not the target's: `tv_excess` is the share of replaced codes.
The NLL gap cannot judge it, since the rule bounds it by design; Frechet distances can.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, inf, log

from ragspec.errors import InputError
from ragspec.rules.base import TargetView
from ragspec.sampling.settings import is_number
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.rules.codebook import CodeNeighbours
from ragspec.visual.rules.lantern import RelaxedWalk, expect_table

BAND = 4.0  # nats


class Even(RelaxedWalk):
    """LANTERN's walk with a balance: a picture's codes stay as probable as the target's.

    Args:
        neighbours: Neighbours of the target's code-book.
        k: Neighbours to consider; None for all of the table.
        band: Most nats by which the log-likelihood of a picture may change at any time.

    Raises:
        InputError: `band` is negative or not finite, or `k` is larger than the table.
    """

    name = "even"
    relaxed_by = "band"

    def __init__(
        self, neighbours: CodeNeighbours | None = None, k: int | None = None, band: float = BAND
    ) -> None:
        if not (is_number(band) and 0.0 <= band < inf):
            raise InputError(
                f"Expected band of 0 nats or more, got {band!r}. Choose a finite number."
            )
        super().__init__(expect_table(self.name, neighbours).nearest(k))
        self.band, self.balance = float(band), 0.0  # the balance of one picture, see `open`
        self.relaxes = self.relaxes and self.band > 0.0

    def bound(self, p: float) -> float:
        """Return no bound: a code may stand for all codes near it."""
        return inf

    def _decide(
        self,
        offered: Mapping[int, int],
        gains: Mapping[int, float],
        code: int,
        target: TargetView,
        node: int,
        kind: DraftKind,
    ) -> tuple[int | None, float]:
        """Return the accepted child or None, and 1.0 if it replaces the target's code, else 0.0."""
        if code in offered:
            return offered[code], 0.0
        near = [each for each in offered if (self.near[each] == code).any()]
        if not near:
            return None, 0.0
        p = self._distribution(target, node)
        price = exp(-2.0 * self.balance / self.band)
        best = None
        for each in near:
            if p[each] <= 0.0:
                continue
            change = log(p[each]) - log(p[code])
            gain = gains[each] + price * change
            if gain < 0.0 or abs(self.balance + change) > self.band:
                continue
            if best is None or gain > best[0]:
                best = gain, change, each
        if best is None:
            return None, 0.0
        self.balance += best[1]
        return offered[best[2]], 1.0
