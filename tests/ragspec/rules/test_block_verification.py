import itertools
import math
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch

from ragspec.errors import InputError
from ragspec.rules.base import Rule
from ragspec.rules.block_verification import Block
from ragspec.rules.k_seq import KSeq, division_factor
from ragspec.rules.rejection import ChainRejection, MultiStep
from ragspec.rules.typical import Typical
from ragspec.rules.walk import Walk
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import DraftTree
from tests.support.codes import sampled
from tests.support.distributions import Distributions, Place, grow
from tests.support.enumeration import NoiseUsedTwiceError

EXACT = 1e-12


def test_accepts_no_less_than_chain_rejection() -> None:
    gains = []
    for seed in range(4):
        distributions = Distributions(3, seed, alike=0.0)
        block = distributions.mean_length(Block(), sampled(1, 1, 1))
        gains.append(block - distributions.mean_length(ChainRejection(), sampled(1, 1, 1)))
    assert min(gains) >= -EXACT
    assert np.mean(gains) > 0.02


def test_published_shape_of_gain() -> None:
    contexts = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    distributions = Distributions(2, 0).fix("target", dict.fromkeys(contexts, (1 / 3, 2 / 3)))
    distributions.fix("draft", dict.fromkeys(contexts, (2 / 3, 1 / 3)))
    single = distributions.mean_length(ChainRejection(), sampled(1, 1))
    assert single - 1 == pytest.approx(10 / 9, abs=EXACT)
    assert distributions.mean_length(Block(), sampled(1, 1)) - 1 == pytest.approx(11 / 9, abs=EXACT)


def test_block_needs_draws_keyed_by_root_and_node() -> None:
    def by_token(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
        number = noise.uniform(place.index, NoiseUse.DRAFT)
        return [0 if number < float(q[0]) else 1]

    distributions = Distributions(2, 4, alike=0.0)
    case = (partial(grow, widths=(1, 1), draw=by_token), 4, 2)  # four tokens of two steps
    with pytest.raises(NoiseUsedTwiceError):
        distributions.deviation(Block(), *case)
    assert distributions.deviation(Block(), *case, reuse=True) > 0.05
    assert distributions.deviation(ChainRejection(), *case, reuse=True) <= EXACT


@pytest.mark.parametrize(("rule", "widths"), [(KSeq(), (1, 1)), (Block(), (1,))])
def test_one_candidate_is_chain_rejection(rule: Rule, widths: tuple[int, ...]) -> None:
    distributions, tree = Distributions(4, 2), sampled(*widths)
    theirs = distributions.outcomes(ChainRejection(), tree)
    assert distributions.outcomes(rule, tree) == pytest.approx(theirs, abs=EXACT)


def test_division_factor_is_the_smallest_safe_one() -> None:
    for seed in range(20):
        distributions, k = Distributions(6, seed), 2 + seed % 3
        p, q = distributions.target(()), distributions.draft(())
        rho = division_factor(p, q, k)
        assert 1.0 <= rho <= k

        def left(rho: float, p: torch.Tensor = p, q: torch.Tensor = q, k: int = k) -> float:
            overlap = torch.minimum(q, p / rho)
            beta = overlap.sum()
            return float((p - overlap * (1 - (1 - beta) ** k) / beta).min())

        assert left(rho) >= -EXACT
        beta = float(torch.minimum(q, p / rho).sum())
        assert 1 - (1 - beta) ** k == pytest.approx(rho * beta, abs=1e-9)


def test_division_factor_at_the_ends() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    assert division_factor(p, p, 1) == 1.0
    assert division_factor(p, p, 3) == pytest.approx(1.0)
    assert division_factor(p, p.flip(0), 3) == pytest.approx(3.0)


def test_three_candidates_beat_recursive_rejection() -> None:
    worlds, tree = [Distributions(3, seed) for seed in range(4)], sampled(3)
    ours, theirs = (
        np.mean([distributions.mean_length(rule, tree) for distributions in worlds])
        for rule in (KSeq(), MultiStep())
    )
    assert ours > theirs + 0.005


def test_threshold_is_the_smaller_of_the_two() -> None:
    rule = Typical(epsilon=0.09, delta=0.3)
    assert rule.threshold(torch.tensor([1.0, 0.0], dtype=torch.float64)) == pytest.approx(0.09)
    even = torch.full((10,), 0.1, dtype=torch.float64)
    assert rule.threshold(even) == pytest.approx(0.3 * math.exp(-math.log(10)))


def test_nothing_follows_the_end_of_a_text() -> None:
    distributions = Distributions(3, 0, end=1).fix("target", {(): (0.4, 0.6, 0.0)})
    tree = DraftTree.chain([1, 1], "retrieved")
    verdict = distributions.judge(Typical(), tree, NoiseStream(0))
    assert (verdict.path, verdict.token) == ((0,), None)


def test_greedy_target_gives_the_walk() -> None:
    distributions = Distributions(4, 3, greedy=True)
    for seed in range(30):
        tree = grow(distributions, NoiseStream(seed), (), (2, 2, 1))
        typical, walk = (
            distributions.judge(rule, tree, NoiseStream(seed)) for rule in (Typical(), Walk())
        )
        assert (len(typical.path), typical.token) == (len(walk.path), walk.token)


@pytest.mark.parametrize("seed", range(3))
def test_typical_has_the_distribution_of_its_definition(seed: int) -> None:
    """Two drawn siblings with a drawn child each; every draw by hand, beside the rule's."""
    distributions, expected = Distributions(3, seed), defaultdict[tuple[int, ...], float](float)

    def likelihood(path: tuple[int, ...]) -> float:
        """Return the probability of a path of passing tokens, 0 if one does not pass."""
        total = 1.0
        for place, token in enumerate(path):
            p = distributions.target(path[:place])
            chance, entropy = float(p[token]), -float((p * p.log()).sum())
            total *= chance if chance > min(0.09, 0.3 * math.exp(-entropy)) else 0.0
        return total

    for a, b, c, d in itertools.product(range(3), repeat=4):
        pairs, weight = ((a, c), (b, d)), 1.0
        for first, second in pairs:
            weight *= float(distributions.draft(())[first] * distributions.draft((first,))[second])
        paths = [(), *(pair[:depth] for pair in pairs for depth in (1, 2))]
        path = max(filter(likelihood, paths), key=lambda each: (len(each), likelihood(each)))
        for token, chance in enumerate(distributions.target(path).tolist()):
            expected[*path, token] += weight * chance
    outcomes = distributions.outcomes(Typical(), sampled(2, 1))
    assert {text: weight for text, weight in outcomes.items() if weight} == pytest.approx(expected)


@pytest.mark.parametrize("settings", [{"epsilon": 0.0}, {"delta": 1.5}, {"delta": -0.1}])
def test_settings_outside_their_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        Typical(**settings)
