"""The options of look-ups; the look-ups themselves are tested in test_segment and test_kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ragspec.errors import InputError
from ragspec.retrievers.continuations import DraftOptions


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"rows": 10**6},
        {"max_depth": -1},
        {"contexts": 0},
        {"shorter": (2, 2)},
        {"shorter": (3, 0)},
        {"followed": (2.0,)},
        {"followed_after_miss": ()},
    ],
)
def test_options_check_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        DraftOptions(**wrong)


def test_chances_multiply_along_the_path_and_the_last_entry_holds_on() -> None:
    options = DraftOptions(
        max_match=3, max_depth=3, followed=(0.0, 0.5, 0.75), followed_after_miss=(0.0, 0.25)
    )
    expected = np.array([0.5, 0.5 * 0.75, 0.5 * 0.75 * 0.75])
    np.testing.assert_allclose(options.chances[0, 1], expected)
    np.testing.assert_allclose(options.chances[1, 1], expected / 2)  # 0.25 at first, not 0.5
    np.testing.assert_allclose(options.chances[0, 3], 0.75 ** np.arange(1, 4))
    assert options.chances.shape == (2, 4, 3)


def test_nothing_to_fall_back_on_is_allowed() -> None:
    assert DraftOptions(shorter=()).lengths.tolist() == []
