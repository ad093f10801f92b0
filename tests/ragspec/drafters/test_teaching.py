"""Sources that learn from every step of the target: told, timed, or left alone for a text."""

from __future__ import annotations

from dataclasses import replace

from ragspec.budget.base import Adviser
from ragspec.budget.calibration import Calibration
from ragspec.drafters.fuse import Fuse
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from tests.ragspec.drafters.test_fuse import PLACE, REQUEST, Fixed, Looking, chain


class Learner(Looking):
    """A source that has to be taught the target's best tokens."""

    top_logits = 4


class Strict(Adviser):
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
    def on_progress() -> float:
        raise AssertionError("it rests")

    first = Fixed(chain([3], "first", [0.9]), "first")
    learner = Learner(chain([4], "learner", [0.6]), on_progress, "learner")
    session = Fuse([first, learner]).open(REQUEST)
    strict = Strict("first", "learner")
    step = Step(DraftTree.empty(), (), (9,))
    for _ in range(3):
        tree = session.propose(replace(PLACE, adviser=strict), 8)
        assert tree.tokens.tolist() == [3], "only sources that learn may rest"
        session.observe(step)
    assert learner.queries == 0 and learner.reported == [] and strict.lessons == []
    assert first.reported == [step] * 3
    assert session.faults == {}
    again = Fuse([first, learner]).open(REQUEST)
    assert len(again.propose(replace(PLACE, adviser=Strict()), 8)) == 2


def test_the_time_of_teaching_is_reported_for_sources_that_learn_and_are_not_the_first() -> None:
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
