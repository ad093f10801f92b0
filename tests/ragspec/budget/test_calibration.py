import math
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.budget.calibration import EDGES, KIND_RATE, RANKS, SURE, TEXT_RATE, Calibration, Kind
from ragspec.trees.draft_tree import DraftTree


def chain(n: int, claim: float, source: str = "a") -> DraftTree:
    return DraftTree.chain(list(range(n)), source, accept_prob=[claim ** (i + 1) for i in range(n)])


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    claims = draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    return DraftTree.build(list(range(n)), parents, "a", accept_prob=claims)


def corrected(calibration: Calibration, tree: DraftTree) -> list[float]:
    accept_prob: list[float] = calibration.appraise(tree)[0].accept_prob.tolist()
    return accept_prob


def learn(calibration: Calibration, tree: DraftTree, tokens: Sequence[int]) -> int:
    return calibration.learn(*calibration.appraise(tree), tokens)


def test_claims_of_a_new_source_are_unchanged() -> None:
    tree = DraftTree.build([1, 2, 3], [-1, 0, -1], "a", accept_prob=[0.5, 0.4, 0.2])
    assert corrected(Calibration(), tree) == pytest.approx([0.5, 0.4, 0.2])


@given(trees(), st.lists(st.integers(0, 12), max_size=6), st.integers(1, 4))
def test_accept_prob_is_a_probability_and_never_grows_downwards(
    tree: DraftTree, tokens: list[int], rounds: int
) -> None:
    calibration = Calibration()
    for _ in range(rounds):
        learn(calibration, tree, tokens)
    accept_prob = corrected(calibration, tree)
    for value, parent in zip(accept_prob, tree.parents.tolist(), strict=True):
        assert 0.0 <= value <= (accept_prob[parent] if parent >= 0 else 1.0)


def test_larger_claims_of_one_kind_stay_larger() -> None:
    low, high = (DraftTree.chain([1], "a", accept_prob=[claim]) for claim in (0.41, 0.49))
    calibration = Calibration()
    for hit in (True, False, True, True, True):
        learn(calibration, low, (1,) if hit else (2,))
        pair = corrected(calibration, low) + corrected(calibration, high)
        assert 0.0 < pair[0] < pair[1] < 1.0


def test_overclaiming_is_corrected_within_ten_steps() -> None:
    calibration, tree = Calibration(), chain(8, 1.0)
    assert sum(corrected(calibration, tree)) > 7.5
    for _ in range(10):
        learn(calibration, tree, (99,))
    assert sum(corrected(calibration, tree)) < 0.5


def test_accurate_claims_stay_nearly_unchanged() -> None:
    calibration, random = Calibration(), np.random.default_rng(0)
    seen = []
    for _ in range(500):
        hits = (random.random(6) < 0.7).tolist()
        learn(calibration, chain(6, 0.7), [*range(hits.index(False) if False in hits else 6), 99])
        seen.append(corrected(calibration, chain(6, 0.7)))
    claimed = [0.7 ** (i + 1) for i in range(6)]
    assert np.mean(seen, axis=0) == pytest.approx(claimed, abs=0.05)


def test_underclaiming_is_corrected() -> None:
    calibration = Calibration()
    for _ in range(60):
        learn(calibration, chain(3, 0.3), (0, 1, 2, 3))
    assert corrected(calibration, chain(3, 0.3)) == pytest.approx([1, 1, 1], abs=0.15)


def test_a_new_text_starts_with_the_shifts_of_kinds_only() -> None:
    """A source that failed in one text has lower claims in the next, another source has not."""
    first = Calibration()
    for _ in range(20):
        learn(first, chain(4, 0.8, "liar"), (99,))
    second = Calibration(first.kinds)
    assert second.text == 0.0 > first.text
    [liar] = corrected(second, chain(1, 0.8, "liar"))
    [other] = corrected(second, chain(1, 0.8, "other"))
    assert corrected(first, chain(1, 0.8, "liar"))[0] < liar < other
    assert other == pytest.approx(0.8)


def test_a_text_corrects_claims_of_every_source() -> None:
    calibration = Calibration()
    for _ in range(5):
        learn(calibration, chain(1, 0.8, "a"), (99,))
    [other] = corrected(calibration, chain(1, 0.8, "b"))
    assert other == pytest.approx(calibration.shifted(0.8))
    assert other < 0.6


def test_only_children_of_visited_nodes_count() -> None:
    tree = DraftTree.build([1, 2, 3, 4], [-1, -1, 0, 1], "a", accept_prob=[0.5, 0.2, 0.2, 0.1])
    calibration = Calibration()
    assert learn(calibration, tree, (2, 7)) == 1
    first, second, below = 0.5, 0.2, 0.5
    rate = KIND_RATE * -first, KIND_RATE * (1 - second), KIND_RATE * -below
    bins = bisect_right(EDGES, 0.5), bisect_right(EDGES, 0.2)
    assert calibration.kinds == {
        ("a", 0, bins[0]): pytest.approx(rate[0] + rate[2]),
        ("a", 1, bins[1]): pytest.approx(rate[1]),
    }
    assert calibration.text == pytest.approx(sum(rate) / KIND_RATE * TEXT_RATE)


def test_nodes_beyond_the_emitted_tokens_teach_nothing() -> None:
    calibration, other = Calibration(), Calibration()
    learn(calibration, chain(5, 0.9), (0, 1))
    learn(other, chain(2, 0.9), (0, 1))
    assert calibration == other


def test_claims_outside_0_to_1_are_clamped() -> None:
    tree = DraftTree.build(
        [1, 2, 3, 4], [-1, 0, -1, 2], "a", accept_prob=[2.0, math.nan, -1.0, 0.5]
    )
    calibration = Calibration()
    expected = [SURE, SURE * (1 - SURE), 1 - SURE, (1 - SURE) ** 2]
    assert corrected(calibration, tree) == pytest.approx(expected)
    learn(calibration, tree, (1, 2))
    assert all(0.0 <= value <= 1.0 for value in corrected(calibration, tree))


def test_the_first_the_second_and_all_other_siblings_are_corrected_separately() -> None:
    """The third and fourth child fail; the first two, of the same claim, are not corrected."""
    tree = DraftTree.build([1, 2, 3, 4], [-1] * 4, "a", accept_prob=[0.2] * 4)
    kinds: dict[Kind, float] = {}
    for turn in range(120):
        learn(Calibration(kinds), tree, (1 + turn % 2,))
    assert set(kinds) == {("a", rank, bisect_right(EDGES, 0.2)) for rank in range(RANKS)}
    first, second, third, fourth = corrected(Calibration(kinds), tree)
    assert third == fourth < 0.05 < 0.2 < min(first, second)
