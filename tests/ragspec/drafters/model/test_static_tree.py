"""Static trees: places hold the choices of their ranks, and invalid shapes are refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ragspec import Sampling
from ragspec.drafters.base import DraftContext
from ragspec.drafters.model.cache import DraftCache
from ragspec.drafters.model.growth import DraftState
from ragspec.drafters.model.static_tree import StaticGrowth
from ragspec.drafters.model.tree_shape import LEVELS, TreeShape
from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.trees.operations import check, depths
from ragspec.verification.causal import CausalTarget
from ragspec.verification.tree_attention import lease
from tests.support import tiny

PROMPT = tiny.prompt(8)
SAMPLED = Sampling(temperature=1.0)
SHAPE = TreeShape.by_rank((3, 4, 3))


def model(architecture: str = "llama") -> Any:
    return tiny.model(architecture, dtype=torch.float64)


def opened(architecture: str = "llama", vocab_size: int = tiny.VOCAB) -> DraftCache:
    return DraftCache(CausalTarget(model(architecture)), vocab_size, 64)


def grown(
    shape: TreeShape = SHAPE, sampling: Sampling = SAMPLED, budget: int = 60, depth: int = 9
) -> tuple[StaticGrowth, DraftTree]:
    distribution = TokenDistribution(sampling, NoiseStream(4), len(PROMPT))
    growth = StaticGrowth(distribution, "static", shape, DraftKind.COUPLED)
    context = DraftContext([*PROMPT, 5], len(PROMPT), 40)
    return growth, growth.grow(DraftState(opened(), context, budget, depth))


def filled(*inputs: Any, **options: Any) -> DraftTree:
    return grown(*inputs, **options)[1]


def choices(path: list[int], sampling: Sampling, k: int) -> list[int]:
    """Return the k first choices of plain decoding after the prompt, its root and a path."""
    distribution = TokenDistribution(sampling, NoiseStream(4), len(PROMPT))
    logits = afresh("llama", [*PROMPT, 5, *path])[None]
    result: list[int] = distribution.best(logits, [1 + len(path)], k)[0][0].tolist()
    return result


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(), Sampling(temperature=0.7, top_k=30)])
def test_every_place_holds_the_choice_of_its_rank(sampling: Sampling) -> None:
    tree = filled(SHAPE, sampling)
    check(tree, tiny.VOCAB)
    assert len(tree) == len(SHAPE.parents) == 10
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens.tolist(), strict=True)):
        above = paths[int(parent)]
        siblings = [i for i in range(node) if tree.parents[i] == parent]
        assert token == choices(above, sampling, 3)[len(siblings)]
        paths[node] = [*above, token]
    assert [int((depths(tree.parents) == depth).sum()) for depth in (1, 2, 3)] == [3, 4, 3]


def test_budget_and_depth_cut_from_below() -> None:
    whole = filled()
    for tree in (filled(budget=7), filled(depth=2)):
        assert tree.tokens.tolist() == whole.tokens.tolist()[:7]
        assert tree.parents.tolist() == whole.parents.tolist()[:7]
    assert len(filled(depth=1)) == 3


def test_a_shape_may_be_any_tree() -> None:
    tree = filled(TreeShape(parents=(-1, 0, 0, 2), ranks=(1, 0, 3, 0)))
    assert tree.parents.tolist() == [-1, 0, 0, 2]
    first = choices([], SAMPLED, 2)[1]
    second = choices([first], SAMPLED, 4)
    assert tree.tokens.tolist()[:3] == [first, second[0], second[3]]


def test_shapes_by_rank_take_the_likeliest_places() -> None:
    shape = TreeShape.by_rank((2, 3, 1))
    assert shape == TreeShape((-1, -1, 0, 0, 1, 2), (0, 1, 0, 1, 0, 0))
    assert shape.width == 2
    assert len(TreeShape.by_rank().parents) == sum(LEVELS)
    assert TreeShape.by_rank((1, 1, 1)).parents == (-1, 0, 1)


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


def afresh(architecture: str, tokens: Sequence[int]) -> torch.Tensor:
    """Return the model's logits after the last token: [V]."""
    return tiny.logits(model(architecture), tokens)[-1]


