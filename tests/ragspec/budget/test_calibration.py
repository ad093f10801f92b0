from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.budget.calibration import EDGES, RANKS, AcceptanceRatio, Calibration
from ragspec.trees.draft_tree import DraftTree


def chain(n: int, claim: float, source: str = "a") -> DraftTree:
    return DraftTree.chain(list(range(n)), source, accept_prob=[claim ** (i + 1) for i in range(n)])


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    claims = draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    return DraftTree.build(list(range(n)), parents, "a", accept_prob=claims)


def test_an_unknown_source_is_believed() -> None:
    tree = DraftTree.build([1, 2, 3], [-1, 0, -1], "a", accept_prob=[0.5, 0.4, 0.2])
    assert Calibration().appraise(tree).accept_prob == pytest.approx([0.5, 0.4, 0.2])


@given(trees(), st.lists(st.integers(0, 12), max_size=6), st.integers(1, 4))
def test_accept_prob_is_a_probability_and_never_grows_downwards(
    tree: DraftTree, tokens: list[int], rounds: int
) -> None:
    calibration = Calibration()
    for _ in range(rounds):
        calibration.appraise(tree).learn(tokens)
    accept_prob = calibration.appraise(tree).accept_prob
    for value, parent in zip(accept_prob, tree.parents.tolist(), strict=True):
        assert 0.0 <= value <= (accept_prob[parent] if parent >= 0 else 1.0)


def test_larger_claims_of_one_kind_stay_larger() -> None:
    low, high = (DraftTree.chain([1], "a", accept_prob=[claim]) for claim in (0.41, 0.49))
    calibration = Calibration()
    for hit in (True, False, True, True, True):
        calibration.appraise(low).learn((1,) if hit else (2,))
        pair = calibration.appraise(low).accept_prob + calibration.appraise(high).accept_prob
        assert 0.0 < pair[0] < pair[1] < 1.0


def test_a_liar_is_discounted_within_ten_steps() -> None:
    calibration, tree = Calibration(), chain(8, 1.0)
    before = math.fsum(calibration.appraise(tree).accept_prob)
    for _ in range(10):
        calibration.appraise(tree).learn((99,))
    after = math.fsum(calibration.appraise(tree).accept_prob)
    assert before == 8.0
    assert after < 0.5


def test_an_honest_drafter_is_left_alone() -> None:
    calibration, random = Calibration(), np.random.default_rng(0)
    for _ in range(500):
        hits = (random.random(6) < 0.7).tolist()
        tokens = [*range(hits.index(False) if False in hits else 6), 99]
        calibration.appraise(chain(6, 0.7)).learn(tokens)
    claimed = [0.7 ** (i + 1) for i in range(6)]
    assert calibration.appraise(chain(6, 0.7)).accept_prob == pytest.approx(claimed, abs=0.12)


def test_a_modest_drafter_is_credited() -> None:
    calibration = Calibration()
    for _ in range(60):
        calibration.appraise(chain(3, 0.3)).learn((0, 1, 2, 3))
    assert calibration.appraise(chain(3, 0.3)).accept_prob == pytest.approx([1, 1, 1], abs=0.15)


def test_sources_do_not_share_blame() -> None:
    calibration = Calibration()
    for _ in range(20):
        calibration.appraise(chain(4, 1.0, "liar")).learn((99,))
    assert calibration.appraise(chain(4, 1.0, "other")).accept_prob == [1.0] * 4


def counted(calibration: Calibration) -> list[AcceptanceRatio]:
    """Return the ratios that have an outcome."""
    return [ratio for ratio in calibration.ratios.values() if ratio.trials]


def test_only_children_of_visited_nodes_count() -> None:
    tree = DraftTree.build([1, 2, 3, 4], [-1, -1, 0, 1], "a", accept_prob=[0.5, 0.4, 0.3, 0.2])
    calibration = Calibration()
    followed = calibration.appraise(tree).learn((2, 7))
    assert followed == 1
    result = counted(calibration)
    assert [ratio.claimed for ratio in result] == pytest.approx([0.98 * 0.5 + 0.5, 0.4])
    assert [ratio.accepted for ratio in result] == [0.0, 1.0]


def test_a_text_cut_short_teaches_nothing_beyond_its_end() -> None:
    calibration = Calibration()
    calibration.appraise(chain(5, 0.9)).learn((0, 1))
    assert [ratio.trials for ratio in counted(calibration)] == pytest.approx([1.98])


def test_claims_that_are_no_probabilities_do_no_harm() -> None:
    tree = DraftTree.build(
        [1, 2, 3, 4], [-1, 0, -1, 2], "a", accept_prob=[2.0, math.nan, -1.0, 0.5]
    )
    calibration = Calibration()
    assert calibration.appraise(tree).accept_prob == [1.0, 0.0, 0.0, 0.0]
    calibration.appraise(tree).learn((1, 2))
    assert all(0.0 <= value <= 1.0 for value in calibration.appraise(tree).accept_prob)


def test_a_claim_that_is_raised_most_is_certain() -> None:
    assert AcceptanceRatio(1.0, 1.0, 0.5, 2.0).apply(0.5) == 1.0


def test_the_first_the_second_and_all_other_siblings_are_reported_separately() -> None:
    """The third and the fourth child fail alike; the first two of the same claim do not suffer."""
    tree = DraftTree.build([1, 2, 3, 4], [-1] * 4, "a", accept_prob=[0.2] * 4)
    calibration = Calibration()
    for turn in range(60):
        calibration.appraise(tree).learn((1 + turn % 2,))
    keys = [("a", rank, bisect_right(EDGES, 0.2)) for rank in range(RANKS)]
    known = calibration.ratios
    assert set(known) == set(keys)
    assert known[keys[2]].accepted == 0.0 and known[keys[2]].trials > known[keys[1]].trials
    first, second, third, fourth = calibration.appraise(tree).accept_prob
    assert third == fourth < 0.05 < 0.2 < min(first, second)
