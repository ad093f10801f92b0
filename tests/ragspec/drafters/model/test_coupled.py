"""Coupled drafts: candidates are the first choices of the distribution, with their claims."""

import numpy as np
import pytest
import torch

from ragspec.drafters.base import DraftContext
from ragspec.drafters.model.coupled import CoupledGrowth, agreement
from ragspec.drafters.model.drafter import ModelDrafter, ModelSession
from ragspec.drafters.model.growth import DraftState
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check, depths
from tests.support import tiny
from tests.support.distributions import texts
from tests.support.loops import draft_request

PROMPT = tiny.prompt()
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8)}


def opened(
    sampling: Sampling, width: int = 3, min_expected_gain: float = 0.0
) -> tuple[ModelSession, CoupledGrowth]:
    model = tiny.model(dtype=torch.float64)
    drafter = ModelDrafter(model, width=width, min_expected_gain=min_expected_gain)
    session = drafter.open(draft_request(PROMPT, sampling))
    assert isinstance(session._growth, CoupledGrowth)
    return session, session._growth


def propose(session: ModelSession, budget: int) -> DraftTree:
    return session.propose(DraftContext(list(PROMPT), len(PROMPT), 50), budget)


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_every_first_child_is_the_choice_of_the_distribution(settings: str) -> None:
    session, growth = opened(SAMPLINGS[settings])
    tree = propose(session, 16)
    check(tree, tiny.VOCAB)
    below_root = texts(tree)
    for parent in set(tree.parents.tolist()):
        text = [*PROMPT, *below_root[parent]]
        logits = tiny.logits(session.cache.model.model, text)[-1:]
        chosen = int(growth.distribution.select(logits, [len(below_root[parent])]))
        below = [i for i, above in enumerate(tree.parents.tolist()) if above == parent]
        best = max(below, key=lambda i: (tree.accept_prob[i], -i))
        assert int(tree.tokens[best]) == chosen


def test_a_larger_budget_expects_more_accepted_nodes() -> None:
    trees = [propose(opened(SAMPLINGS["greedy"])[0], size) for size in (4, 8, 16)]
    reached = [float(tree.accept_prob.sum()) for tree in trees]
    assert reached == sorted(reached)
    deepest = [int(depths(propose(opened(SAMPLINGS["greedy"], width=1)[0], 8).parents).max())]
    assert deepest == [8]


def test_growth_ends_if_the_expected_gain_is_too_small() -> None:
    for min_expected_gain, forwards in ((10.0, 0), (0.0, 8)):
        session, _ = opened(SAMPLINGS["greedy"], width=1, min_expected_gain=min_expected_gain)
        tree = propose(session, 9)
        assert session.cache.drafted == forwards
        assert len(tree) == forwards + 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_smaller_error_makes_the_first_choice_surer(temperature: float) -> None:
    scores = torch.randn(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    perturbed = scores.sort(dim=-1, descending=True).values
    results = [agreement(perturbed, temperature, error) for error in (0.2, 0.7, 2.0)]
    for chances in results:
        torch.testing.assert_close(chances.sum(-1), torch.ones(3, dtype=torch.float64))
        assert (chances.diff(dim=-1) <= 1e-12).all(), "a later choice is surer than an earlier one"
    assert (torch.stack([chances[:, 0] for chances in results]).diff(dim=0) < 0).all()
    if not temperature:
        torch.testing.assert_close(agreement(perturbed, 0.0, 1.0), perturbed.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choices_follow_the_distribution_whether_noise_is_cached_or_new(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    distribution = TokenDistribution(SAMPLINGS["sampled"], NoiseStream(3), 0)
    growth = CoupledGrowth(distribution, "model", 4, DraftKind.COUPLED)
    for indices in ([0], [1, 1], [2, 0, 1], [5]):
        logits = torch.randn(len(indices), 500, dtype=dtype, generator=generator)
        tokens, perturbed = growth._contenders(logits, indices)
        expected, scores = distribution.best(logits, indices, 64)
        assert tokens.tolist() == expected.tolist()
        offset = (perturbed - scores).mean(-1, keepdim=True)
        torch.testing.assert_close(perturbed, scores + offset, rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", ["greedy", "sampled"])
def test_choices_among_some_tokens_are_those_among_all(settings: str) -> None:
    distribution = TokenDistribution(SAMPLINGS[settings], NoiseStream(3), 0)
    ids, indices = torch.arange(3, 500, 4), [2, 0, 1]
    some = torch.randn(3, len(ids), generator=torch.Generator().manual_seed(0))
    whole = torch.full((3, 500), -torch.inf)
    whole[:, ids] = some
    every = CoupledGrowth(distribution, "model", 4, DraftKind.COUPLED)._contenders(whole, indices)
    few = CoupledGrowth(distribution, "model", 4, DraftKind.COUPLED)._contenders(some, indices, ids)
    assert few[0].tolist() == every[0].tolist()
    torch.testing.assert_close(few[1], every[1])


def test_noise_of_earlier_positions_is_dropped() -> None:
    session, growth = opened(SAMPLINGS["sampled"])
    propose(session, 16)
    assert {0, 1, 2} <= growth._noise.keys()
    session.propose(DraftContext([*PROMPT, 5, 6], len(PROMPT), 50), 16)
    assert min(growth._noise) == 2


@pytest.mark.parametrize("settings", SAMPLINGS)
def test_distributions_name_the_nodes_of_the_tree_that_were_read(settings: str) -> None:
    session, _ = opened(SAMPLINGS[settings], width=3)
    assert session.distributions() == []
    tree = propose(session, 12)
    distributions = {node: (tokens, chances) for node, tokens, chances in session.distributions()}
    parents = set(tree.parents.tolist())
    assert parents <= distributions.keys() and distributions.keys() <= {-1, *range(len(tree))}
    accept_prob = {-1: 1.0} | dict(enumerate(tree.accept_prob.tolist()))
    for node, (tokens, chances) in distributions.items():
        assert len(tokens) == len(set(tokens)) == len(chances) == 64
        assert sum(chances) == pytest.approx(1.0) and chances == sorted(chances, reverse=True)
        for child in np.flatnonzero(tree.parents == node).tolist():
            chance = chances[tokens.index(int(tree.tokens[child]))]
            assert accept_prob[child] == pytest.approx(accept_prob[node] * chance, rel=1e-5)


def test_growth_skips_nodes_whose_gain_is_below_the_cost_of_a_row() -> None:
    session, growth = opened(SAMPLINGS["greedy"], width=4, min_expected_gain=0.4)
    growth._nodes.add(-1, [1, 2, 3], [0.8, 0.1, 0.05])
    for gain, nodes in ((0.4, [0]), (0.2, [0, 1]), (0.9, [])):
        growth._draft = DraftState(session.cache, DraftContext([], 0, 9), 8, 8, gain)
        assert growth._unread() == nodes


def test_the_error_adapts_to_acceptance() -> None:
    for hit in (True, False):
        session, growth = opened(SAMPLINGS["greedy"], width=1)
        before = growth.error
        chosen = int(propose(session, 4).tokens[0])
        growth.learn([chosen if hit else (chosen + 1) % tiny.VOCAB])
        assert (growth.error < before) is hit
        assert (growth.typical > 0.7) is hit
        after = growth.error
        growth.learn([chosen])  # without a draft since
        assert growth.error == after
