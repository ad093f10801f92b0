"""Scoring of named pictures: complete answers, right ones counted, Wilson's interval."""

import importlib

import pytest

from ragspec.errors import InputError

pytestmark = pytest.mark.usefixtures("training_path")


def test_answers_are_counted() -> None:
    module = importlib.import_module("image_recognition")
    answers = module.read_answers("0 fish\n2 -\n1 Red Heart\n", 3)
    assert answers == ["fish", "red heart", "-"]
    result = module.score(["fish", "green heart", "fish"], answers)
    assert result["right"] == 1 and result["by_name"] == {"fish": 1, "green heart": 0}


@pytest.mark.parametrize("text", ["0 fish\n", "0 fish\n1 red hart\n", ""])
def test_missing_and_other_names_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected"):
        importlib.import_module("image_recognition").read_answers(text, 2)


def test_the_interval_is_wilsons() -> None:
    interval = importlib.import_module("image_recognition").interval
    assert interval(99, 120) == pytest.approx((0.747, 0.883), abs=1e-3)
    assert interval(0, 10)[0] == 0.0 and interval(10, 10)[1] == pytest.approx(1.0)
    assert interval(0, 10)[1] == pytest.approx(0.2775, abs=1e-3)