def check_rows(
    logits: torch.Tensor, architecture: str, text: Sequence[int], *paths: Sequence[int]
) -> None:
    """Check the logits after each path below a text, or after the text."""
    expected = [afresh(architecture, [*text, *path]) for path in paths or [()]]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=1e-9)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "olmo3"])
def test_a_draft_grows_forward_by_forward(architecture: str) -> None:
    text, cache = tiny.prompt(20), opened(architecture)
    with lease(model(architecture)):
        check_rows(cache.read(text), architecture, text)
        check_rows(cache.extend([3, 4], [ROOT, ROOT]), architecture, text, [3], [4])
        # One query that must not see the sibling of its parent, then nodes of several depths.
        check_rows(cache.extend([5], [1]), architecture, text, [4, 5])
        first = cache.drafted
        logits = cache.extend([6, 7, 8], [first - 1, 0, ROOT])
        check_rows(logits, architecture, text, [4, 5, 6], [3, 7], [8])
        check_rows(cache.extend([9], [first]), architecture, text, [4, 5, 6, 9])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_accepted_nodes_stay_and_are_not_read_again(architecture: str) -> None:
    text, cache = tiny.prompt(20), opened(architecture)
    with lease(model(architecture)):
        for emitted in [(4, 5, 11), (3, 12), (13,), (4, 6, 5, 14)]:
            check_rows(cache.read(text), architecture, text)
            cache.extend([3, 4], [ROOT, ROOT])
            cache.extend([5, 6], [1, 1])
            cache.extend([5], [3])
            cache.commit(emitted)
            text = [*text, *emitted]
            # The last token is the next root, which is read for its logits.
            assert len(cache) == len(text) - 1
        check_rows(cache.read(text), architecture, text)


def test_emitted_tokens_outside_the_draft_are_read_in_the_next_step() -> None:
    text, cache = tiny.prompt(20), opened()
    with lease(model()):
        cache.read(text)
        cache.extend([3, 4], [ROOT, ROOT])
        cache.commit((4, 9, 9, 8))  # the second token is not in the draft
        assert len(cache) == len(text) + 1
        cache.commit((7, 7))  # a step without a draft
        text = [*text, 4, 9, 9, 8, 7, 7]
        check_rows(cache.read(text), "llama", text)


def test_an_unfinished_draft_is_dropped() -> None:
    text, cache = tiny.prompt(20), opened()
    with lease(model()):
        for _ in range(2):
            check_rows(cache.read(text), "llama", text)
            check_rows(cache.extend([3, 4], [ROOT, ROOT]), "llama", text, [3], [4])
            check_rows(cache.extend([5, 5], [0, 1]), "llama", text, [3, 5], [4, 5])


def test_many_nodes_outgrow_the_first_mask() -> None:
    text, cache = tiny.prompt(8), opened()
    with lease(model()):
        cache.read(text)
        for slot in range(70):
            logits = cache.extend([slot, slot + 1], [2 * slot - 2 if slot else ROOT] * 2)
        check_rows(logits[:1], "llama", text, range(70))


@pytest.mark.parametrize("size", [tiny.VOCAB - 7, tiny.VOCAB + 9])
def test_distributions_are_over_the_vocabulary_of_the_target(size: int) -> None:
    text, cache = tiny.prompt(8), opened(vocab_size=size)
    with lease(model()):
        logits = cache.read(text)
    shared = min(size, tiny.VOCAB)
    torch.testing.assert_close(logits[0, :shared], afresh("llama", text)[:shared])
    assert logits.shape == (1, size)
    assert (logits[0, shared:] == float("-inf")).all()


def test_text_beyond_the_model_is_reported() -> None:
    cache = opened()
    assert cache.readable([1] * 512)
    assert cache.room([1] * 512) == 1  # a candidate below the root needs no place of its own
    assert not cache.readable([1] * 513)
    assert not cache.readable([1, tiny.VOCAB, 2])
    cache.model.input_size += 1  # an id that can be read and has no logits
    assert cache.readable([1, tiny.VOCAB, 2])
