"""Mixture heads in two dimensions: closed densities, draws that follow them, and an exact rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, RuleError
from ragspec.sampling.settings import Sampling
from ragspec.visual.drafting.jacobi import JacobiDrafter
from ragspec.visual.latents.model import LatentConfig, LatentModel
from ragspec.visual.latents.target import LatentView
from tests.support import tiny_latents as models
from tests.support.latent_distributions import Pair, differs, emitted, pair, plain
from tests.support.latent_mixture import MixtureHead, MixtureSampler, MixtureTarget
from tests.support.mixture_rule import MixtureRule

SAMPLES = 600


def model(seed: int, components: int = 3) -> Any:
    """Return a model of latents of two numbers with a mixture head."""
    trunk = models.model().config.trunk
    config = LatentConfig(2, 16, 1, steps=1, floor=0.1, trunk=trunk)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        instance: Any = LatentModel(config).eval().to(torch.float64)
        instance.head = MixtureHead(2, 32, components).double()
    return instance


def mixtures(difference: float = 0.3) -> Pair:
    """Return a target and a draft of other weights, in one state."""
    target = models.target(model(0), steps=1, built_by=MixtureTarget)
    other = model(0)
    sample = torch.Generator().manual_seed(2)
    with torch.no_grad():
        other.head.state.bias += difference * torch.randn(15, generator=sample)
    draft = models.target(other, steps=1, built_by=MixtureTarget, table=target.table)
    state = torch.randn(32, generator=sample, dtype=torch.float64)
    return Pair(target, draft, state, state)


class FreshDraw(MixtureRule):
    """A mutant: after a rejection the target's own latent, whose noise the draft shares."""

    def left(self, view: LatentView, index: int, drafted: int, sampled: int) -> torch.Tensor:
        return view.target.table.latents[sampled]


@torch.no_grad()
def test_latents_follow_the_density_that_is_reported() -> None:
    inputs = mixtures()
    sampler = inputs.target.sampler
    assert isinstance(sampler, MixtureSampler)
    message = sampler.conditioning(inputs.p[None, None])[0]
    axis = torch.arange(-7.975, 8.0, 0.05, dtype=torch.float64)  # the middles of cells
    places = torch.cartesian_prod(axis, axis)
    weights = sampler.log_density(message, places).exp() * 0.05**2
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-3)
    result = plain(inputs.target, inputs.p, 20_000)
    mean = weights @ places
    assert torch.allclose(result.mean(0), mean, atol=0.05)
    second = (places - mean).T * weights @ (places - mean)
    assert torch.allclose(result.T.cov(), second, atol=0.1)
    for direction in (0, 1):  # shares of quarters, as the components are apart
        for edge in (-0.5, 0.5):
            share = float(weights[places[:, direction] < edge].sum())
            assert float((result[:, direction] < edge).double().mean()) == pytest.approx(
                share, abs=0.015
            )


def test_the_rule_keeps_the_targets_distribution() -> None:
    inputs = mixtures()
    selection = plain(inputs.target, inputs.p, 4 * SAMPLES)
    result, selected = emitted(MixtureRule(), inputs, SAMPLES)
    assert differs(result, selection) > 1e-4 and 0.3 < selected < 0.95
    assert differs(plain(inputs.draft, inputs.q, 4 * SAMPLES), selection) < 1e-5


def test_a_rule_that_draws_again_is_detected() -> None:
    inputs = mixtures(0.6)
    selection = plain(inputs.target, inputs.p, 4 * SAMPLES)
    assert differs(emitted(FreshDraw(), inputs, SAMPLES)[0], selection) < 1e-5


def test_preserved_drafts_are_as_many_as_the_distributions_overlap() -> None:
    inputs = mixtures()
    table, count = inputs.target.table, 4000
    result = plain(inputs.draft, inputs.q, count)
    with torch.no_grad():
        p, q = (
            each.sampler.log_density(each.sampler.conditioning(inputs.p[None, None])[0], result)  # type: ignore[attr-defined]
            for each in (inputs.target, inputs.draft)
        )
    overlap = float((p - q).exp().clamp(max=1.0).mean())
    selected = emitted(MixtureRule(), inputs, SAMPLES)[1]
    assert selected == pytest.approx(overlap, abs=4.0 * math.sqrt(0.25 / SAMPLES))
    assert len(table) > count


def test_pictures_are_sampled_by_mixtures() -> None:
    def draw(drafter: Any, rule: Any) -> Any:
        target = models.target(model(1), 2, steps=1, built_by=MixtureTarget)
        engine = Engine(target, None, drafter, budget=4, rule=rule)
        match = engine.generate(
            [target.prompt(row) for row in range(2)],
            Sampling(temperature=1.0, seed=[1, 2]),
            max_new_tokens=models.SIDE**2,
            ignore_eos=True,
        )
        return torch.stack([target.table.latents[list(each.tokens)] for each in match]), match

    latents, result = draw(JacobiDrafter(4, width=models.SIDE), MixtureRule())
    again, _ = draw(JacobiDrafter(4, width=models.SIDE), MixtureRule())
    assert torch.equal(latents, again) and result[0].label == "exact-for(distribution)"
    assert sum(each.report.accepted for each in result) > 0
    assert draw(None, "walk")[0].shape == latents.shape == (2, models.SIDE**2, 2)


def test_guidance_and_other_heads_are_refused() -> None:
    with pytest.raises(InputError, match="expected 1, as guided mixtures"):
        models.target(model(0), scale=2.0, steps=1, built_by=MixtureTarget)
    with pytest.raises(InputError, match="expected a MixtureHead"):
        models.target(models.model(), built_by=MixtureTarget)
    with pytest.raises(RuleError, match="got a head that denoises"):
        emitted(MixtureRule(), pair("linear", "model"), 1)
