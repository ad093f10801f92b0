"""Costs of drafts as lines, and gains as doubted means."""

from __future__ import annotations

import math
import random

import pytest

from ragspec.budget.gains import (
    BUCKETS,
    DOUBT,
    EXPECTED,
    FADING,
    PAUSE,
    DraftCost,
    Experience,
    Gain,
    SizedGain,
)

LARGEST = len(BUCKETS) - 1


def test_draft_cost_finds_the_line() -> None:
    cost = DraftCost()
    for i in range(60):
        nodes = (4, 8, 16)[i % 3]
        cost.learn(nodes, 0.5 + 0.2 * nodes)
    assert cost.call == pytest.approx(0.5, abs=0.1)
    assert cost.node == pytest.approx(0.2, abs=0.01)
    assert cost.of(8) == pytest.approx(2.1, rel=0.05)


def test_half_of_the_cost_goes_with_the_nodes_until_sizes_have_varied() -> None:
    cost = DraftCost()
    for _ in range(10):
        cost.learn(8, 2.0)
    assert (cost.call, cost.node) == pytest.approx((1.0, 0.125))
    for i in range(30):
        cost.learn((8, 2)[i % 2], 2.0)
    assert cost.node < 0.04
    assert cost.of(4) == pytest.approx(2.0, rel=0.05)


def test_draft_cost_is_not_moved_far_by_an_outlier() -> None:
    cost = DraftCost()
    for _ in range(20):
        cost.learn(8, 1.0)
    cost.learn(8, 1000.0)
    assert cost.of(8) < 1.2


def test_a_first_time_that_was_an_outlier_does_not_stay() -> None:
    cost = DraftCost()
    for milliseconds in (40.0, 4.0, 4.0):
        cost.learn(8, milliseconds)
    assert cost.of(8) < 10.0
    steady = DraftCost()
    for i in range(20):
        steady.learn(8, (3.0, 6.0)[i % 2])  # nothing unusual: all count
    assert steady.of(8) == pytest.approx(4.5, rel=0.05)


def test_a_cost_follows_from_its_sums() -> None:
    cost = DraftCost()
    assert cost.of(64) == 0.0
    for nodes in (8, 8, 4, 64, 8):
        cost.learn(nodes, 1.0)
        assert DraftCost(cost.sums) == cost


def tried(share: float, tokens: float, price: float, steps: int = 2000) -> float:
    """How often something is tried that brings `tokens` in a share of the steps."""
    gain, chance, times = Gain(), random.Random(0), 0
    for _ in range(steps):
        if not gain.known or gain.mean + gain.doubt > price or gain.due(price, 0.02):
            times += 1
            gain.learn(tokens if chance.random() < share else 0.0)
    return times / steps


def test_uneven_gains_are_not_dropped_for_some_misses() -> None:
    assert tried(0.35, 1.0, 0.2) > 0.5
    assert tried(0.1, 1.0, 0.2) < 0.12
    assert tried(0.0, 1.0, 0.2) < 0.06


def test_doubt_is_a_share_of_the_error_of_the_mean() -> None:
    gain = Gain()
    for tokens in (0.0, 2.0, 0.0, 2.0):
        gain.learn(tokens)
    assert (gain.mean, gain.doubt) == pytest.approx((1.0, DOUBT * math.sqrt(1.0 / 4)))
    for _ in range(400):
        gain.learn(0.0)
        gain.learn(2.0)
    assert gain.mean == pytest.approx(1.0, abs=2 * FADING)
    assert gain.doubt == pytest.approx(DOUBT * math.sqrt(FADING / (2 - FADING)), rel=0.01)


@pytest.mark.parametrize(("price", "share"), [(0.1, 0.01), (1.0, 0.02), (0.004, 0.01)])
def test_trials_cost_their_share_of_the_time(price: float, share: float) -> None:
    gain = Gain()
    times = sum(gain.due(price, share) for _ in range(5000))
    assert times == pytest.approx(min(5000, 5000 * share / (PAUSE * price)), rel=0.1)
    assert not any(gain.due(price, 0.0) for _ in range(5000)), "without a share there are none"


def line(call: float, node: float) -> DraftCost:
    cost = DraftCost()
    for i in range(80):
        cost.learn((2, 8, 32)[i % 3], call + node * (2, 8, 32)[i % 3])
    return cost


def test_as_much_is_requested_as_pays_for_its_drafting() -> None:
    gain = SizedGain()
    for _ in range(100):
        gain.learn_sizes([0.0, 0.8, 1.4, 1.9, 2.3, 2.9, 3.2], 6)
    sizes = [BUCKETS[gain.best(line(0.1, node), 0.2, 6)[0]] for node in (0.01, 0.5, 1.3, 9.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (11, 1)
    _, cheap = gain.best(line(0.1, 0.01), 0.2, 6)
    _, dear = gain.best(line(20.0, 0.01), 0.2, 6)
    assert cheap > 2.5 > 0.0 > dear


def test_a_cold_start_asks_for_a_sensible_size_where_cost_allows() -> None:
    assert BUCKETS[SizedGain().best(line(0.05, 0.005), 0.2, LARGEST)[0]] >= 11
    assert 2 <= BUCKETS[SizedGain().best(line(0.1, 0.5), 0.2, LARGEST)[0]] <= 5


def test_gains_of_sizes_fall_where_they_add_nothing_and_rise_at_the_edge() -> None:
    gain = SizedGain()
    for _ in range(100):
        gain.learn_sizes([-1.0, -0.5, -0.4, -0.6, -0.8], 2)
    assert gain.added[1:5] == pytest.approx([0.5, 0.1, 0.0, 0.0], abs=0.01)
    assert gain.added[5:] == list(EXPECTED[5:]), "what was not asked for is not known"
    assert gain.mean == pytest.approx(0.6)
    for _ in range(60):
        gain.learn_sizes([-1.0, 0.0, 1.0, 2.0, 3.0], 4)
    assert gain.added[5] == pytest.approx(0.5 * gain.added[4])
    assert gain.added[4] > 0.6


def test_the_host_s_time_is_clipped_and_the_first_steps_weigh_as_in_a_mean() -> None:
    experience = Experience()
    for milliseconds in (0.3, 0.3, 300.0):
        experience.learn_host(milliseconds)
    assert experience.host < 0.4
    for tokens in (1, 3):
        experience.learn_step(tokens, 10.0)
    assert (experience.tokens, experience.time) == (2.0, 10.0)
