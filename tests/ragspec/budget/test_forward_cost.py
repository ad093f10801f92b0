"""The cost of forwards: what a probe measures, and what later forwards correct."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.budget import forward_cost
from ragspec.budget.forward_cost import LONG, SHORT, SIZES, ForwardCost
from ragspec.errors import InputError


def true_seconds(n: int, length: int) -> float:
    return 1e-4 * (10 + 0.5 * n + (0.002 + 0.0001 * n) * (length - SHORT))


class Timer:
    """The timer of a model of known costs, which records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, n: int, length: int) -> float:
        self.calls.append((n, length))
        return true_seconds(n, length)


def timed() -> ForwardCost:
    return ForwardCost({n: true_seconds(n, SHORT) for n in SIZES}, (2e-7, 1e-8))


def test_a_probe_gives_costs_of_all_sizes_and_lengths() -> None:
    timer = Timer()
    cost = ForwardCost.probe(timer)
    assert len(timer.calls) == 19  # two rounds
    for n in (1, 2, 5, 9, 40, 64, 100, 300):
        for length in (SHORT, 1000, LONG, 3 * LONG):
            assert cost.seconds(n, length) == pytest.approx(true_seconds(n, length))
    assert cost.seconds(3, 5) == cost.seconds(3, SHORT)


def test_a_slow_model_is_timed_at_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_cost, "PROBE_SECONDS", 0.0)
    timer = Timer()
    cost = ForwardCost.probe(timer)
    assert timer.calls == [(1, SHORT), (1, SHORT), (16, SHORT)]
    assert cost.seconds(64, SHORT) == pytest.approx(true_seconds(64, SHORT))


def test_a_forward_that_another_process_slowed_is_timed_again() -> None:
    timer = Timer()

    def disturbed(n: int, length: int) -> float:
        return timer(n, length) * (3.0 if n == 8 or len(timer.calls) in (3, 8, 12) else 1.0)

    cost = ForwardCost.probe(disturbed, rounds=3)
    assert cost.seconds(2, SHORT) == pytest.approx(true_seconds(2, SHORT))
    assert cost.seconds(8, SHORT) == cost.seconds(16, SHORT), "always slowed: at most the next"
    shapes = zip(cost.timings[0], ForwardCost.probe(timer).timings[0], strict=True)
    assert [n for n, (a, b) in zip(SIZES, shapes, strict=True) if a != b] == [6, 8, 12]


@pytest.mark.parametrize("limit", [1, 8, 70, 150, 500])
def test_a_probe_fits_the_context_window(limit: int) -> None:
    timer = Timer()
    ForwardCost.probe(timer, limit)
    assert all(length <= max(1, limit - SIZES[-1]) for _, length in timer.calls)


def test_costs_between_and_beyond_sizes_are_linear() -> None:
    cost = ForwardCost({n: 5.0 if n <= 8 else 5.0 + (n - 8) ** 2 for n in SIZES})
    assert cost.seconds(28, SHORT) == pytest.approx((cost.seconds(24, 1) + cost.seconds(32, 1)) / 2)
    last = cost.seconds(64, SHORT)
    assert cost.seconds(74, SHORT) == pytest.approx(last + 10 * (last - 5.0) / 56), "from 8 to 64"


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10.0)), max_size=60))
def test_more_positions_never_cost_less(steps: list[tuple[int, float]]) -> None:
    cost = timed()
    for i, (n, seconds) in enumerate(steps):
        cost.learn(n, 100 + 50 * i, seconds)
    for length in (1, SHORT, 5000):
        costs = [cost.seconds(n, length) for n in range(1, 200)]
        assert min(costs) > 0.0 and math.isfinite(max(costs))
        assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(costs))


def test_the_level_is_the_median_of_recent_forwards() -> None:
    cost = timed()
    for _ in range(4):
        cost.learn(1, SHORT, 30 * true_seconds(1, SHORT))
    assert cost.seconds(1, SHORT) == pytest.approx(true_seconds(1, SHORT)), "outliers"
    cost.learn(1, SHORT, 3 * true_seconds(1, SHORT))
    assert cost.seconds(9, 700) == pytest.approx(3 * true_seconds(9, 700)), "a lasting change"


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_a_shape_that_was_measured_wrong_is_learned(noise: float, seed: int) -> None:
    """19 ms for one position and 26 for all others, where each really costs 0.9 ms more."""
    cost, random = ForwardCost({1: 0.019, 2: 0.026, 64: 0.026}), np.random.default_rng(seed)
    for step in range(600):
        busy = 2.0 if step // 40 % 2 else 1.0  # another process runs at times
        n = int(random.choice([1, 5, 9, 17, 33]))
        seconds = (0.019 + 0.0009 * (n - 1)) * busy * math.exp(noise * random.normal())
        cost.learn(n, SHORT, seconds)
    for n in (9, 17, 33):
        share = cost.seconds(n, SHORT) / cost.seconds(1, SHORT)
        assert share == pytest.approx((19 + 0.9 * (n - 1)) / 19, rel=0.08 + 0.7 * noise)


def test_one_outlier_hardly_changes_the_shape() -> None:
    cost = timed()
    before = cost.seconds(17, SHORT) / cost.seconds(1, SHORT)
    cost.learn(1, SHORT, true_seconds(1, SHORT))
    cost.learn(17, SHORT, 30 * true_seconds(17, SHORT))
    assert cost.seconds(17, SHORT) / cost.seconds(1, SHORT) == pytest.approx(before, rel=0.1)


def test_non_finite_and_non_positive_times_are_ignored() -> None:
    cost = timed()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        cost.learn(1, SHORT, seconds)
    assert cost.seconds(1, SHORT) == pytest.approx(true_seconds(1, SHORT))


def test_a_cost_without_times_takes_its_scale_from_the_first_forward() -> None:
    cost = ForwardCost({})
    cost.learn(1, 300, 0.5)
    assert cost.seconds(1, 300) == cost.seconds(1, 5000) == pytest.approx(0.5)
    assert cost.seconds(2, 300) > 0.5


def test_packed_sequences_count_all_positions_and_padded_ones_the_widest() -> None:
    assert ForwardCost().positions([3, 1, 9]) == 13
    widths = (1, 4, 8, 16, 32, 64)
    timer = Timer()
    cost = ForwardCost.probe(timer, widths=widths)
    assert {n for n, _ in timer.calls} <= set(widths), "only what can run is timed"
    assert cost.positions([3, 1, 9]) == 4 * 16
    assert cost.positions([1]) == 1


@pytest.mark.parametrize("seconds", [{2: 1.0}, {1: 0.0}, {1: 1.0, 2: math.nan}])
def test_unusable_times_are_refused(seconds: dict[int, float]) -> None:
    with pytest.raises(InputError, match="expected finite ones above 0"):
        ForwardCost(seconds)
