"""The arguments of a call: classes by number and name, seeds, features of prompts."""

from typing import Any

import numpy as np
import pytest
import torch

from ragspec.errors import InputError, ModelError
from ragspec.visual.call import ImageCall, some
from ragspec.visual.checks import class_number
from ragspec.visual.families.llamagen import padded_features
from tests.support.tiny_images import dice

NAMES = ("wall/stone", "cat", "spell/fire", "item/fire")


@pytest.mark.parametrize(
    ("inputs", "number"),
    [
        *[(0, 0), (3, 3), ("2", 2), ("cat", 1), ("CAT ", 1), ("stone", 0)],
        *[(np.int64(2), 2), (torch.tensor(2), 2), (np.array(2), 2), (" 2 ", 2)],
    ],
)
def test_a_class_is_a_whole_number_or_a_name(inputs: Any, number: int) -> None:
    assert class_number(inputs, NAMES, 4) == number
    assert [class_number(each, NAMES, 4) for each in some(inputs)] == [number]


@pytest.mark.parametrize(
    "inputs",
    [
        *[4, -1, "4", "dog", "fire", "", "--3", "1.0", "9" * 5000, 1.9, 1.0, None, [1]],
        *[True, False, np.bool_(True), torch.tensor(True)],
    ],
)
def test_missing_and_ambiguous_classes_are_refused(inputs: Any) -> None:
    with pytest.raises(InputError, match="expected"):
        class_number(inputs, NAMES, 4)
    with pytest.raises(InputError, match="has no names, expected 0 to 9"):
        class_number("cat", (), 10)


def seeds_of(generator: Any, count: int) -> list[int]:
    return ImageCall(generator=generator).seeds(count)


def test_seeds_come_from_generators_or_the_global_one_whatever_the_number() -> None:
    assert seeds_of(dice(), 5)[:2] == seeds_of(dice(), 2)
    assert seeds_of([dice(), dice()], 2) == [seeds_of(dice(), 1)[0]] * 2
    assert len(set(seeds_of(None, 20))) == 20
    with pytest.raises(InputError, match="2 generators for 3 images"):
        seeds_of([dice(), dice()], 3)
    inputs: list[Any] = [0, [0, 1], [dice(), 1], "ab", torch.tensor(3)]
    for wrong in inputs:
        with pytest.raises(InputError, match="Pass seed=0"):
            seeds_of(wrong, 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first = [seeds_of(None, 2), seeds_of(None, 2)]
        torch.manual_seed(3)
        again = [seeds_of(None, 2), seeds_of(None, 2)]
    assert first == again and first[0] != first[1]
    assert first[0] == seeds_of(dice(3), 2)


def test_features_are_padded_on_the_left() -> None:
    two, one = torch.ones(2, 3), torch.full((1, 3), 2.0)
    features, empty = padded_features([two, one], 2, 2)
    assert empty == (0, 1)
    assert torch.equal(features[1], torch.stack([torch.zeros(3), one[0]]))
    assert padded_features(two[None], 2, 1)[1] == ()
    wide: list[Any] = [[two, one[:, :2]], [torch.ones(3, 3)], [two] * 3]
    for wrong in (*wide, [two[0]], [two[:0]], [3], None):
        with pytest.raises(InputError, match="expected"):
            padded_features(wrong, 2, 1 if wrong is None else min(len(wrong), 2))
    with pytest.raises(ModelError, match="the text encoder returned features that are not finite"):
        padded_features([two * torch.nan], 2, 1)
