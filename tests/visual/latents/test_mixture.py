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
from tests.support.latent_laws import Pair, differs, emitted, pair, plain
from tests.support.latent_mixture import MixtureHead, MixtureSampler, MixtureTarget
from tests.support.mixture_rule import MixtureRule

SAMPLES = 600


def model(seed: int, components: int = 3) -> Any:
    """Return a model of latents of two numbers with a mixture head."""
    trunk = models.model().config.trunk
    config = LatentConfig(2, 16, 1, steps=1, floor=0.1, trunk=trunk)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: Any = LatentModel(config).eval().to(torch.float64)
        made.head = MixtureHead(2, 32, components).double()
    return made


def mixtures(apart: float = 0.3) -> Pair:
    """Return a target and a draft of other weights, in one state."""
    target = models.target(model(0), steps=1, made_by=MixtureTarget)
    other = model(0)
    drawn = torch.Generator().manual_seed(2)
    with torch.no_grad():
        other.head.state.bias += apart * torch.randn(15, generator=drawn)
    draft = models.target(other, steps=1, made_by=MixtureTarget, table=target.table)
    state = torch.randn(32, generator=drawn, dtype=torch.float64)
    return Pair(target, draft, state, state)


class FreshDraw(MixtureRule):
    """A mutant: after a rejection the target's own latent, whose noise the draft shares."""

    def left(self, view: LatentView, index: int, drafted: int, own: int) -> torch.Tensor:
        return view.target.table.latents[own]


@torch.no_grad()
def test_latents_follow_the_density_that_is_told() -> None:
    given = mixtures()
    sampler = given.target.sampler
    assert isinstance(sampler, MixtureSampler)
    told = sampler.told(given.p[None, None])[0]
    axis = torch.arange(-7.975, 8.0, 0.05, dtype=torch.float64)  # the middles of cells
    places = torch.cartesian_prod(axis, axis)
    weights = sampler.log_density(told, places).exp() * 0.05**2
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-3)
    found = plain(given.target, given.p, 20_000)
    mean = weights @ places
    assert torch.allclose(found.mean(0), mean, atol=0.05)
    second = (places - mean).T * weights @ (places - mean)
    assert torch.allclose(found.T.cov(), second, atol=0.1)
    for way in (0, 1):  # shares of quarters, as the components are apart
        for edge in (-0.5, 0.5):
            share = float(weights[places[:, way] < edge].sum())
            assert float((found[:, way] < edge).double().mean()) == pytest.approx(share, abs=0.015)


def test_the_rule_keeps_the_targets_law() -> None:
    given = mixtures()
    wanted = plain(given.target, given.p, 4 * SAMPLES)
    found, kept = emitted(MixtureRule(), given, SAMPLES)
    assert differs(found, wanted) > 1e-4 and 0.3 < kept < 0.95
    assert differs(plain(given.draft, given.q, 4 * SAMPLES), wanted) < 1e-5


def test_a_rule_that_draws_anew_is_found() -> None:
    given = mixtures(0.6)
    wanted = plain(given.target, given.p, 4 * SAMPLES)
    assert differs(emitted(FreshDraw(), given, SAMPLES)[0], wanted) < 1e-5


def test_kept_drafts_are_as_many_as_the_laws_overlap() -> None:
    given = mixtures()
    table, count = given.target.table, 4000
    found = plain(given.draft, given.q, count)
    with torch.no_grad():
        p, q = (
            each.sampler.log_density(each.sampler.told(given.p[None, None])[0], found)  # type: ignore[attr-defined]
            for each in (given.target, given.draft)
        )
    overlap = float((p - q).exp().clamp(max=1.0).mean())
    kept = emitted(MixtureRule(), given, SAMPLES)[1]
    assert kept == pytest.approx(overlap, abs=4.0 * math.sqrt(0.25 / SAMPLES))
    assert len(table) > count


def test_pictures_are_drawn_by_mixtures() -> None:
    def draw(drafter: Any, rule: Any) -> Any:
        target = models.target(model(1), 2, steps=1, made_by=MixtureTarget)
        engine = Engine(target, None, drafter, budget=4, rule=rule)
        found = engine.generate(
            [target.prompt(row) for row in range(2)],
            Sampling(temperature=1.0, seed=[1, 2]),
            max_new_tokens=models.SIDE**2,
            ignore_eos=True,
        )
        return torch.stack([target.table.latents[list(each.tokens)] for each in found]), found

    latents, found = draw(JacobiDrafter(4, width=models.SIDE), MixtureRule())
    again, _ = draw(JacobiDrafter(4, width=models.SIDE), MixtureRule())
    assert torch.equal(latents, again) and found[0].label == "exact-for(law)"
    assert sum(each.report.accepted for each in found) > 0
    assert draw(None, "walk")[0].shape == latents.shape == (2, models.SIDE**2, 2)


def test_guidance_and_other_heads_are_refused() -> None:
    with pytest.raises(InputError, match="expected 1, as guided mixtures"):
        models.target(model(0), scale=2.0, steps=1, made_by=MixtureTarget)
    with pytest.raises(InputError, match="expected a MixtureHead"):
        models.target(models.model(), made_by=MixtureTarget)
    with pytest.raises(RuleError, match="got a head that denoises"):
        emitted(MixtureRule(), pair("linear", "model"), 1)
