"""Images of a masked model against a plain computation, latent by latent."""

from typing import Any

import numpy as np
import pytest
import torch

from ragspec.sampling.noise import NoiseStream
from ragspec.visual.latents.sampler import path_noise
from ragspec.visual.masked.model import MaskedConfig, MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule, MaskedSampler, order_of
from tests.support import plain_mar, tiny_masked

PLACES = plain_mar.PLACES
CLIP = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MaskedModel:
    return tiny_masked.model(tmp_path_factory.mktemp("mar"), strength=0.3)


@pytest.fixture(scope="module")
def plain() -> plain_mar.Plain:
    return plain_mar.Plain(plain_mar.published(strength=0.3), CLIP)


def bounded(model: MaskedModel) -> MaskedModel:
    """Return the model with a bound, without which latents of random weights overflow float16."""
    instance = MaskedModel(MaskedConfig(**{**model.config.to_dict(), "clip": CLIP}))
    instance.double().eval().load_state_dict(model.state_dict())
    return instance


def sampled(
    model: MaskedModel,
    plain: plain_mar.Plain,
    iterations: int = 5,
    steps: int = 12,
    scale: float = 2.5,
    temperature: float = 0.9,
) -> tuple[Any, Any]:
    """Return an image of the library and of the plain computation, under the same noise."""
    instance, noise = bounded(model) if plain.clip == CLIP else model, NoiseStream(7)
    sampler = MaskedSampler(instance, LearnedSchedule(steps), iterations, scale, temperature)
    result = list(sampler.draw(torch.tensor([1]), [noise]))[-1][1][0].numpy()

    def noise_of(place: int) -> Any:
        return path_noise(noise, [place], steps, plain_mar.WIDTH)[0].numpy()

    order = order_of(noise, PLACES).tolist()
    return result, plain.picture(1, order, noise_of, iterations, steps, scale, temperature)


@pytest.mark.parametrize(
    "changed", [{}, {"iterations": PLACES}, {"iterations": 1}, {"scale": 1.0}, {"temperature": 1.0}]
)
def test_pictures_are_those_of_the_plain_prefill(
    model: MaskedModel, plain: plain_mar.Plain, changed: dict[str, Any]
) -> None:
    result, expected = sampled(model, plain, **changed)
    assert np.abs(result - expected).max() < 1e-4
    assert np.abs(expected).min() > 0.0 and 0.5 < expected.std() < 3.0


def test_published_models_have_no_bound(model: MaskedModel) -> None:
    result, expected = sampled(model, plain_mar.Plain(plain_mar.published(strength=0.3)))
    assert np.abs(expected).max() > 1e3
    assert np.abs(result - expected).max() < 1e-5 * np.abs(expected).max()


def test_each_latent_has_separate_noise_and_each_picture_an_order() -> None:
    seed = NoiseStream(3)
    noise = path_noise(seed, range(PLACES), 8, plain_mar.WIDTH)
    assert noise.shape == (PLACES, 9, plain_mar.WIDTH)
    assert len(torch.unique(noise)) == noise.numel()
    assert torch.equal(path_noise(seed, [5, 2], 8, plain_mar.WIDTH), noise[[5, 2]])
    first, second = (order_of(each, PLACES).tolist() for each in (seed, NoiseStream(4)))
    assert first != second and sorted(first) == list(range(PLACES))


def test_half_precision_gives_numbers(model: MaskedModel) -> None:
    labels, noises = torch.tensor([0, 1]), [NoiseStream(1), NoiseStream(2)]
    models = (bounded(model).half(), bounded(model))
    samplers = [MaskedSampler(each, LearnedSchedule(100), 4, 3.0) for each in models]
    result, whole = (list(each.draw(labels, noises))[-1][1] for each in samplers)
    assert result.dtype == torch.float32 and bool(result.isfinite().all())
    assert whole.dtype == torch.float64
    assert float((result - whole).abs().median()) < 0.02
