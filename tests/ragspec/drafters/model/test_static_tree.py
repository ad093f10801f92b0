"""Static trees: the shape is kept, its places hold the choices of their ranks, bad shapes fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.drafters.base import DraftContext
from ragspec.drafters.model.cache import DraftCache, DraftState
from ragspec.drafters.model.static_tree import LEVELS, StaticGrowth, TreeShape
from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import check, depths
from ragspec.verification.causal import CausalTarget
from tests.support import tiny

PROMPT = tiny.prompt(8)
SAMPLED = Sampling(temperature=1.0)


def model() -> Any:
    return tiny.model("llama", dtype=torch.float64)


def filled(
    shape: TreeShape, sampling: Sampling = SAMPLED, budget: int = 60, depth: int = 9
) -> DraftTree:
    distribution = TokenDistribution(sampling, NoiseStream(4), len(PROMPT))
    cache = DraftCache(CausalTarget(model()), tiny.VOCAB)
    context = DraftContext([*PROMPT, 5], len(PROMPT), 40)
    with cache.lease():
        draft_state = DraftState(cache, cache.read(context.tokens), context, budget, depth, 0.0)
        return StaticGrowth(distribution, "static", shape).grow(draft_state)


def choices(path: list[int], sampling: Sampling, k: int) -> list[int]:
    """Return the k first choices of plain decoding after the prompt, its root and a path."""
    distribution = TokenDistribution(sampling, NoiseStream(4), len(PROMPT))
    with torch.no_grad():
        text = torch.tensor([[*PROMPT, 5, *path]])
        logits = model()(input_ids=text, use_cache=False).logits[0, -1:]
    result: list[int] = distribution.best(logits, [1 + len(path)], k)[0][0].tolist()
    return result


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(), Sampling(temperature=0.7, top_k=30)])
def test_every_place_holds_the_choice_of_its_rank(sampling: Sampling) -> None:
    shape = TreeShape.by_rank((3, 4, 3))
    tree = filled(shape, sampling)
    check(tree, tiny.VOCAB)
    assert len(tree) == len(shape.parents) == 10
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens.tolist(), strict=True)):
        above = paths[int(parent)]
        siblings = [i for i in range(node) if tree.parents[i] == parent]
        assert token == choices(above, sampling, 3)[len(siblings)]
        paths[node] = [*above, token]
    counts = [int((depths(tree.parents) == depth).sum()) for depth in (1, 2, 3)]
    assert counts == [3, 4, 3]


def test_budget_and_depth_cut_from_below() -> None:
    whole = filled(TreeShape.by_rank((3, 4, 3)))
    for tree in (filled(TreeShape.by_rank((3, 4, 3)), budget=7), filled(_shape(), depth=2)):
        assert tree.tokens.tolist() == whole.tokens.tolist()[:7]
        assert tree.parents.tolist() == whole.parents.tolist()[:7]
    assert len(filled(_shape(), depth=1)) == 3


def _shape() -> TreeShape:
    return TreeShape.by_rank((3, 4, 3))


def test_a_shape_may_be_any_tree() -> None:
    shape = TreeShape(parents=(-1, 0, 0, 2), ranks=(1, 0, 3, 0))
    tree = filled(shape)
    assert tree.parents.tolist() == [-1, 0, 0, 2]
    first = choices([], SAMPLED, 2)[1]
    second = choices([first], SAMPLED, 4)
    assert tree.tokens.tolist()[:3] == [first, second[0], second[3]]


def test_shapes_by_rank_take_the_likeliest_places() -> None:
    shape = TreeShape.by_rank((2, 3, 1))
    assert shape.parents == (-1, -1, 0, 0, 1, 2)
    assert shape.ranks == (0, 1, 0, 1, 0, 0)
    assert shape.width == 2
    assert len(TreeShape.by_rank().parents) == sum(LEVELS)
    chain = TreeShape.by_rank((1, 1, 1))
    assert chain.parents == (-1, 0, 1)


@pytest.mark.parametrize("levels", [(), (0,), (2, 5), (3, -1)])
def test_levels_that_cannot_be_filled_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected"):
        TreeShape.by_rank(levels)


@pytest.mark.parametrize(
    ("parents", "ranks"),
    [((), ()), ((0,), (0,)), ((-1, -1), (0, 0)), ((-1,), (-1,)), ((-1, -2), (0, 0))],
)
def test_broken_shapes_are_refused(parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected"):
        TreeShape(parents, ranks)


def test_a_static_tree_learns_what_its_first_choices_are_gain() -> None:
    distribution = TokenDistribution(SAMPLED, NoiseStream(4), len(PROMPT))
    growth = StaticGrowth(distribution, "static", _shape())
    cache = DraftCache(CausalTarget(model()), tiny.VOCAB)
    context = DraftContext([*PROMPT, 5], len(PROMPT), 40)
    with cache.lease():
        tree = growth.grow(DraftState(cache, cache.read(context.tokens), context, 60, 9, 0.0))
    before = growth.typical
    growth.learn([int(tree.tokens[0]), 1])
    assert growth.typical != before
    assert all(0.0 < accept_prob <= 1.0 for accept_prob in tree.accept_prob.tolist())
