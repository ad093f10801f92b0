"""Images under rules over latents, the table of latents, settings and errors."""

import math
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, RuleError
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.drafting.jacobi import JacobiDrafter
from ragspec.visual.latents.rules import Aligned, Horizon, Near, Path
from ragspec.visual.latents.sampler import LatentSample
from ragspec.visual.latents.target import MOST_LATENTS, LatentTable
from tests.support import tiny
from tests.support import tiny_latents as models
from tests.support.latent_distributions import view_of
from tests.visual.drafting import test_latent_model

CODES = models.SIDE**2
RULES = (Near(0.3), Aligned(), Horizon(3), Path())


def generate(rule: Any, drafter: Any, rows: int = 3, seed: int = 4, **inputs: Any) -> Any:
    target = models.target(models.model(strength=0.2), rows, scale=2.0)
    return models.pictures(target, drafter, rule, rows, seed, **inputs)


def test_plain_latents_are_those_of_whole_forwards() -> None:
    latents, result = generate("walk", None)
    instance = models.model(strength=0.2)
    target = models.target(instance, 3, scale=2.0)
    inputs = instance.trunk.condition(torch.arange(3))
    none = instance.trunk.unconditional(3)
    with torch.no_grad():
        both = [instance.states(latents, condition) for condition in (inputs, none)]
        for row in range(3):
            message = target.sampler.conditioning(torch.stack([states[row] for states in both], 1))
            noise = target.noise(NoiseStream(4 + row), range(CODES))
            again = target.sampler.draw(message, noise).latents
            assert torch.allclose(again, latents[row], atol=1e-9)
    assert result[0].label == "exact" and result[0].report.forward_passes == CODES


def test_near_gives_the_plain_image_for_r_0_and_a_close_one_for_small_r() -> None:
    plain, _ = generate("walk", None)
    same, result = generate(Near(0.0), JacobiDrafter(6, width=models.SIDE))
    assert torch.allclose(same, plain, atol=1e-9)
    assert result[0].label == "exact up to rounding"
    close, result = generate(Near(1e-6), JacobiDrafter(6, width=models.SIDE))
    assert torch.allclose(close, plain, atol=1e-4) and result[0].label == "approximate"
    rough, quick = generate(Near(1.0), JacobiDrafter(6, width=models.SIDE))
    assert sum(each.report.accepted for each in quick) > 0
    assert not torch.allclose(rough, plain, atol=1e-3)


def by_jacobi(rule: Any, **inputs: Any) -> Any:
    return generate(rule, JacobiDrafter(6, width=models.SIDE), **inputs)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))
@pytest.mark.parametrize("draw", [by_jacobi, test_latent_model.generate])
def test_latents_depend_on_the_seed_alone(draw: Any, rule: Any) -> None:
    first, result = draw(rule)
    one_by_one, _ = draw(rule, max_batch_size=1)
    alone, _ = draw(rule, rows=1)
    assert torch.allclose(first, one_by_one, atol=1e-9)
    assert torch.allclose(first[:1], alone, atol=1e-9)
    assert sum(each.report.accepted for each in result) > 0
    assert first.shape == (3, CODES, models.WIDTH) and result[0].label == rule.label


def test_latents_of_another_index_are_no_drafts() -> None:
    target = models.target(models.model())
    p = torch.randn(32, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    number = view_of(target, p, DraftTree.empty(), 1).token(-1)
    target.table.indices[number] = 5  # sampled for another index
    tree = DraftTree.chain([number], "jacobi", kind=DraftKind.COUPLED)
    for rule in (Near(10.0), Aligned(), Path()):
        view = view_of(target, p, tree, 1)
        assert rule.judge(tree, view).token == view.token(-1)


@pytest.mark.parametrize(
    ("rule", "setting"),
    [(Near, -1.0), (Near, math.nan), (Near, "3"), (Horizon, 0), (Horizon, 1.5), (Horizon, "2")],
)
def test_bad_settings_are_refused(rule: Any, setting: Any) -> None:
    with pytest.raises(InputError, match="expected"):
        rule(setting)


def test_rules_of_the_other_kind_are_refused() -> None:
    small = (tiny.model(seed=1), tiny.tokenizer())
    with pytest.raises(RuleError, match="needs a model of continuous latents"):
        Engine(tiny.model(), tiny.tokenizer(), None, small, rule=Near(0.1))
    with pytest.raises(RuleError, match="needs tables of probabilities"):
        generate("rejection", JacobiDrafter(4, "sampled", width=3))


def test_the_table_of_latents_is_limited() -> None:
    count, like = MOST_LATENTS - 1, torch.zeros(1)
    table, one = LatentTable(1, 1, like), torch.ones(1).expand(count, 1, 1)
    sample = LatentSample(one.expand(-1, 2, -1), one, torch.zeros(0, 1, 1), one)
    with pytest.raises(InputError, match="expected fewer pictures in a call"):
        table.add(sample, range(MOST_LATENTS), ())
    assert table.add(sample, range(count), ()) == range(1, MOST_LATENTS)
    assert bool((table.latents[1:] == 1.0).all()) and not table.latents[0].any()
    with pytest.raises(InputError, match="expected fewer pictures in a call"):
        table.add_latent(like)
