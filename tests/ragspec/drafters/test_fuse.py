from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ragspec.budget.base import BudgetSession
from ragspec.budget.goodput import AutoBudget
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.fuse import FAULTS_ALLOWED, PATIENCE, WARM_UP, Fuse
from ragspec.errors import InputError
from ragspec.needs import LAST, Needs
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check
from tests.support.fixed import FixedDrafter, fake_clock

REQUEST = DraftRequest((1, 2), 20)
PLACE = DraftContext([1, 2], 2, 50)


class Fixed(Drafter, DraftSession):
    """Proposes a fixed tree, or the result of a callable, which may raise."""

    def __init__(
        self,
        tree: DraftTree | Callable[[], DraftTree],
        name: str = "fixed",
        kind: DraftKind = DraftKind.DETERMINISTIC,
    ) -> None:
        self.tree, self.name, self.kind = tree, name, kind
        self.queries = 0

    def open(self, request: DraftRequest) -> Fixed:
        return self

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        self.queries += 1
        return self.tree if isinstance(self.tree, DraftTree) else self.tree()


fail = Mock(side_effect=RuntimeError("no draft today"))


def chain(tokens: list[int], name: str, accept_prob: list[float]) -> DraftTree:
    return DraftTree.chain(tokens, name, accept_prob=accept_prob)


def test_the_best_nodes_of_all_sources_are_preserved() -> None:
    one = Fixed(chain([3, 4, 5], "a", [0.9, 0.8, 0.1]), "a")
    two = Fixed(chain([3, 6, 7], "b", [0.95, 0.5, 0.4]), "b")
    tree = Fuse([one, two]).open(REQUEST).propose(PLACE, 4)
    check(tree, 20)
    assert sorted(tree.tokens.tolist()) == [3, 4, 6, 7]
    names = {int(t): tree.sources[s] for t, s in zip(tree.tokens, tree.source, strict=True)}
    assert names == {3: "a", 4: "a", 6: "b", 7: "b"}
    assert tree.accept_prob[0] == np.float32(0.95)


def test_a_target_of_chains_gets_the_best_path_of_any_source() -> None:
    fork = DraftTree.build([1, 2, 3], [-1, -1, 0], "fork", accept_prob=[0.6, 0.4, 0.3])
    for claims, best in (([0.5, 0.4, 0.3], [4, 5, 6]), ([0.5, 0.2, 0.1], [1, 3])):
        sources = [Fixed(fork, "fork"), Fixed(chain([4, 5, 6], "long", claims), "long")]
        session = Fuse(sources).open(replace(REQUEST, chains=True))
        assert session.propose(PLACE, 4).tokens.tolist() == best


def test_a_single_drafter_keeps_its_kind_and_its_distribution() -> None:
    q = torch.ones(3, 20, dtype=torch.float64) / 20
    sample = DraftTree.chain([3, 4], "m", kind=DraftKind.SAMPLED, q=q)
    fuse = Fuse([Fixed(sample, "m", DraftKind.SAMPLED)])
    assert fuse.kind is DraftKind.SAMPLED
    assert fuse.open(REQUEST).propose(PLACE, 5) is sample
    assert isinstance(fuse, Drafter)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["deterministic", "deterministic"], DraftKind.DETERMINISTIC),
        (["deterministic", "coupled"], DraftKind.COUPLED),
        (["sampled", "sampled"], DraftKind.COUPLED),
    ],
)
def test_the_kind_is_that_of_the_merged_tree(kinds: list[str], expected: DraftKind) -> None:
    sources = [
        Fixed(replace(DraftTree.chain([i], "x"), kind=DraftKind(kind)), kind, DraftKind(kind))
        for i, kind in enumerate(kinds)
    ]
    fuse = Fuse(sources)
    assert fuse.kind is expected
    assert fuse.open(REQUEST).propose(PLACE, 5).kind is expected


BAD: dict[str, DraftTree | Callable[[], DraftTree]] = {
    "raises": fail,
    "token outside the vocabulary": DraftTree.chain([20], "bad"),
    "child before its parent": DraftTree.build([3, 4], [1, -1], "bad"),
    "other kind than declared": DraftTree.chain([3], "bad", kind=DraftKind.SAMPLED),
}


@pytest.mark.parametrize("what", BAD)
def test_a_failing_source_is_switched_off_and_the_others_go_on(what: str) -> None:
    bad = Fixed(BAD[what], "bad")
    session = Fuse([bad, FixedDrafter([5, 6, 7])]).open(REQUEST)
    for _ in range(FAULTS_ALLOWED - 1):
        assert session.propose(PLACE, 5).tokens.tolist() == [5, 6, 7]
    with pytest.warns(RuntimeWarning, match="'bad' is switched off"):
        session.propose(PLACE, 5)
    assert session.propose(PLACE, 5).tokens.tolist() == [5, 6, 7]
    assert bad.queries == FAULTS_ALLOWED
    assert session.faults == {"bad": FAULTS_ALLOWED}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return fake_clock(monkeypatch)


def slow(clock: list[float], seconds: float, token: int = 3, **more: Any) -> FixedDrafter:
    return FixedDrafter([token], "slow", [0.9], seconds=seconds, clock=clock, **more)


@pytest.mark.parametrize("alone", [True, False])
def test_a_source_that_stalls_is_switched_off_and_its_trees_are_used(
    alone: bool, clock: list[float]
) -> None:
    others = [] if alone else [Fixed(chain([4], "quick", [0.5]), "quick")]
    session = Fuse([slow(clock, 2 * PATIENCE), *others]).open(REQUEST)
    with pytest.warns(RuntimeWarning, match=r"'slow' is switched off.*took 1 s for one draft"):
        for _ in range(1 + FAULTS_ALLOWED):  # the first may open files or compile
            assert 3 in session.propose(PLACE, 5).tokens
    assert session.faults == {"slow": FAULTS_ALLOWED}
    assert session.propose(PLACE, 5).tokens.tolist() == [4] * len(others)
    assert clock == [1.0 + FAULTS_ALLOWED]


