"""The tree of most tokens per second, step by step: the sessions of AutoBudget and FrozenBudget.

`fit` chooses the size of the tree that was proposed, `allowance` how much to ask for and whether
to ask at all. While speculation is off the drafter is probed now and then: the net time lost to
probes is booked and may not exceed a small share of the row's time, pauses double after a probe
in vain, and a probe that the text followed halves the evidence against the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ragspec.calibration import Appraisal
from ragspec.cost import CostCurve
from ragspec.draft import DraftTree, Step
from ragspec.economics import BUCKETS, Experience

FREE = 0.01  # a drafter that costs less of a plain step than this is always asked
FIRST_PAUSE, LAST_PAUSE = 8, 256
PROBE = BUCKETS.index(4)
SLOW, QUICK = 0.1, 0.34  # weights of a step in the rate of drafting: in use, in a probe


@dataclass(frozen=True, slots=True)
class Settings:
    """What AutoBudget and FrozenBudget are made with; see there."""

    margin: float = 0.03
    probe_share: float = 0.015
    largest: int = len(BUCKETS) - 1
    learns: bool = True


def best_first(reach: Sequence[float]) -> list[int]:
    """Return the nodes by falling reach, earlier ones first among equals.

    Any beginning of the list is closed under ancestors, if no reach exceeds its parent's.
    """
    return sorted(range(len(reach)), key=reach.__getitem__, reverse=True)


def cut(tree: DraftTree, keep: Sequence[int]) -> DraftTree:
    """Return the tree of the nodes in `keep` (closed under ancestors), in their old order."""
    if len(keep) == len(tree):
        return tree
    if not keep:
        return DraftTree.empty(tree.kind)
    kept = sorted(keep)
    place = {node: i for i, node in enumerate(kept)}
    parents = tree.parents.tolist()
    q = tree.q
    if q is not None:
        q = q[[0, *(node + 1 for node in kept)]]
    rows = np.array(kept)
    return replace(
        tree,
        tokens=tree.tokens[rows],
        parents=np.array([place.get(parents[node], -1) for node in kept], dtype=np.int64),
        reach=tree.reach[rows],
        source=tree.source[rows],
        origin=tree.origin[rows],
        q=q,
    )


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
        self._proposal: Appraisal | None = None
        self._expected = 0.0
        self._off: bool | None = None
        self._pause, self._countdown = FIRST_PAUSE, 2
        self._elapsed = self._lost = 0.0

    @property
    def reason(self) -> str | None:
        """Why speculation is off or did not pay, in one sentence; None where it did."""
        ratio = self.experience.drafted.value * self._plain
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
            self._off = self._fails()
        asked = min(experience.asked, self.settings.largest)
        if self._off:
            self._countdown -= 1
            asked = min(asked, PROBE)
            if not self.settings.learns or not self._may_probe(BUCKETS[asked]):
                asked = 0
        self._asked = asked
        return BUCKETS[asked]

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the best part of the tree at the present rate; possibly the empty tree."""
        experience = self.experience
        self._proposal = proposal = experience.calibration.appraise(tree)
        order = best_first(proposal.reach)
        gains = [0.0]
        for node in order:
            gains.append(gains[-1] + proposal.reach[node])
        costs = self.cost.upto(length)
        rate = self._rate()
        last = len(order)
        top = self._asked or self.settings.largest
        sizes = [min(size, last) for size in BUCKETS[: top + 1]]
        net = [gains[size] - rate * 1000.0 * costs[size] for size in sizes]
        best = max(range(len(net)), key=net.__getitem__)
        if net[best] < net[0] + self.settings.margin:
            best = 0
        if self.settings.learns:
            experience.learn_worth(net, best if BUCKETS[best] <= last else 0)
        self._proposed = self._proposed or last > 0
        self._expected = gains[sizes[best]]
        return cut(tree, order[: sizes[best]])

    def observe(self, step: Step, length: int) -> None:
        """Learn from a step, and switch speculation off or on."""
        size = len(step.tree)
        self.chosen[size] = self.chosen.get(size, 0) + 1
        proposal, self._proposal = self._proposal, None
        if not self.settings.learns:
            return
        experience, spent = self.experience, step.milliseconds
        if "verify" in spent:
            self.cost.refine(size + 1, length, spent["verify"] / 1000.0)
        if "host" in spent:
            experience.learn_host(spent["host"] + spent.get("commit", 0.0))
        self._plain = 1000.0 * self.cost.seconds(1, length) + experience.host
        time = 1000.0 * self.cost.seconds(size + 1, length) + experience.host
        followed = 0
        if proposal is not None:
            followed = experience.calibration.learn(proposal, step.tokens)
        if self._asked:
            self._calls += 1
            if "draft" in spent and self._calls > 1:  # the first may hold a prefill
                experience.draft.learn(BUCKETS[self._asked], spent["draft"])
            time += experience.draft.of(BUCKETS[self._asked])
            weight = QUICK if self._off else SLOW
            experience.drafted.learn(1.0 + self._expected, time, weight)
            self._switch(len(step.tokens), time, followed)
        self._elapsed += time
        experience.overall.learn(len(step.tokens), time, 0.05)
        experience.choose_asked(self._rate(), self.settings.largest)
        self._asked, self._expected = 0, 0.0

    def _rate(self) -> float:
        """Return the present tokens per millisecond, never below those of plain decoding."""
        plain = 1.0 / self._plain if self._plain > 0.0 else 0.0
        return max(plain, self.experience.overall.value)

    def _fails(self) -> bool:
        """Tell whether drafting costs something and gives less than plain decoding."""
        experience = self.experience
        if experience.draft.of(BUCKETS[experience.asked]) <= FREE * self._plain:
            return False
        return experience.drafted.steps >= 3 and experience.drafted.value * self._plain < 1.0

    def _may_probe(self, nodes: int) -> bool:
        """Tell whether the pause is over and the time lost to probes leaves room for one."""
        room = self.settings.probe_share * self._elapsed + self._plain
        return self._countdown <= 0 and self._lost + self.experience.draft.of(nodes) <= room

    def _switch(self, tokens: int, time: float, followed: int) -> None:
        """Turn off where drafting fails; in a probe, book it and turn on where it pays again."""
        if not self._off:
            self._off = self._fails()
            self._pause = self._countdown = FIRST_PAUSE
            return
        self._lost = max(0.0, self._lost + time - tokens * self._plain)
        if self.experience.drafted.value * self._plain > 1.0 + self.settings.margin:
            self._off = False
        elif followed:
            self.experience.calibration.fade(0.5)
            self._pause, self._countdown = FIRST_PAUSE, 1
        else:
            self._countdown = self._pause
            self._pause = min(2 * self._pause, LAST_PAUSE)
