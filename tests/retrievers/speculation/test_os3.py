"""The strides of a round: more of them if they pay, one if they do not."""

import random

import pytest

from ragspec.retrievers.speculation.os3 import GLANCE, LEAST_GAIN, MOST, StridePlan, StrideSchedule


def schedule(
    stride: float, single: float, more: float, chance: float, **options: bool | None
) -> StrideSchedule:
    """Return a schedule with learned times of a stride and of searches, and a chance.

    Args:
        single, more: Milliseconds of a search with one query, and of each further query.
    """
    instance = StrideSchedule(**options)  # type: ignore[arg-type]
    for _ in range(4):
        instance.strides.append(stride)
        for queries in range(1, MOST + 1):
            instance.search.learn(queries, single + more * (queries - 1))
    instance.hits, instance.guesses = 1000.0 * chance, 1000.0
    instance.shared = 1.0
    return instance


def simulated(plan: StridePlan, stride: float, single: float, more: float, chance: float) -> float:
    """Return the strides per millisecond of 40,000 random rounds."""
    sample, selected, spent = random.Random(1), 0, 0.0
    for _ in range(40_000):
        right = 0
        while right < plan.strides and sample.random() < chance:
            right += 1
        search = single + more * (plan.strides - 1)
        selected += min(right + 1, plan.strides)
        spent += plan.strides * stride + search
        if plan.overlapped and right == plan.strides:
            spent -= min(stride, search)
    return selected / spent


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("strides", [1, 3, 8])
def test_the_rate_is_that_of_simulated_rounds(strides: int, overlapped: bool) -> None:
    plan = StridePlan(strides, overlapped)
    result = schedule(20.0, 30.0, 4.0, 0.8).rate(plan)
    assert result == pytest.approx(simulated(plan, 20.0, 30.0, 4.0, 0.8), rel=0.02)


def test_the_plan_is_the_best_of_all() -> None:
    sample = random.Random(3)
    for _ in range(300):
        stride, chance = sample.uniform(5, 50), sample.uniform(0.05, 0.97)
        single = stride * sample.choice([0.01, 0.3, 1, 5, 20])
        instance = schedule(stride, single, single * sample.choice([0.0, 0.2, 1.0]), chance)
        plans = [StridePlan(n, each) for n in range(1, MOST + 1) for each in (False, True)]
        gains = {plan: instance.rate(plan) / instance.rate(StridePlan()) for plan in plans}
        plan, best = instance.next(), max(gains.values())
        assert plan.strides == 1 if best < LEAST_GAIN else gains[plan] == best
        assert not (best < LEAST_GAIN and plan.overlapped)


def test_no_speculation_if_each_query_costs_as_much_as_the_first() -> None:
    gated = schedule(20.0, 20.0, 20.0, 0.8, overlap=False)
    plans = [gated.next() for _ in range(2 * GLANCE)]
    assert {plan.strides for plan in plans} == {1}
    assert sum(plan.guesses for plan in plans) == 2  # one guess is compared every GLANCE rounds
    assert schedule(20.0, 20.0, 0.0, 0.8, overlap=False).next().strides > 1
    gated.next()
    gated.hits, gated.search = 990.0, schedule(20.0, 20.0, 0.0, 0.8).search
    assert gated.next().strides > 1
    gated.search = schedule(20.0, 20.0, 20.0, 0.8).search
    assert not any(gated.next().guesses for _ in range(GLANCE - 1))  # the count restarts


def test_the_first_plan_before_any_timing() -> None:
    assert StrideSchedule().next() == StridePlan()
    assert StrideSchedule(fixed=1, overlap=False).next() == StridePlan(1, guesses=False)
    assert StrideSchedule(fixed=5).next() == StridePlan(5)


def test_outliers_are_ignored_and_old_guesses_fade() -> None:
    instance = schedule(10.0, 50.0, 0.0, 0.9)
    before = instance.next()
    instance.strides.append(4000.0)
    instance.search.learn(1, 9000.0)
    assert instance.next() == before
    for _ in range(200):
        instance.learn_guesses(0, True)
    assert instance.chance < 0.2
    assert instance.next().strides <= 2


def test_an_unmeasured_batch_size_is_scaled_from_the_nearest() -> None:
    instance = StrideSchedule()
    instance.search.further = 0.1
    assert instance.search.of(3) == 0.0
    instance.search.learn(1, 100.0)
    assert instance.search.of(6) == pytest.approx(150.0)
    instance.search.learn(5, 300.0)  # more than `further` says
    assert (instance.search.of(5), instance.search.of(1)) == (300.0, 100.0)
    assert instance.search.of(6) == pytest.approx(300.0 * 1.5 / 1.4)


def test_one_round_in_ten_is_not_overlapped() -> None:
    instance = schedule(20.0, 30.0, 0.0, 0.9)
    plans = [instance.next() for _ in range(40)]
    assert sum(not plan.overlapped for plan in plans) == 4
    assert len({plan.strides for plan in plans}) == 1


def test_the_share_hidden_by_an_overlap_is_learned() -> None:
    instance = schedule(20.0, 30.0, 0.0, 0.9)
    for _ in range(30):
        instance.learn_overlap(20.0, 30.0, 50.0)
    assert instance.shared < 0.01
    for _ in range(30):
        instance.learn_overlap(20.0, 30.0, 30.0)
    assert instance.shared > 0.95
    instance.learn_overlap(0.0, 30.0, 30.0)
    for both, share in ((5.0, 1.0), (900.0, 0.0)):  # shares are clamped
        for _ in range(99):
            instance.learn_overlap(20.0, 30.0, both)
        assert instance.shared == pytest.approx(share, abs=1e-6)


def test_a_batch_is_timed_alone_before_it_is_overlapped() -> None:
    instance = schedule(20.0, 30.0, 0.0, 0.9)
    selection = instance.next()
    assert selection.strides > 1 and selection.overlapped
    del instance.search.times[selection.strides]
    assert instance.next() == StridePlan(selection.strides, overlapped=False)
    instance.search.learn(selection.strides, 30.0)
    assert instance.next() == selection
