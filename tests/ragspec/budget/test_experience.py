"""What was learned survives JSON, and damage is refused."""

from __future__ import annotations

import json
import math
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from ragspec.budget.base import Settings
from ragspec.budget.calibration import Ratio
from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.gains import Experience, Gain
from ragspec.budget.policy import FrozenBudget
from ragspec.errors import StoreError
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
    experience.learn_step(2, 10.0)
    experience.learn_host(0.3)
    return experience


def written(experience: Experience) -> Any:
    return json.loads(json.dumps(to_plain(experience)))


def test_experience_round_trip() -> None:
    experience = experienced()
    again = from_plain(Experience, written(experience))
    assert written(again) == written(experience)
    assert again == experience
    again.learn_step(3, 11.0)
    assert again != experience


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    FrozenBudget(CostCurve.assumed(), experienced(), Settings(0.03, 0.01, 8)).save(path)
    assert FrozenBudget.load(path).experience == experienced()
    return path


def refused(path: Path, entry: Any) -> None:
    path.write_text(json.dumps(entry))
    with pytest.raises(StoreError, match=r"profile\.json.*Make it again"):
        FrozenBudget.load(path)


@pytest.mark.parametrize(
    "place",
    [
        "sha256", "format", "settings", "settings margin", "settings learns", "cost",
        "cost seconds", "experience", "experience calibration", "experience calibration tables a",
        "experience calibration tables a 5 factor", "experience draft sums", "experience drafts",
        "experience sources model gains", "experience taught learner", "experience steps",
        "experience host",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["damaged", None, math.nan, [1], -1.0, 7])
def test_a_changed_profile_is_refused(profile: Path, place: str, value: Any) -> None:
    entry = json.loads(profile.read_text())
    *above, last = place.split()
    part = reduce(getitem, above, entry)
    assert part[last] not in (None, value)
    part[last] = value
    refused(profile, entry)


@pytest.mark.parametrize("name", ["sha256", "format", "settings", "cost", "experience"])
def test_a_profile_with_a_part_too_many_or_too_few_is_refused(profile: Path, name: str) -> None:
    entry = json.loads(profile.read_text())
    refused(profile, {**entry, "more": 1})
    refused(profile, {key: part for key, part in entry.items() if key != name})


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
        experience.learn_step(tokens, 10.0)
    assert (experience.tokens, experience.time) == (2.0, 10.0)
