"""The balance of a picture's likelihood: what it bounds, what it trades, what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.acceptance.base import open_rule
from ragspec.acceptance.walk import Walk
from ragspec.errors import InputError, RuleError
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import promised
from ragspec.visual.acceptance import even as module
from ragspec.visual.acceptance.by_name import make_rule
from ragspec.visual.acceptance.even import Even
from ragspec.visual.acceptance.lantern import Lantern
from tests.ragspec.acceptance.test_walk import trees
from tests.support.codes import broken, codebook, coupled, neighbours
from tests.support.laws import Laws, LawTarget, emitted, judged

CODES = 8
TABLE = neighbours(CODES, 7)


class Drawn:
    """A text that a rule wrote over several drafts, and what every code did to its likelihood."""

    def __init__(self, rule: Any, seed: int, steps: int = 8) -> None:
        self.laws, self.noise = Laws(CODES, seed % 7), NoiseStream(seed)
        row: Any = open_rule(rule)
        self.text: list[int] = []
        self.moved: list[float] = []
        self.excess: list[float] = []
        for _ in range(steps):
            context = tuple(self.text)
            tree = coupled(2, 1, 1)(self.laws, self.noise, context)
            target = LawTarget(self.laws, tree, context, self.noise)
            verdict = row.judge(tree, target)
            nodes = [-1, *verdict.path]
            for code, node in zip(emitted(tree, verdict), nodes, strict=False):
                law, own = target.probabilities(node), target.token(node)
                self.moved.append(log(float(law[code])) - log(float(law[own])))
                self.text.append(code)
            self.excess += verdict.excess
        self.row = row


def most_owed(where: Any, band: float) -> float:
    """Return the furthest that the likelihood of any text was ever moved."""
    worst = 0.0
    for seed in range(30):
        drawn, balance = Drawn(where.Even(TABLE, band=band), seed), 0.0
        for moved in drawn.moved:
            balance += moved
            worst = max(worst, abs(balance))
        assert drawn.row.balance == pytest.approx(balance)
        assert [bool(x) for x in drawn.excess] == [bool(x) for x in drawn.moved]
    return worst


@pytest.mark.parametrize("band", [0.5, 2.0])
def test_the_likelihood_of_a_picture_stays_within_the_band(band: float) -> None:
    assert 0.2 * band < most_owed(module, band) <= band + 1e-9


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("worth < 0.0 or abs(self.balance + likelier) > self.band", "worth < 0.0"),
        ("abs(self.balance + likelier) > self.band", "self.balance + likelier > self.band"),
    ],
)
def test_a_band_that_is_not_kept_is_seen(old: str, new: str) -> None:
    assert most_owed(broken(module, old, new), 0.5) > 0.5 + 1e-3


@given(tree=trees(vocab=CODES), seed=st.integers(0, 10**6), kind=st.sampled_from(list(DraftKind)))
@settings(max_examples=60, deadline=None)
def test_without_a_band_it_is_the_walk(tree: DraftTree, seed: int, kind: DraftKind) -> None:
    laws, noise = Laws(CODES, seed % 5), NoiseStream(seed)
    tree = replace(tree, kind=kind)
    walk = judged(Walk(), tree, laws, noise)
    for rule in (Even(TABLE, band=0.0), Even(TABLE, k=0)):
        verdict = judged(rule, tree, laws, noise)
        assert (verdict.path, verdict.token, sum(verdict.excess)) == (walk.path, walk.token, 0.0)
        assert rule.label == "exact"
    assert Even(TABLE).label == Even(TABLE).open().label == "approximate"


def test_a_greedy_target_is_never_relaxed() -> None:
    laws = Laws(CODES, 1, greedy=True)
    for seed in range(20):
        tree = coupled(3, 1)(laws, NoiseStream(seed), ())
        walk = judged(Walk(), tree, laws, NoiseStream(seed))
        found = judged(Even(TABLE), tree, laws, NoiseStream(seed))
        assert (found.path, found.token) == (walk.path, walk.token)


def test_a_code_is_traded_for_what_it_saves() -> None:
    band, replaced = 3.0, 0
    for seed in range(200):
        laws, noise = Laws(CODES, seed % 7), NoiseStream(seed)
        tree = coupled(3, 2, 1)(laws, noise, ())
        target = LawTarget(laws, tree, (), noise)
        row = Even(TABLE, band=band).open()
        row.balance = balance = (-1.0, 0.0, 1.5)[seed % 3]
        verdict, gains = row.judge(tree, target), promised(tree)
        law, own = target.probabilities(-1), target.token(-1)
        price, roots = exp(-2.0 * balance / band), [n for n, p in enumerate(tree.parents) if p < 0]
        worth = {
            node: gains[node] + price * log(float(law[int(tree.tokens[node])] / law[own]))
            for node in roots
        }
        if any(int(tree.tokens[node]) == own for node in roots):
            assert verdict.excess[0] == 0.0
            continue
        fits = [
            node
            for node in roots
            if abs(balance + log(float(law[int(tree.tokens[node])] / law[own]))) <= band
        ]
        best = max(fits, key=worth.__getitem__, default=None)
        wanted = best if best is not None and worth[best] >= 0.0 else None
        assert (verdict.path[0] if verdict.path else None) == wanted
        replaced += wanted is not None
    assert replaced > 5


def test_the_more_is_owed_the_less_is_spent() -> None:
    rich = poor = 0.0
    for seed in range(150):
        laws, noise = Laws(CODES, seed % 7), NoiseStream(seed)
        tree = coupled(2, 1)(laws, noise, ())
        for balance in (-2.0, 2.0):
            row = Even(TABLE, band=4.0).open()
            row.balance = balance
            count = sum(row.judge(tree, LawTarget(laws, tree, (), noise)).excess)
            rich, poor = rich + count * (balance > 0), poor + count * (balance < 0)
    assert poor < rich


def test_pictures_stay_likelier_than_lanterns() -> None:
    even, lantern = Even(TABLE, band=1.0), Lantern(TABLE, 7, 0.9)
    kept = sum(sum(Drawn(even, seed).moved) for seed in range(20))
    lost = sum(sum(Drawn(lantern, seed).moved) for seed in range(20))
    assert abs(kept) <= 20.0 and lost < kept


@pytest.mark.parametrize("band", [-1.0, float("inf"), float("nan"), "wide", True])
def test_a_band_must_be_a_number(band: Any) -> None:
    with pytest.raises(InputError, match="band="):
        Even(TABLE, band=band)


def test_it_needs_to_know_the_code_book() -> None:
    with pytest.raises(InputError, match="make_rule"):
        Even()
    with pytest.raises(RuleError, match="code-book of 5"):
        small = Even(neighbours(5, 3))
        judged(small, DraftTree.chain([7], "any"), Laws(CODES, 0), NoiseStream(0))


def test_by_name_the_table_fits_the_book() -> None:
    rule = make_rule("even", codebook(64))
    assert isinstance(rule, Even) and (rule.relation.near(3).size, rule.band) == (11, 4.0)
    assert make_rule("even", codebook(64), band=1.5).band == 1.5  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="no delta"):
        make_rule("even", codebook(64), delta=0.2)
