from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.errors import InputError
from ragspec.retrievers.methods.cascade import Cascade, Named, fill
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check, overlay
from tests.support.fixed import BrokenDrafter, FixedDrafter
from tests.support.identities import BATCHES, SAMPLINGS, check_identity

REQUEST = DraftRequest((1, 2), 100)
PLACE = DraftContext([1, 2], 2, 50)


def names(tree: DraftTree) -> dict[int, str]:
    check(tree, 100)
    return {int(t): tree.sources[s] for t, s in zip(tree.tokens, tree.source, strict=True)}


def wide(tokens: range, name: str, accept_prob: float) -> FixedDrafter:
    """Many siblings of one reach."""
    return FixedDrafter(list(tokens), name, accept_prob=[accept_prob] * len(tokens), siblings=True)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("settings", SAMPLINGS)
def test_the_text_stays_as_it_is(settings: str, batch: int) -> None:
    cascade = Cascade([ContextDrafter(), BrokenDrafter(), NeighbourDrafter()])
    with pytest.warns(RuntimeWarning, match="broken"):
        check_identity(cascade, settings, batch)


def test_the_first_source_fills_first() -> None:
    cascade = Cascade([wide(range(10, 16), "a", 0.3), wide(range(20, 26), "b", 0.9)], reserve=0.0)
    tree = cascade.open(REQUEST).propose(PLACE, 8)
    assert sorted(names(tree)) == [10, 11, 12, 13, 14, 15, 20, 21]


def test_a_full_source_starves_no_other() -> None:
    sources = [wide(range(10, 40), "a", 0.9), wide(range(40, 60), "b", 0.2)]
    sources.append(wide(range(60, 80), "c", 0.2))
    tree = Cascade(sources).open(REQUEST).propose(PLACE, 10)
    result = list(names(tree).values())
    assert [result.count(name) for name in "abc"] == [6, 2, 2]


def test_what_nobody_is_sure_of_is_taken_by_accept_prob() -> None:
    unsure, little = wide(range(10, 30), "a", 0.01), wide(range(30, 40), "b", 0.05)
    tree = Cascade([unsure, little]).open(REQUEST).propose(PLACE, 12)
    result = list(names(tree).values())
    assert [result.count(name) for name in "ab"] == [2, 10]


def test_places_that_a_source_leaves_free_are_filled_by_the_others() -> None:
    cascade = Cascade([wide(range(10, 30), "a", 0.9), FixedDrafter([1], "b", accept_prob=[0.9])])
    result = list(names(cascade.open(REQUEST).propose(PLACE, 10)).values())
    assert [result.count(name) for name in "ab"] == [9, 1]


def test_shared_beginnings_are_counted_once() -> None:
    one = FixedDrafter([5, 6, 7], "a", accept_prob=[0.9, 0.8, 0.7])
    two = FixedDrafter([5, 6, 8], "b", accept_prob=[0.9, 0.8, 0.7])
    tree = Cascade([one, two]).open(REQUEST).propose(PLACE, 4)
    assert names(tree) == {5: "a", 6: "a", 7: "a", 8: "b"}


def test_all_sources_are_reported() -> None:
    one, two = FixedDrafter([5], "a"), FixedDrafter([6], "b")
    session = Cascade([one, two]).open(REQUEST)
    step = Step(session.propose(PLACE, 4), (), (9,))
    session.observe(step)
    assert one.heard == two.heard == [step]


def test_a_failing_source_is_counted_and_left_out() -> None:
    session = Cascade([BrokenDrafter(), FixedDrafter([5], "a")]).open(REQUEST)
    with pytest.warns(RuntimeWarning, match="broken"):
        trees = [session.propose(PLACE, 4) for _ in range(4)]
    assert all(tree.tokens.tolist() == [5] for tree in trees)
    assert session.faults == {"broken": 3}


def test_nothing_is_drafted_where_there_is_nothing() -> None:
    session = Cascade([FixedDrafter([], "a")]).open(REQUEST)
    assert len(session.propose(PLACE, 4)) == 0
    assert len(Cascade([FixedDrafter([5])]).open(REQUEST).propose(PLACE, 0)) == 0


def test_it_is_a_drafter_of_the_kind_of_its_parts() -> None:
    plain, coupled = FixedDrafter([1]), FixedDrafter([2], kind=DraftKind.COUPLED)
    assert Cascade([plain]).kind is DraftKind.DETERMINISTIC
    both = Cascade([plain, coupled, NeighbourDrafter(k=5)])
    assert isinstance(both, Drafter)
    assert both.kind is DraftKind.COUPLED
    assert both.top_logits == 5
    assert both.open(REQUEST).propose(PLACE, 4).kind is DraftKind.COUPLED


def test_a_name_replaces_those_of_the_parts() -> None:
    named = Named(FixedDrafter([5, 6], "a"), "other")
    session = named.open(REQUEST)
    assert session.propose(PLACE, 4).sources == ("other",)
    assert isinstance(named, Drafter)
    step = Step(DraftTree.empty(), (), (5,))
    session.observe(step)
    assert named.drafter.heard == [step]  # type: ignore[attr-defined]


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="0 drafters"):
        Cascade([])
    with pytest.raises(InputError, match="reserve"):
        Cascade([FixedDrafter([1])] * 3, reserve=0.5)


@st.composite
def drafts(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(1, 8))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    accept_prob: list[float] = []
    for parent in parents:
        accept_prob.append(draw(st.floats(0, 1)) * (1.0 if parent < 0 else accept_prob[parent]))
    tokens = draw(st.permutations(range(10)))[:n]
    return DraftTree.build(tokens, parents, "test", accept_prob=accept_prob)


@given(st.lists(drafts(), min_size=1, max_size=3), st.integers(1, 12), st.floats(0, 0.3))
def test_the_budget_is_filled_with_whole_paths(
    trees: list[DraftTree], budget: int, reserve: float
) -> None:
    merged, offers = overlay([(tree, 1 << i) for i, tree in enumerate(trees)])
    chosen = fill(merged, offers, len(trees), budget, int(reserve * budget), 0.1)
    assert len(chosen) == min(budget, len(merged))
    assert all(merged.parents[node] in {-1, *chosen} for node in chosen)
