from __future__ import annotations

import json
import math
import random

import pytest

from ragspec.budget.experience import Experience
from ragspec.budget.gains import BUCKETS, DOUBT, FADING, DraftCost, Rate, SourceWorth


def test_draft_cost_finds_the_line() -> None:
    cost = DraftCost()
    for i in range(60):
        nodes = (4, 8, 16)[i % 3]
        cost.learn(nodes, 0.5 + 0.2 * nodes)
    call, node = cost.line()
    assert call == pytest.approx(0.5, abs=0.1)
    assert node == pytest.approx(0.2, abs=0.01)
    assert cost.of(8) == pytest.approx(2.1, rel=0.05)


def test_draft_cost_of_one_size_is_all_per_call() -> None:
    cost = DraftCost()
    for _ in range(10):
        cost.learn(8, 2.0)
    call, node = cost.line()
    assert call == pytest.approx(2.0)
    assert node == 0.0


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


def test_few_times_at_sizes_that_hardly_differ_make_no_slope() -> None:
    cost = DraftCost()
    for nodes, milliseconds in ((8, 5.0), (6, 3.0), (8, 5.0)):
        cost.learn(nodes, milliseconds)
    assert cost.line()[1] < 0.2


def test_nothing_is_known_at_first() -> None:
    assert DraftCost().of(64) == 0.0
    assert Rate().value == 0.0


def test_asking_for_more_stops_where_drafting_it_costs_more_than_it_brings() -> None:
    free, dear = Experience(), Experience()
    for _ in range(30):
        for nodes in (4, 8):
            dear.draft.learn(nodes, 2.0 * nodes)
    for _ in range(12):
        free.choose_asked(0.1, len(BUCKETS) - 1)
        dear.choose_asked(0.1, len(BUCKETS) - 1)
    assert BUCKETS[free.asked] == 64
    assert BUCKETS[dear.asked] == 8
    free.choose_asked(0.1, 3)
    assert BUCKETS[free.asked] == 3


def test_asking_grows_one_bucket_at_a_time() -> None:
    experience = Experience()
    before = experience.asked
    experience.choose_asked(0.1, len(BUCKETS) - 1)
    assert experience.asked == before + 1


def test_worth_falls_where_larger_trees_add_nothing_and_rises_at_the_edge() -> None:
    experience = Experience()
    for _ in range(60):
        experience.learn_worth([-1.0, -0.5, -0.4, -0.6, -0.8], 2)
    assert experience.worth[1] == pytest.approx(0.5, abs=0.01)
    assert experience.worth[2] == pytest.approx(0.1, abs=0.01)
    assert experience.worth[4] < 0.01
    for _ in range(60):
        experience.learn_worth([-1.0, 0.0, 1.0, 2.0, 3.0], 4)
    assert experience.worth[5] >= 0.49


def test_experience_round_trip() -> None:
    experience = Experience()
    experience.draft.learn(8, 1.0)
    experience.overall.learn(2, 10.0, 0.1)
    experience.learn_host(0.3)
    entry = json.loads(json.dumps(experience.to_dict()))
    assert Experience.from_dict(entry) == experience


@pytest.mark.parametrize("name", ["calibration", "draft", "overall", "worth", "host"])
def test_a_damaged_entry_is_refused(name: str) -> None:
    entry = Experience().to_dict()
    with pytest.raises((ValueError, TypeError, KeyError)):
        Experience.from_dict({**entry, name: "damaged"})
    del entry[name]
    with pytest.raises(KeyError):
        Experience.from_dict(entry)


@pytest.mark.parametrize(
    "sums", [[1, 1, 0, 0, 0], [1, 1, 1, 1, math.nan], [-1, 1, 1, 1, 1], [1, 2, 3], ["x"] * 5, None]
)
def test_sums_that_no_times_add_up_to_are_refused(sums: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        DraftCost.from_list(sums)
    cost = DraftCost()
    for nodes in (8, 8, 4, 64, 8):
        cost.learn(nodes, 1.0)
        assert DraftCost.from_list(cost.sums) == cost


def asked(share: float, gain: float, price: float, steps: int = 2000) -> float:
    """How often a source is asked that brings `gain` in a share of the steps, without pauses."""
    worth, chance, times = SourceWorth(), random.Random(0), 0
    for _ in range(steps):
        if worth.unknown(2) or worth.pays(2, price, 11.0, True):
            times += 1
            worth.learn(2, gain if chance.random() < share else 0.0)
    return times / steps


def test_a_source_of_uneven_gains_is_not_dropped_for_some_misses() -> None:
    assert asked(0.35, 1.0, 0.2) > 0.5
    assert asked(0.1, 1.0, 0.2) < 0.05
    assert asked(0.0, 1.0, 0.2) < 0.03


def test_what_a_source_may_bring_is_its_mean_and_a_share_of_its_error() -> None:
    worth = SourceWorth()
    for gain in (0.0, 2.0, 0.0, 2.0):
        worth.learn(1, gain)
    assert worth.hoped(1) == pytest.approx(1.0 + DOUBT * math.sqrt(1.0 / 4))
    for _ in range(400):
        worth.learn(1, 0.0)
        worth.learn(1, 2.0)
    assert worth.gains[1] == pytest.approx(1.0, abs=2 * FADING)
    error = math.sqrt(FADING / (2 - FADING))
    assert worth.hoped(1) == pytest.approx(worth.gains[1] + DOUBT * error, rel=0.01)
    assert worth.hoped(0) == 0.0
    entry = json.loads(json.dumps(worth.to_dict()))
    assert SourceWorth.from_dict(entry).hoped(1) == worth.hoped(1)
