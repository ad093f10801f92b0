"""Lossless rules keep the target's distribution; Kolmogorov-Smirnov tests detect broken rules."""

import importlib
from pathlib import Path as Folder
from typing import Any

import numpy as np
import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.drafting.jacobi import JacobiDrafter
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.latents.rules import Aligned, Horizon, Path, first_accepted, fresh_noise
from ragspec.visual.latents.target import LatentDraws, LatentTarget, LatentView
from tests.support import tiny_latents as models
from tests.support.latent_distributions import differs, emitted, pair, plain, view_of

SAMPLES = 600
SAME, OTHER = 1e-4, 1e-5  # p-values: two samples are alike above the first, differ below the other
LOSSLESS = (Aligned(), Horizon(2), Path())


class FreshDraw(Horizon):
    """A mutant: a rejection emits the target's latent, which shares its noise with the draft."""

    def left(self, view: LatentView, index: int, drafted: int, sampled: int) -> torch.Tensor:
        return view.target.table.latents[sampled]


class Lenient(Horizon):
    """A mutant: accepts drafts that are somewhat less likely under the target."""

    def log_ratio(self, view: LatentView, drafted: int, sampled: int) -> float:
        return super().log_ratio(view, drafted, sampled) + 2.0


class Weighted(Horizon):
    """A mutant: multiplies p / q by the deviations of the steps before the last one."""

    def log_ratio(self, view: LatentView, drafted: int, sampled: int) -> float:
        table = view.target.table
        logs = [float(table.deviations[each][1:].log().sum()) for each in (drafted, sampled)]
        return super().log_ratio(view, drafted, sampled) + models.WIDTH * (logs[0] - logs[1])


class Mirrored(Aligned):
    """A mutant: reflects drafts although the deviations differ."""

    def left(self, view: LatentView, index: int, drafted: int, sampled: int) -> torch.Tensor:
        return self.mirrored(view, drafted, sampled)


def test_tries_are_accepted_with_the_residual_probability() -> None:
    view = view_of((inputs := pair("linear", "model")).target, inputs.p, DraftTree.empty(), 0)

    def propose(tries: range) -> tuple[torch.Tensor, torch.Tensor]:  # p / q is 2, then a half
        ratios = [2.0 if number % 2 == 0 else 0.5 for number in tries]
        return torch.tensor([*tries])[:, None], torch.tensor(ratios).log()

    accepted = [first_accepted(view, index, propose) for index in range(400)]
    tries = [int(each) for each in accepted if each is not None]
    assert all(number % 2 == 0 for number in tries) and len(tries) == 400
    assert 160 < tries.count(0) < 240  # half of them
    assert 0 < tries.count(8) < 30  # one in 32: the second batch has other numbers than the first
    uniforms = [view.noise.uniform(index, NoiseUse.RESIDUAL, 0) for index in range(400)]
    normals = [float(fresh_noise(view, index, range(1), 1)[0, 0, 0]) for index in range(400)]
    assert abs(np.corrcoef(uniforms, normals)[0, 1]) < 0.2  # verdicts and latents are independent
    whole, rest = (fresh_noise(view, 0, range(first, 24), 3) for first in (0, 8))
    assert torch.equal(whole[8:], rest) and len({*whole.flatten().tolist()}) == whole.numel()


@pytest.mark.parametrize("rule", LOSSLESS, ids=lambda rule: str(rule.name))
@pytest.mark.parametrize(
    ("kind", "drafter", "more"),
    [
        ("linear", "jacobi", {}),
        ("linear", "model", {"spread": 1.2}),  # its deviations are judged too
        ("nonlinear", "model", {"scale": 2.0}),
    ],
    ids=["linear-jacobi", "linear-model", "nonlinear-model"],
)
def test_emitted_latents_follow_the_distribution_of_the_target(
    kind: str, drafter: str, more: dict[str, float], rule: Any
) -> None:
    inputs = pair(kind, drafter, **more)
    selection = plain(inputs.target, inputs.p, 4 * SAMPLES)
    result, accepted = emitted(rule, inputs, SAMPLES)
    assert differs(result, selection) > SAME and 0.1 < accepted < 0.9
    assert differs(plain(inputs.draft, inputs.q, 4 * SAMPLES), selection) < OTHER


