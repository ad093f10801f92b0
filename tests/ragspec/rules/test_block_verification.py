from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from ragspec.rules.block_verification import Block
from ragspec.rules.rejection import ChainRejection
from ragspec.sampling.noise import NoiseStream, Stream
from ragspec.trees.draft_tree import DraftTree
from tests.support.distributions import (
    Distributions,
    Place,
    distribution_deviation,
    grow,
    mean_length,
)
from tests.support.enumeration import NoiseUsedTwiceError

EXACT = 1e-12


def chain(depth: int) -> partial[DraftTree]:
    return partial(grow, widths=(1,) * depth)


def test_accepts_no_less_than_chain_rejection() -> None:
    gains = []
    for seed in range(4):
        distributions = Distributions(3, seed, alike=0.0)
        block, single = (
            mean_length(rule, distributions, chain(3)) for rule in (Block(), ChainRejection())
        )
        gains.append(block - single)
    assert min(gains) >= -EXACT
    assert np.mean(gains) > 0.02


def test_one_token_is_chain_rejection() -> None:
    distributions = Distributions(5, 7)
    block, single = (
        mean_length(rule, distributions, chain(1)) for rule in (Block(), ChainRejection())
    )
    assert block == pytest.approx(single, abs=EXACT)


def test_published_shape_of_gain() -> None:
    # Laws that do not depend on the context: two tokens, target (1/3, 2/3), draft (2/3, 1/3).
    distributions = Distributions(2, 0)
    for text in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]:
        distributions.cache["target", text] = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
        distributions.cache["draft", text] = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    assert mean_length(ChainRejection(), distributions, chain(2)) - 1 == pytest.approx(
        10 / 9, abs=EXACT
    )
    assert mean_length(Block(), distributions, chain(2)) - 1 == pytest.approx(11 / 9, abs=EXACT)


def test_draws_keyed_by_token_prepare_again_in_the_next_step() -> None:
    def by_token(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
        number = noise.uniform(place.index, Stream.DRAFT)
        return [0 if number < float(q[0]) else 1]

    distributions, tree = (
        Distributions(2, 4, alike=0.0),
        partial(grow, widths=(1, 1), draw=by_token),
    )
    with pytest.raises(NoiseUsedTwiceError):
        distribution_deviation(Block(), distributions, tree, length=4, steps=2)
    assert (
        distribution_deviation(Block(), distributions, tree, length=4, steps=2, reuse=True) > 0.05
    )
    single = distribution_deviation(
        ChainRejection(), distributions, tree, length=4, steps=2, reuse=True
    )
    assert single <= EXACT
