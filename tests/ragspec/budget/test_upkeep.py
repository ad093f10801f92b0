from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from ragspec.acceptance.base import Step
from ragspec.budget.calibration import Calibration
from ragspec.budget.experience import Experience
from ragspec.budget.gains import ENOUGH, TRIED, Upkeep
from ragspec.budget.source_choice import Claims
from ragspec.drafters.fuse import Fuse
from ragspec.trees.draft_tree import DraftTree
from tests.ragspec.drafters.test_fuse import PLACE, REQUEST, Fixed, Looking, chain


def kept(steps: int, brought: float, spent: float) -> Upkeep:
    """Return the accounts of a source after so many steps of the same kind."""
    books = Upkeep()
    for _ in range(steps):
        books.step()
        books.brought += brought
        books.spent += spent
    return books


def test_a_source_rests_once_it_is_known_to_cost_more_than_it_brings() -> None:
    assert not kept(ENOUGH - 1, 0.0, 0.05).rests(tries=True), "too little is known"
    assert kept(ENOUGH, 0.0, 0.05).rests(tries=True)
    assert not kept(ENOUGH, 0.06, 0.05).rests(tries=True), "it pays"


def test_some_texts_try_a_source_that_rests() -> None:
    books = kept(ENOUGH, 0.0, 0.05)
    rested = [books.rests(tries=True) for _ in range(3 * TRIED)]
    assert rested == ([True] * (TRIED - 1) + [False]) * 3
    assert all(books.rests(tries=False) for _ in range(3 * TRIED))


def test_what_a_source_brings_lately_counts_most() -> None:
    books = kept(2000, 0.0, 0.05)
    for _ in range(400):
        books.step()
        books.brought += 0.15
        books.spent += 0.05
    assert not books.rests(tries=False)
    assert books.spent < 0.05 * 400, "the accounts are bounded"


def test_accounts_survive_json_and_damage_is_refused() -> None:
    books = kept(120, 0.01, 0.02)
    again = Upkeep.from_dict(json.loads(json.dumps(books.to_dict())))
    assert again == books
    for entry in (
        {"brought": math.nan, "spent": 0.0, "steps": 1},
        {"brought": 0.0, "spent": math.inf, "steps": 1},
        {"brought": 0.0, "spent": 0.0, "steps": -1},
    ):
        with pytest.raises(ValueError):
            Upkeep.from_dict(entry)
    with pytest.raises(KeyError):
        Upkeep.from_dict({"brought": 0.0})
    experience = Experience(upkeep={"recycling": books})
    assert Experience.from_dict(experience.to_dict()).upkeep == {"recycling": books}


class Learner(Looking):
    """A source that has to be taught the target's best tokens."""

    top_logits = 4


class Strict(Claims):
    """Lets sources rest by name, and keeps which ones were taught."""

    def __init__(self, *resting: str) -> None:
        super().__init__(Calibration())
        self.resting = resting
        self.lessons: list[str] = []

    def rests(self, source: str) -> bool:
        return source in self.resting

    def taught(self, source: str, milliseconds: float) -> None:
        assert milliseconds >= 0.0
        self.lessons.append(source)


def test_a_source_that_rests_is_left_alone_for_the_text_and_no_fault_of_it() -> None:
    def told() -> float:
        raise AssertionError("it rests")

    first = Fixed(chain([3], "first", [0.9]), "first")
    learner = Learner(chain([4], "learner", [0.6]), told, "learner")
    session = Fuse([first, learner]).open(REQUEST)
    strict = Strict("first", "learner")
    step = Step(DraftTree.empty(), (), (9,))
    for _ in range(3):
        tree = session.propose(replace(PLACE, adviser=strict), 8)
        assert tree.tokens.tolist() == [3], "only sources that learn may rest"
        session.observe(step)
    assert learner.asked == 0 and learner.told == [] and strict.lessons == []
    assert first.told == [step] * 3
    assert session.faults == {}
    again = Fuse([first, learner]).open(REQUEST)
    assert len(again.propose(replace(PLACE, adviser=Strict()), 8)) == 2


def test_the_time_of_teaching_is_told_for_sources_that_learn_and_are_not_the_first() -> None:
    first = Learner(chain([3], "first", [0.9]), lambda: 0.9, "first")
    learner = Learner(chain([4], "learner", [0.6]), lambda: 0.6, "learner")
    mute = Fixed(chain([5], "mute", [0.5]), "mute")
    session = Fuse([first, learner, mute]).open(REQUEST)
    strict = Strict("first")
    session.observe(Step(DraftTree.empty(), (), (9,)))
    assert strict.lessons == [], "nobody is there to be told"
    assert len(session.propose(replace(PLACE, adviser=strict), 8)) == 3
    session.observe(Step(DraftTree.empty(), (), (9,)))
    assert strict.lessons == ["learner"]
