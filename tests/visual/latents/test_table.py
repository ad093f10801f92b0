"""The table of latents grows to its limit, and no further."""

import pytest
import torch

from ragspec.errors import InputError
from ragspec.visual.latents.sampler import LatentSample
from ragspec.visual.latents.target import MOST_LATENTS, LatentTable


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
