"""Measured settings of relaxed rules beside a model: defaults of the rule, copies, errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import ModelError
from ragspec.visual import ImagePipeline
from ragspec.visual.loading import FORMAT, RELAXATION
from tests.support import tiny_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_images.save(tmp_path / "images")


def write_settings(path: Path, **settings: Any) -> None:
    rules = {rule.replace("_plus", "++"): {"settings": each} for rule, each in settings.items()}
    path.write_text(json.dumps({"format": FORMAT, "rules": rules}))


def rule_of(folder: Path, rule: str, **settings: Any) -> Any:
    return ImagePipeline.from_pretrained(folder, "jacobi", rule, **settings).rule


def test_a_rule_without_settings_takes_the_measured_ones(folder: Path, tmp_path: Path) -> None:
    before = rule_of(folder, "lantern")
    write_settings(
        folder / RELAXATION, lantern={"delta": 0.37, "neighbours": 7}, lantern_plus={"lam": 3.0}
    )
    result = rule_of(folder, "lantern")
    assert (result.bound(1.0), len(result.near[0])) == (0.37, 7)
    assert before.bound(1.0) != 0.37
    assert rule_of(folder, "lantern++").bound(1.0) == 2.0
    # A setting of the caller replaces all measured ones.
    message = rule_of(folder, "lantern", neighbours=5)
    assert message.bound(1.0) == before.bound(1.0)
    assert len(message.near[0]) == 5
    assert rule_of(folder, "exact").name == "walk"
    ImagePipeline.from_pretrained(folder, None).save_pretrained(tmp_path / "copy")
    assert rule_of(tmp_path / "copy", "lantern").bound(1.0) == 0.37


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2, "rules": {}}', '{"format": 1, "rules": {"lantern": 3}}']
    + ['{"format": 1, "rules": {"lantern": {"settings": {"delta": "much"}}}}'],
)
def test_a_broken_file_is_refused(folder: Path, text: str) -> None:
    (folder / RELAXATION).write_text(text)
    with pytest.raises(ModelError, match="--tune"):
        rule_of(folder, "lantern")
    rule_of(folder, "lantern", delta=0.2)  # settings of the caller: the file is not read
