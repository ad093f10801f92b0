from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from ragspec.errors import InputError
from ragspec.rules.typical import Typical
from ragspec.rules.walk import Walk
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftTree
from tests.support.distributions import Distributions, distribution_deviation, grow, judged


def test_threshold_is_the_smaller_of_the_two() -> None:
    rule = Typical(epsilon=0.09, delta=0.3)
    certain = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert rule.threshold(certain) == pytest.approx(0.09)
    even = torch.full((10,), 0.1, dtype=torch.float64)
    assert rule.threshold(even) == pytest.approx(0.3 * math.exp(-math.log(10)))


def test_keeps_the_longest_then_the_likeliest_path() -> None:
    distributions = Distributions(3, 0)
    distributions.cache["target", ()] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    distributions.cache["target", (1,)] = torch.tensor([0.45, 0.55, 0.0], dtype=torch.float64)
    tree = DraftTree.build([0, 1, 0, 1, 2], [-1, -1, 1, 1, 1], "retrieved")
    verdict = judged(Typical(), tree, distributions, NoiseStream(0))
    assert verdict.path == (1, 3)


def test_improbable_tokens_are_left_out() -> None:
    distributions = Distributions(3, 0)
    distributions.cache["target", ()] = torch.tensor([0.95, 0.05, 0.0], dtype=torch.float64)
    for token, path in [(0, (0,)), (1, ()), (2, ())]:
        tree = DraftTree.chain([token], "retrieved")
        assert judged(Typical(), tree, distributions, NoiseStream(0)).path == path


def test_nothing_follows_the_end_of_a_text() -> None:
    distributions = Distributions(3, 0, end=1)
    distributions.cache["target", ()] = torch.tensor([0.4, 0.6, 0.0], dtype=torch.float64)
    tree = DraftTree.chain([1, 1], "retrieved")
    verdict = judged(Typical(), tree, distributions, NoiseStream(0))
    assert verdict.path == (0,)
    assert verdict.token is None


def test_greedy_target_gives_the_walk() -> None:
    distributions = Distributions(4, 3, greedy=True)
    for seed in range(30):
        tree = grow(distributions, NoiseStream(seed), (), (2, 2, 1))
        typical, walk = (
            judged(rule, tree, distributions, NoiseStream(seed)) for rule in (Typical(), Walk())
        )
        assert len(typical.path) == len(walk.path)
        assert typical.token == walk.token


def test_label_says_that_the_distribution_changes() -> None:
    assert Typical().label == "approximate"
    assert (
        distribution_deviation(Typical(), Distributions(3, 1), partial(grow, widths=(1,)), length=2)
        > 0.02
    )


@pytest.mark.parametrize("settings", [{"epsilon": 0.0}, {"delta": 1.5}, {"delta": -0.1}])
def test_settings_outside_their_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        Typical(**settings)
