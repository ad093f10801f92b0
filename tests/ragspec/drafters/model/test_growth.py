"""Drafts that do not see the noise: the same tree for every seed, and bounds that hold."""

from __future__ import annotations

import torch

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.options import Options
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.rules.codebook import CodeNeighbours
from ragspec.visual.rules.lantern import Lantern
from tests.support import image_models


def draft(seed: int) -> ImageTarget:
    return image_models.target(image_models.model(seed=seed, layers=1))


def tree_of(drafter: ModelDrafter, seed: int) -> tuple[list[int], list[int]]:
    target = image_models.target(image_models.model())
    prompt = target.prompt(0)
    sampling = Sampling(temperature=1.0, seed=seed)
    distribution = TokenDistribution(sampling, NoiseStream(seed), len(prompt))
    session = drafter.open(
        DraftRequest(tuple(prompt), image_models.BOOK, distribution=distribution)
    )
    tree = session.propose(DraftContext([*prompt, 3], len(prompt), 10), 8)
    assert tree.kind is drafter.kind
    return tree.tokens.tolist(), tree.parents.tolist()


def test_the_tree_does_not_depend_on_the_seed() -> None:
    blind, seeing = ModelDrafter(draft(1), mode="deterministic"), ModelDrafter(draft(1))
    assert blind.kind is DraftKind.DETERMINISTIC
    assert tree_of(blind, 1) == tree_of(blind, 2)
    assert tree_of(seeing, 1) != tree_of(seeing, 2)


def test_the_first_candidates_are_the_most_probable_codes() -> None:
    current = draft(1)
    logits = image_models.guided(current.model, 0, [3])[-1]
    tokens, parents = tree_of(ModelDrafter(current, mode="deterministic"), 5)
    first = [token for token, parent in zip(tokens, parents, strict=True) if parent == -1]
    assert first == logits.topk(len(first)).indices.tolist()


def test_walk_stays_exact_and_a_budget_bounds() -> None:
    target = image_models.target(image_models.model())
    sampling = Sampling(temperature=1.0, seed=3)
    options: Options = {"max_new_tokens": image_models.SIDE**2, "ignore_eos": True}
    plain = Engine(target, None, drafter=None).generate(target.prompt(1), sampling, **options)
    fast = Engine(target, None, drafter=ModelDrafter(draft(1), mode="deterministic"), budget=8)
    out = fast.generate(target.prompt(1), sampling, **options)
    assert out.tokens == plain.tokens and out.label == "exact"
    book = torch.randn(image_models.BOOK, 4, generator=torch.Generator().manual_seed(0))
    rule = Lantern(CodeNeighbours.build(book, 20), delta=0.5, tv_budget=0.4)
    loose = Engine(
        target, None, drafter=ModelDrafter(draft(1), mode="deterministic"), budget=8, rule=rule
    )
    result = loose.generate(target.prompt(1), sampling, **options)
    assert result.label == "bounded(tv<=0.4)"
    assert 0.0 < sum(sum(step.excess) for step in result.steps) <= 0.4
