"""The masked model and its head against a plain computation, and limits of sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.errors import InputError
from ragspec.visual.masked.model import MaskedConfig, MaskedModel
from tests.support import plain_mar, tiny_masked

PLACES = plain_mar.PLACES


@torch.no_grad()
@pytest.mark.parametrize("known", [0, 1, 4, PLACES])
def test_states_are_those_of_the_plain_prefill(known: int, tmp_path: Path) -> None:
    model, plain = tiny_masked.model(tmp_path), plain_mar.Plain(plain_mar.published())
    dice = torch.Generator().manual_seed(known)
    latents = torch.randn(2, PLACES, plain_mar.WIDTH, generator=dice, dtype=torch.float64)
    order = torch.rand(2, PLACES, generator=dice).argsort(-1)[:, :known]
    inputs = model.condition(torch.tensor([2]), 2)
    result = model.states(latents, order, inputs)
    for row, label in enumerate((2, None)):
        masked = [place not in order[row].tolist() for place in range(PLACES)]
        expected = plain.states(latents[row].numpy(), masked, label)
        assert np.allclose(result[row], expected, atol=1e-10)
    unseen = latents.clone().scatter_(1, order[..., None].expand(-1, -1, plain_mar.WIDTH), 0.0)
    assert torch.equal(model.states(latents - unseen, order, inputs), result)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"num_attention_heads": 5}, "5 attention heads for a width of 768"),
        ({"grid_size": 0}, "grid_size is 0"),
        ({"mean": [0.0, 1.0]}, "got 2 numbers as mean; expected 16"),
        ({"buffer_size": 0}, "buffer_size is 0"),
    ],
)
def test_impossible_sizes_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MaskedConfig(**inputs)


def test_a_new_model_predicts_nothing_yet_and_scales_its_latents() -> None:
    model = MaskedModel(tiny_masked.config(4, mean=[0.0, 1.0, 2.0, 3.0], deviation=2.0))
    assert not bool(model.head.final_layer.linear.weight.any())
    assert bool(model.mask_token.any()) and bool(model.fake_latent.any())
    latents = torch.randn(2, 9, 4)
    assert torch.allclose(model.restored(latents)[..., 3], latents[..., 3] * 2 + 3)
    assert torch.allclose(model.standardised(model.restored(latents)), latents, atol=1e-6)
