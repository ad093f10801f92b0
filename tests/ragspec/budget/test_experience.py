"""What was learned survives JSON, and damage is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ragspec.budget.calibration import Ratio
from ragspec.budget.gains import Experience, Gain
from ragspec.storage.plain import from_plain, to_plain
from ragspec.trees.draft_tree import DraftTree


def experienced() -> Experience:
    experience = Experience()
    calibration = experience.calibration
    for i in range(25):
        tree = DraftTree.chain([1, 2, 3], "a", reach=[0.9, 0.8, 0.7])
        calibration.learn(calibration.appraise(tree, 5), (1, 2, 9) if i % 3 else (9,))
    for nodes in (8, 4, 8):
        experience.draft.learn(nodes, 0.1 * nodes)
        experience.source("model").cost.learn(nodes, 1.0)
    experience.source("model").gains[2].learn(1.5)
    experience.drafts[3].learn_sizes([0.0, 0.5, 0.8], 2)
    experience.taught["learner"] = Gain(-0.2, 0.3, 120)
    experience.learn_step(2, 10.0, 0.1)
    experience.learn_host(0.3)
    return experience


def written(experience: Experience) -> Any:
    return json.loads(json.dumps(to_plain(experience)))


def test_experience_round_trip() -> None:
    experience = experienced()
    again = from_plain(Experience, written(experience))
    assert written(again) == written(experience)
    assert again == experience
    again.learn_step(3, 11.0, 0.1)
    assert again != experience


def damaged(*path: Any, value: Any) -> Any:
    """Return an entry in which the number at the end of `path` is another one."""
    entry = written(experienced())
    place = entry
    for key in path[:-1]:
        place = place[key]
    assert place[path[-1]] is not None
    place[path[-1]] = value
    return entry


@pytest.mark.parametrize(
    "path",
    [
        ("calibration",), ("calibration", "tables", "a"), ("draft", "sums"), ("drafts",),
        ("drafts", 0), ("drafts", 0, "added"), ("sources", "model"), ("taught", "learner"),
        ("steps",), ("host",),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["damaged", None, math.nan, [1]])
def test_a_damaged_entry_is_refused(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        from_plain(Experience, damaged(*path, value=value))


@pytest.mark.parametrize("change", [{"steps": 3, "more": 1}, {"steps": 3}])
def test_a_field_too_many_or_too_few_is_refused(change: dict[str, int]) -> None:
    entry = written(experienced())
    with pytest.raises(ValueError, match="expected"):
        from_plain(Experience, {**entry, **change} if "more" in change else change)


def test_numbers_that_cannot_have_been_learned_are_refused() -> None:
    ratio = next(iter(written(experienced())["calibration"]["tables"]["a"]))
    for name, value in (("trials", -1.0), ("claimed", math.inf), ("factor", 9.0), ("factor", -1.0)):
        entry = damaged("calibration", "tables", "a", ratio, name, value=value)
        with pytest.raises(ValueError):
            from_plain(Experience, entry)
    for path in (("drafts",), ("sources", "model", "gains")):
        gains = written(experienced())
        for key in path:
            gains = gains[key]
        with pytest.raises(ValueError, match="outlooks"):
            from_plain(Experience, damaged(*path, value=gains[1:]))
    with pytest.raises(ValueError, match="cost"):
        from_plain(Experience, damaged("draft", "sums", 0, value=-1.0))


def test_another_thread_may_bring_a_new_source_while_it_is_written() -> None:
    experience = experienced()

    class Meddled(dict[int, Ratio]):
        def items(self) -> Any:
            experience.calibration.tables.setdefault(f"new {len(self)}", {})
            return super().items()

    experience.calibration.tables |= {"b": Meddled(), "c": Meddled()}
    assert set(to_plain(experience)["calibration"]["tables"]) == {"a", "b", "c"}
    assert "new 0" in experience.calibration.tables


def test_the_host_s_time_is_clipped_and_the_first_steps_weigh_as_in_a_mean() -> None:
    experience = Experience()
    for milliseconds in (0.3, 0.3, 300.0):
        experience.learn_host(milliseconds)
    assert experience.host < 0.4
    for tokens in (1, 3):
        experience.learn_step(tokens, 10.0, 0.05)
    assert (experience.tokens, experience.time) == (2.0, 10.0)