def test_the_first_draft_has_a_longer_time_limit(clock: list[float]) -> None:
    session = Fuse([slow(clock, 2 * WARM_UP * PATIENCE)]).open(REQUEST)
    assert session.propose(PLACE, 5).tokens.tolist() == [3]
    assert session.faults == {"slow": 1}


MODELS: dict[str, dict[str, Any]] = {
    "coupled": {"kind": DraftKind.COUPLED},
    "deterministic": {"looks_up": False},
    "head": {"needs": Needs(hidden_states=(LAST,))},
}


@pytest.mark.parametrize("model", MODELS)
def test_models_have_no_time_limit(model: str, clock: list[float]) -> None:
    session = Fuse([slow(clock, 9.0, **MODELS[model])]).open(REQUEST)
    for _ in range(FAULTS_ALLOWED + 2):
        assert session.propose(PLACE, 5).tokens.tolist() == [3]
    assert session.faults == {}


def test_the_time_limit_of_a_fusion_applies_to_each_source(clock: list[float]) -> None:
    many = Fuse([slow(clock, 0.7 * PATIENCE, token) for token in (4, 5)])
    session = Fuse([many, FixedDrafter([6])]).open(REQUEST)
    for _ in range(FAULTS_ALLOWED + 2):
        assert sorted(session.propose(PLACE, 5).tokens.tolist()) == [4, 5, 6]
    assert session.faults == {}


@pytest.mark.parametrize(
    ("opened", "message"),
    [(Mock(return_value=None), "open returned NoneType"), (fail, "no draft today")],
)
def test_a_source_that_cannot_open_is_off_at_once(opened: Any, message: str) -> None:
    shut = Fixed(fail, "shut")
    shut.open = opened  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match=f"'shut' is switched off.*{message}"):
        session = Fuse([shut, FixedDrafter([5])]).open(REQUEST)
    assert session.propose(PLACE, 5).tokens.tolist() == [5]
    assert session.faults == {"shut": 1}


def test_no_source_is_refused_and_a_failing_one_proposes_the_empty_tree() -> None:
    with pytest.raises(InputError, match="no drafter"):
        Fuse([])
    session = Fuse([Fixed(fail)]).open(REQUEST)
    assert len(session.propose(PLACE, 5)) == 0
    assert session.faults == {"fixed": 1}


def test_sources_of_one_name_are_reported_separately() -> None:
    liar, honest = chain([9], "rest", [0.9]), chain([1], "rest", [0.9])
    session = Fuse([Fixed(each, "rest") for each in (liar, honest, fail)]).open(REQUEST)
    claims = AutoBudget().open()
    with pytest.warns(RuntimeWarning, match="'rest 3' is switched off"):
        for _ in range(20):
            tree = session.propose(replace(PLACE, adviser=claims), claims.allowance(1))
            claims.observe(Step(claims.fit(tree), (), (1, 5)))
    accept_prob = dict(zip(tree.tokens.tolist(), tree.accept_prob.tolist(), strict=True))
    assert accept_prob == pytest.approx({9: 0.0, 1: 1.0}, abs=0.2)
    assert tree.sources == ("rest", "rest 2")
    assert session.faults == {"rest 3": FAULTS_ALLOWED}


def estimating(token: int, expected: Mock, name: str) -> Fixed:
    """Return a source of one token that estimates its acceptance by a mock."""
    source = Fixed(DraftTree.chain([token], name), name)
    source.expected_acceptance = expected  # type: ignore[method-assign]
    return source


class Choosy(BudgetSession):
    """Drafts from a least expected acceptance on, and records the estimates."""

    def __init__(self, least: float) -> None:
        super().__init__(8)
        self.least = least
        self.reported: list[float | None] = []

    def nodes(self, expected_acceptance: float | None, budget: int) -> int:
        self.reported.append(expected_acceptance)
        return budget if expected_acceptance is None or expected_acceptance >= self.least else 0


def test_no_source_drafts_if_the_largest_expected_acceptance_is_too_low() -> None:
    one = estimating(3, Mock(return_value=0.2), "one")
    two = estimating(4, Mock(return_value=0.6), "two")
    mute = Fixed(chain([5], "mute", [0.9]), "mute")
    session = Fuse([one, two, mute]).open(REQUEST)
    choosy = Choosy(0.7)
    assert not len(session.propose(replace(PLACE, adviser=choosy), 8))
    assert one.queries == two.queries == mute.queries == 0
    choosy.least = 0.5
    assert len(session.propose(replace(PLACE, adviser=choosy), 8)) == 3
    assert choosy.reported == [0.6, 0.6]
    assert len(Fuse([mute]).open(REQUEST).propose(replace(PLACE, adviser=choosy), 8)) == 1
    assert choosy.reported[-1] is None


def test_an_expected_acceptance_that_fails_counts_as_a_fault() -> None:
    broken = Mock(side_effect=ValueError("blind"))
    session = Fuse([estimating(3, broken, "a")]).open(REQUEST)
    with pytest.warns(RuntimeWarning, match="switched off"):
        for _ in range(FAULTS_ALLOWED):
            session.propose(replace(PLACE, adviser=Choosy(0.5)), 8)
    assert session.faults == {"a": FAULTS_ALLOWED}