@pytest.mark.parametrize(
    ("mutant", "drafter", "spread"),
    [
        (FreshDraw(1), "model", 1.0),
        (FreshDraw(3), "jacobi", 1.0),
        (Lenient(2), "jacobi", 1.0),
        (Weighted(1), "model", 1.2),  # keeps the factor of the deviations
        (Mirrored(), "model", 1.5),
    ],
    ids=["fresh-1", "fresh-3", "lenient", "sigma", "mirrored"],
)
def test_a_rule_that_breaks_coupling_is_detected(mutant: Any, drafter: str, spread: float) -> None:
    inputs = pair("linear", drafter, spread=spread)
    result, _ = emitted(mutant, inputs, SAMPLES)
    assert differs(result, plain(inputs.target, inputs.p, 4 * SAMPLES)) < OTHER


def test_the_rule_weighs_earlier_deviations(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(root / "benchmarks")
    rule = importlib.import_module("baselines.cspd_paper").CspdPaper()
    inputs = pair("linear", "model", spread=1.2)
    noise = inputs.target.noise(NoiseStream(0), [0])
    (number,) = inputs.draft.add(inputs.q[None], noise, [0])
    sampled = view_of(inputs.target, inputs.p, DraftTree.empty(), 0).token(-1)
    factor = rule.log_factor(inputs.target.table, number, sampled)
    wide, narrow = inputs.draft.sampler.deviations[1:], inputs.target.sampler.deviations[1:]
    assert factor == pytest.approx(4 * float((wide / narrow).log().sum())) and factor > 0.0
    equal = pair("linear", "model")
    result, accepted = emitted(rule, equal, SAMPLES)
    assert differs(result, plain(equal.target, equal.p, 4 * SAMPLES)) > SAME
    assert accepted == emitted(Aligned(), equal, SAMPLES)[1] and rule.label == "approximate"


class SharedNoise(LatentDraws):
    """A mutant: all indices share the noise of the first one."""

    def noise(self, noise: NoiseStream, indices: Any) -> torch.Tensor:
        return super().noise(noise, [0] * len(indices))


class TwiceUsed(SharedNoise, LatentTarget): ...


def texts(rule: Any, drafts: str, count: int = 300, instance: Any = LatentTarget) -> torch.Tensor:
    """Return the first three latents of pictures by a class of targets, f64 [count, 3 D]."""
    target = models.target(models.model(strength=0.5), steps=3, built_by=instance)
    drafter: Any = JacobiDrafter(3, width=models.SIDE) if drafts == "jacobi" else None
    if drafts == "model":
        other = models.model(strength=0.5)
        with torch.no_grad():
            other.head.write.bias += 0.03
        draft = models.target(other, steps=3, built_by=instance, table=target.table)
        drafter = LatentDrafter(draft, target, min_expected_gain=0.0)
    result = Engine(target, None, drafter, budget=3, rule=rule, max_batch_size=count).generate(
        [target.prompt(0)] * count,
        Sampling(temperature=1.0, seed=list(range(count))),
        max_new_tokens=3,
        ignore_eos=True,
    )
    numbers = torch.tensor([each.tokens for each in result])
    return target.table.latents[numbers].flatten(1)


@torch.no_grad()
def expected(count: int = 900) -> torch.Tensor:
    """Return the same of whole forwards with torch's own noise."""
    instance, sample = models.model(strength=0.5), torch.Generator().manual_seed(9)
    sampler = models.target(instance, steps=3).sampler
    condition = instance.trunk.condition(torch.zeros(count, dtype=torch.int64))
    latents = torch.zeros(count, 3, models.WIDTH, dtype=torch.float64)
    for index in range(3):
        states = instance.states(latents[:, : index + 1], condition)[:, index:]
        noise = torch.randn(count, 4, models.WIDTH, generator=sample, dtype=torch.float64)
        latents[:, index] = sampler.draw(sampler.conditioning(states), noise).latents
    return latents.flatten(1)


@pytest.mark.parametrize("rule", [Aligned(), Path()], ids=lambda rule: str(rule.name))
def test_latents_of_a_text_follow_their_joint_distribution(rule: Any) -> None:
    selection = expected()
    for drafts in ("jacobi", "model"):
        assert differs(texts(rule, drafts), selection) > SAME


def test_noise_of_an_index_that_is_used_twice_is_detected() -> None:
    assert differs(texts(Aligned(), "model", instance=TwiceUsed), expected()) < OTHER
