"""Drafts of latents by a smaller model: their values, their length, and a perfect model."""

from typing import Any

import torch

from ragspec.drafters.base import DraftContext
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.latents.rules import Near, Path
from tests.support import tiny_latents as models
from tests.support.loops import draft_request

CODES = models.SIDE**2


def smaller(seed: int = 7, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return a draft model of another trunk and head."""
    return models.model(seed, dtype, strength=0.1, hidden=16, head_width=12, **changes)


def parse_drafter(target: Any, instance: Any, rows: int = 1, **inputs: Any) -> LatentDrafter:
    draft = models.target(instance, rows, target.guidance_scale, table=target.table)
    return LatentDrafter(draft, target, **inputs)


def generate(
    rule: Any, rows: int = 3, window: int = 6, gain: float = 0.0, draft: Any = None, **inputs: Any
) -> Any:
    target = models.target(models.model(strength=0.1), rows, scale=2.0)
    drafter = parse_drafter(target, draft or smaller(), rows, window=window, min_expected_gain=gain)
    return models.pictures(target, drafter, rule, rows, **inputs)


def test_drafts_of_a_copy_of_the_target_are_accepted() -> None:
    same = models.model(strength=0.1)
    latents, result = generate(Near(1e-9), draft=same)
    plain, _ = generate("walk", window=1)
    assert torch.allclose(latents, plain, atol=1e-9)
    assert all(each.report.accepted >= 0.5 * CODES for each in result)
    assert all(each.report.forward_passes <= 3 for each in result)  # 1, then windows of 6
    selected, result = generate(Path(), draft=same)
    assert torch.allclose(selected, plain, atol=1e-9)


def test_drafts_are_the_latents_of_the_draft_model() -> None:
    target = models.target(models.model(), scale=2.0)
    instance = smaller()
    drafter = parse_drafter(target, instance, window=4, min_expected_gain=0.0)
    prompt = target.prompt(0)
    assert len(prompt) == 1
    session = drafter.open(draft_request(prompt, Sampling(temperature=1.0), 5, target.vocab_size))
    numbers = session.propose(DraftContext(list(prompt), len(prompt), CODES), 4).tokens.tolist()
    drafted = target.table.latents[numbers]
    with torch.no_grad():
        conditions = instance.trunk.condition(torch.arange(1)), instance.trunk.unconditional(1)
        states = [instance.states(drafted[None], each)[0] for each in conditions]
        message = drafter.draft.sampler.conditioning(torch.stack(states, 1))
        noise = target.noise(NoiseStream(5), range(4))
        alone = drafter.draft.sampler.draw(message, noise)
    assert torch.allclose(alone.latents, drafted, atol=1e-9)
    assert torch.allclose(target.table.means[numbers], alone.means, atol=1e-9)
    assert [target.table.indices[number] for number in numbers] == [0, 1, 2, 3]


def test_chains_grow_with_the_acceptance_rate_and_end_with_the_image() -> None:
    latents, result = generate(Near(50.0), window=99, gain=0.1)  # all are kept
    sizes = [len(step.tree) for step in result[0].steps if len(step.tree)]
    assert sizes[0] == 3 and sum(sizes) < CODES  # at probabilities of 0.5, 0.25 and 0.125
    _, none = generate(Near(0.0), window=99, gain=0.1)  # none is
    assert min(len(step.tree) for step in none[0].steps[1:-1]) == 1
    assert latents.shape[1] == CODES
