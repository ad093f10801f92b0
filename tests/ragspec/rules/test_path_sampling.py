"""The trap of sampling once a path: two children at 0.5 must come out at 0.5, not at 0.626.

Published tree verifiers draw a token at every node of every root-to-leaf path on its own and keep
the path that agrees the longest. A node that several paths share is drawn several times, so the
text leans to what was drafted first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import pytest
import torch

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.retrievers.methods.rasd import Rasd
from ragspec.rules.base import Rule, TargetView, Verdict
from ragspec.rules.walk import Walk
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import paths
from tests.support.distributions import Distributions, judged
from tests.support.fixed import FixedDrafter

SAMPLES = 4000
BOUND = 4 * sqrt(0.25 / SAMPLES)  # four standard errors


class EvenDistributions(Distributions):
    """Every token is as likely as the other, after every text."""

    def target(self, context: tuple[int, ...]) -> torch.Tensor:
        return torch.full((self.vocab,), 1 / self.vocab, dtype=torch.float64)


@dataclass
class PerPath:
    """What published code does: every path draws for itself, the longest agreement wins."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    name: str = "per-path"
    label: str = "exact"
    accepts: frozenset[str] = frozenset()

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        best: list[int] = []
        for path in paths(tree.parents):
            accepted: list[int] = []
            for node in path:
                if self._draw(target, accepted[-1] if accepted else ROOT) != tree.tokens[node]:
                    break
                accepted.append(node)
            if len(accepted) > len(best):
                best = accepted
        return Verdict(tuple(best), self._draw(target, best[-1] if best else ROOT))

    def _draw(self, target: TargetView, node: int) -> int:
        p = target.probabilities(node).numpy()
        return int(self.rng.choice(len(p), p=p))


def share_of_first(judge: Callable[[DraftTree, NoiseStream], Verdict], tree: DraftTree) -> float:
    """Return how often the text begins with token 0."""
    count = 0
    for seed in range(SAMPLES):
        verdict = judge(tree, NoiseStream(seed))
        first = int(tree.tokens[verdict.path[0]]) if verdict.path else verdict.token
        count += first == 0
    return count / SAMPLES


def run(rule: Rule, tree: DraftTree) -> float:
    distributions = EvenDistributions(2, 0)
    return share_of_first(lambda drafted, noise: judged(rule, drafted, distributions, noise), tree)


def two_children() -> DraftTree:
    return DraftTree.build([0, 1], [ROOT, ROOT], "retrieved")


def fused_children() -> DraftTree:
    """The two children as a fused tree: one from each source, further nodes below them."""
    model = FixedDrafter(
        [0, 1], "model", accept_prob=[0.5, 0.3], distributions=[(ROOT, [0, 1], [0.6, 0.4])]
    )
    result = FixedDrafter([1, 0], "result", accept_prob=[0.5, 0.3])
    session = Rasd(model, [result]).open(DraftRequest((0,), 2))
    return session.propose(DraftContext([0], 1, 9), 8)


@pytest.mark.parametrize("make", [two_children, fused_children])
def test_two_children_at_one_half_come_out_at_one_half(make: Callable[[], DraftTree]) -> None:
    assert abs(run(Walk(), make()) - 0.5) <= BOUND


def test_sampling_once_a_path_is_noticed() -> None:
    share = run(PerPath(), two_children())  # type: ignore[arg-type]
    assert share == pytest.approx(0.625, abs=BOUND)
    assert abs(share - 0.5) > 2 * BOUND
