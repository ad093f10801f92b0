"""A masked model as a target: its prefixes, and images that do not depend on their batch."""

from typing import Any

import pytest
import torch

from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import StopRule, StopState
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.latents.rules import Aligned, Horizon, Near, Path
from ragspec.visual.masked.schedule import LearnedSchedule
from ragspec.visual.masked.target import MaskedTarget
from tests.support.masked_distributions import FLOOR, SCALE, STEPS, accepted, model, plain, sampled

RULES = (Near(0.3), Aligned(), Horizon(2), Path())


@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_the_engine_draws_as_the_sampler(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("tests.support.masked_distributions.SCALE", f"{__name__}.SCALE"):
        monkeypatch.setattr(where, scale)
    expected = plain(3, first=0, side=3)
    result, message = sampled("walk", None, 3, side=3)
    assert torch.allclose(result, expected, atol=1e-12)
    assert [each.report.forward_passes for each in message] == [9, 9, 9]
    for drafts in ("jacobi", "model"):
        same, message = sampled(Near(0.0), drafts, 3, side=3)
        assert torch.allclose(same, expected, atol=1e-9)
        assert message[0].label == "exact up to rounding"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))
@pytest.mark.parametrize("drafts", ["jacobi", "model"])
def test_images_do_not_depend_on_their_batch(rule: Any, drafts: str) -> None:
    together, message = sampled(rule, drafts, 3, side=3)
    one_by_one, _ = sampled(rule, drafts, 3, side=3, max_batch_size=1)
    alone, _ = sampled(rule, drafts, 1, side=3, first=1)
    assert torch.allclose(together, one_by_one, atol=1e-9)
    assert torch.allclose(together[1:2], alone, atol=1e-9)
    assert accepted(message) > 0.0 and message[0].label == rule.label


def test_nothing_is_drafted_before_drafting_begins() -> None:
    _, message = sampled(Near(10.0), "jacobi", 2, side=3, begin=4)
    assert [len(step.tree) for step in message[0].steps[:5]] == [0, 0, 0, 0, 3]
    _, at_once = sampled(Near(10.0), "model", 2, side=3)
    assert len(at_once[0].steps[1].tree) == 3 < len(message[0].steps)


def test_latents_ahead_are_sampled_under_the_deepest_prefix() -> None:
    instance, noises = model(side=3), [NoiseStream(5)]
    schedule = LearnedSchedule(STEPS, FLOOR)
    target = MaskedTarget(instance, schedule, torch.tensor([1]), noises, SCALE, ahead=3)
    drafter = LatentDrafter(None, target, 3, 0.0)
    empty, stop = DraftTree.empty(), StopState(StopRule(frozenset(), 9))
    distribution = TokenDistribution(Sampling(temperature=1.0), noises[0], 1)
    with target.open(1, 0) as session:
        states = session.verify([target.prompt(0)], [empty])
        target.draw([target.open_view(states[0], empty, distribution, stop, target.prompt(0))])
    assert [target.guess(0, index) for index in range(5)] == [*range(1, 5), None]
    expected = target.at(target.read([0], [[]])[0], 0, [2])
    again = target.add(expected, target.noise(noises[0], [2]), [2])[0]
    assert torch.allclose(target.table.latents[again], target.table.latents[3], atol=1e-12)
    assert drafter.name == "jacobi"


def test_bad_input_is_refused() -> None:
    schedule, noises = LearnedSchedule(STEPS, FLOOR), [NoiseStream(1)]
    target = MaskedTarget(model(), schedule, torch.tensor([0]), noises)
    with pytest.raises(InputError, match=r"expected one of target\.prompt"):
        target.check_prompt([3])
