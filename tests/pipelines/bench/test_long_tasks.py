"""What is asked over long documents: parts, questions with their evidence, begun quotations."""

from __future__ import annotations

import pytest

from ragspec.pipelines.bench.long_tasks import CUE, QUOTATIONS, Reading, Task, cues
from ragspec.retrievers import Document

WORDS = " ".join(f"word{number}" for number in range(40))
TEXT = " ".join(f"Sentence {number} has {WORDS}." for number in range(30))


def test_cues_are_the_beginnings_of_sentences_spread_over_the_text() -> None:
    found = cues(TEXT, 5, seed=0)
    assert [len(cue.split()) for cue in found] == [CUE] * 5
    numbers = [int(cue.split()[1]) for cue in found]
    assert numbers == sorted(set(numbers)) and numbers[0] < 6 <= 22 <= numbers[-1]
    assert all(cue in TEXT for cue in found)
    assert cues(TEXT, 5, seed=0) == found != cues(TEXT, 5, seed=1)


def test_a_cue_has_enough_text_behind_it_and_stands_on_one_line() -> None:
    assert cues("Too short to be gone on with.", 3, seed=0) == []
    broken = TEXT.replace(" has word0 word1 ", " has word0\nword1 ")
    assert cues(broken, 3, seed=0) == []


@pytest.mark.parametrize(
    ("tokens", "part"), [(50, None), (100, None), (101, (1, 101)), (130, (20, 120))]
)
def test_a_part_is_read_of_what_is_too_long(tokens: int, part: tuple[int, int] | None) -> None:
    assert Reading(Document("d", "d", TEXT), 100, start=20).part(tokens) == part


def test_questions_need_their_evidence_in_what_was_read() -> None:
    tasks = tuple(Task(f"{at}", "questions", "?", evidence=at) for at in ((5, 9), (5, 31), (2, 9)))
    reading = Reading(Document("d", "d", TEXT), 100, tasks=(*tasks, Task("any", "questions", "?")))
    assert [task.id for task in reading.asked("x" * 27, 3, seed=0)] == ["(5, 9)", "any"]


def test_a_quotation_begins_its_answer_with_words_of_the_text() -> None:
    reading = Reading(Document("d", "d", TEXT), 100, kinds=(QUOTATIONS,), items=2)
    for task in reading.asked(TEXT, 0, seed=3):
        assert task.begun in task.question and task.begun in TEXT
