from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from ragspec.acceptance.block_verification import Block
from ragspec.acceptance.rejection import ChainRejection
from ragspec.errors import RuleError
from ragspec.sampling.noise import NoiseStream, Stream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from tests.support.enumeration import NoiseUsedTwiceError
from tests.support.laws import (
    Laws,
    Place,
    generate,
    grow,
    judged,
    law_deviation,
    mean_length,
    sampled_deviation,
)

EXACT = 1e-12


def chain(depth: int) -> partial[DraftTree]:
    return partial(grow, widths=(1,) * depth)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("depth", "vocab"), [(0, 5), (1, 5), (2, 4), (3, 3), (5, 2)])
def test_output_follows_the_target(depth: int, vocab: int, zeros: bool) -> None:
    for seed in range(3):
        laws = Laws(vocab, seed, alike=0.4 * seed, zeros=zeros and vocab > 2)
        tree = chain(depth) if depth else lambda *_: DraftTree.empty()
        assert law_deviation(Block(), laws, tree, depth + 1) <= EXACT


def test_steps_are_independent() -> None:
    assert law_deviation(Block(), Laws(2, 1), chain(2), length=4, steps=2) <= EXACT


def test_accepts_no_less_than_chain_rejection() -> None:
    gains = []
    for seed in range(4):
        laws = Laws(3, seed, alike=0.0)
        block, single = (mean_length(rule, laws, chain(3)) for rule in (Block(), ChainRejection()))
        gains.append(block - single)
    assert min(gains) >= -EXACT
    assert np.mean(gains) > 0.02


def test_one_token_is_chain_rejection() -> None:
    laws = Laws(5, 7)
    block, single = (mean_length(rule, laws, chain(1)) for rule in (Block(), ChainRejection()))
    assert block == pytest.approx(single, abs=EXACT)


def test_published_shape_of_gain() -> None:
    # Laws that do not depend on the context: two tokens, target (1/3, 2/3), draft (2/3, 1/3).
    laws = Laws(2, 0)
    for text in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]:
        laws.cache["target", text] = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
        laws.cache["draft", text] = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    assert mean_length(ChainRejection(), laws, chain(2)) - 1 == pytest.approx(10 / 9, abs=EXACT)
    assert mean_length(Block(), laws, chain(2)) - 1 == pytest.approx(11 / 9, abs=EXACT)


def test_a_draft_like_the_target_is_always_accepted() -> None:
    assert mean_length(Block(), Laws(3, 0, alike=1.0), chain(3)) == pytest.approx(4, abs=EXACT)


def test_greedy_target_gives_greedy_text() -> None:
    laws = Laws(5, 4, greedy=True)
    best: tuple[int, ...] = ()
    while len(best) < 16:
        best = (*best, int(laws.target(best).argmax()))
    for seed in range(20):
        text = generate(Block(), laws, NoiseStream(seed), chain(3), steps=4)
        assert text == best[: len(text)]


def test_real_noise_gives_the_law() -> None:
    found, bound = sampled_deviation(Block(), Laws(3, 5), chain(2), length=2, samples=400)
    assert found <= bound


def test_draws_keyed_by_token_meet_again_in_the_next_step() -> None:
    def by_token(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
        number = noise.uniform(place.index, Stream.DRAFT)
        return [0 if number < float(q[0]) else 1]

    laws, tree = Laws(2, 4, alike=0.0), partial(grow, widths=(1, 1), draw=by_token)
    with pytest.raises(NoiseUsedTwiceError):
        law_deviation(Block(), laws, tree, length=4, steps=2)
    assert law_deviation(Block(), laws, tree, length=4, steps=2, reuse=True) > 0.05
    single = law_deviation(ChainRejection(), laws, tree, length=4, steps=2, reuse=True)
    assert single <= EXACT


def test_a_text_that_ends_in_the_draft() -> None:
    for seed in range(3):
        laws = Laws(3, seed, end=1)
        assert law_deviation(Block(), laws, chain(3), length=4) <= EXACT


def test_branches_are_refused() -> None:
    q = torch.full((3, 4), 0.25, dtype=torch.float64)
    tree = DraftTree.build([1, 2], [-1, -1], "drawn", kind=DraftKind.SAMPLED, q=q)
    with pytest.raises(RuleError, match="expected a chain"):
        judged(Block(), tree, Laws(4, 0), NoiseStream(0))
