"""Pairs of a target and a draft of latents, samples of both, and tests of equality."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import StopRule, StopState
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.latents.target import LatentTarget, LatentView
from tests.support import tiny_latents as models

STRENGTH = 1.2  # how much latents of the nonlinear chains depend on the state
HIDDEN = 32  # of the tiny models' trunks
OTHER_SEEDS = 10**6  # of samples that share no noise with those under test


class Linear(torch.nn.Module):
    """A head whose chain is linear and Gaussian.

    difference: how far from the head of difference 0.
    """

    def __init__(self, width: int, hidden: int, difference: float = 0.0) -> None:
        super().__init__()
        sample = torch.Generator().manual_seed(5)
        weight, other = torch.randn(2, width, hidden, generator=sample).double()
        self.state = torch.nn.Linear(hidden, width, bias=False).double()
        self.state.weight.data = 0.15 * (weight + difference * other)
        self.write = torch.nn.Linear(1, width).double()
        self.share = 0.4 - 0.5 * difference

    def denoise(self, noisy: Any, times: Any, message: Any) -> torch.Tensor:
        """Return clean latents of noisy ones."""
        out: torch.Tensor = self.share * noisy * times[:, None] + message
        return out


@dataclass
class Pair:
    """A target in the state p [C * H] and what drafts for it in the state q."""

    target: LatentTarget
    draft: LatentTarget
    p: torch.Tensor
    q: torch.Tensor


def pair(kind: str, drafter: str, *, scale: float = 1.0, spread: float = 1.0) -> Pair:
    """Return a pair of a "linear" or "nonlinear" chain of three steps, by its drafter.

    "jacobi" drafts with the target's own head in another state, "model" with a head of its own,
    whose deviations are `spread` times the target's.
    """
    difference = 0.15 if kind == "linear" else 0.05
    target = models.target(models.model(strength=STRENGTH), scale=scale, steps=3)
    if kind == "linear":
        target.sampler.head = Linear(models.WIDTH, HIDDEN)
    sample = torch.Generator().manual_seed(11)
    p, other = torch.randn(2, HIDDEN * target.copies, generator=sample, dtype=torch.float64)
    if drafter == "jacobi":
        return Pair(target, target, p, p + difference * other)
    instance = models.model(strength=STRENGTH)
    with torch.no_grad():
        for weight in instance.head.parameters():
            weight += 0.004 * torch.randn(weight.shape, generator=sample)
    draft = models.target(instance, scale=scale, steps=3, table=target.table)
    if kind == "linear":
        draft.sampler.head = Linear(models.WIDTH, HIDDEN, difference=0.1)
    draft.sampler.deviations *= spread
    return Pair(target, draft, p, p)


def view_of(target: LatentTarget, state: torch.Tensor, tree: DraftTree, seed: int) -> LatentView:
    """Return the view of a root in that state [C * H], with the tree below an empty text."""
    distribution = TokenDistribution(Sampling(temperature=1.0), NoiseStream(seed), 1)
    states = state.expand(len(tree) + 1, -1)
    stop = StopState(StopRule(frozenset(), models.SIDE**2))
    return target.open_view(states, tree, distribution, stop, [7])


@torch.no_grad()
def emitted(rule: Any, inputs: Pair, count: int) -> tuple[torch.Tensor, float]:
    """Return the first latents that a rule emits, f64 [count, D], and its acceptance rate."""
    target = inputs.target
    noise = torch.cat([target.noise(NoiseStream(seed), [0]) for seed in range(count)])
    drafted = inputs.draft.add(inputs.q.expand(count, -1), noise, [0] * count)
    before = target.table.latents[drafted.start : drafted.stop].clone()
    trees = [DraftTree.chain([each], "draft", kind=DraftKind.COUPLED) for each in drafted]
    views = [view_of(target, inputs.p, tree, seed) for seed, tree in enumerate(trees)]
    target.draw(views)
    first = []
    for number, tree, view in zip(drafted, trees, views, strict=True):
        verdict = rule.judge(tree, view)
        first.append(number if verdict.path else int(verdict.token))
    result = target.table.latents[torch.tensor(first)]
    return result, float((result == before).all(-1).double().mean())


@torch.no_grad()
def plain(target: LatentTarget, state: torch.Tensor, count: int) -> torch.Tensor:
    """Return latents that a target draws in a state, by other seeds: f64 [count, D]."""
    seeds = range(OTHER_SEEDS, OTHER_SEEDS + count)
    noise = torch.cat([target.noise(NoiseStream(seed), [0]) for seed in seeds])
    sample = target.add(state.expand(count, -1), noise, [0] * count)
    return target.table.latents[sample.start : sample.stop]


def differs(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the least p-value of two samples [n, D], over numbers and a few projections.

    By Kolmogorov and Smirnov, and of means and variances; the tails bound p from above.
    """
    sample = torch.Generator().manual_seed(3)
    ways = torch.cat([torch.eye(first.shape[1]), torch.randn(6, first.shape[1], generator=sample)])
    values = []
    for direction in ways.double():
        a, b = ((each.double() @ direction).sort().values for each in (first, second))
        both = torch.cat([a, b])
        below_a, below_b = (torch.searchsorted(each, both, right=True) for each in (a, b))
        gap = below_a / len(a) - below_b / len(b)
        size = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
        values.append(2.0 * math.exp(-2.0 * (size * float(gap.abs().max())) ** 2))
        centre = both.mean()
        values += [_mean_differs((a - centre) ** n, (b - centre) ** n) for n in (1, 2)]
    return min(values)


def _mean_differs(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the p-value of two means under the normal distribution."""
    error = (a.var() / len(a) + b.var() / len(b)).sqrt()
    return math.erfc(abs(float((a.mean() - b.mean()) / error)) / math.sqrt(2.0))
