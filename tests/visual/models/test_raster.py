"""Grids of codes among the tokens of a picture."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ragspec.errors import InputError
from ragspec.visual.families.base import Family
from ragspec.visual.models.raster import Raster


def test_rows_may_end_with_tokens_that_are_no_codes() -> None:
    raster = Raster(2, 3, ends=1)
    assert (raster.line, raster.tokens, raster.codes) == (4, 8, 6)
    assert raster.places.tolist() == [0, 1, 2, 4, 5, 6]
    assert raster.grid(np.arange(8)).tolist() == [[0, 1, 2], [4, 5, 6]]
    assert [raster.codes_in(n) for n in range(9)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert raster.known([7, 8, 9, 0, 5]) == [7, 8, 9, 5]
    assert raster.laid([7, 8, 9, 5]) == [7, 8, 9, -1, 5]
    assert raster.laid([1, 2, 3, 4, 5, 6]) == [1, 2, 3, -1, 4, 5, 6, -1]


def test_a_grid_without_ends_is_its_codes() -> None:
    raster = Raster(3, 2)
    assert raster.tokens == raster.codes == 6 and raster.shape == (3, 2)
    assert raster.known(range(4)) == raster.laid(range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [0, -16, 15, 8.0, "16", True])
def test_sides_are_multiples(wrong: Any) -> None:
    family: Any = SimpleNamespace(
        codec=SimpleNamespace(reduction=16), raster=Raster(2, 3, ends=1), any_size=True
    )
    assert Family.sized(family, None, 64) == Raster(2, 4, ends=1)
    with pytest.raises(InputError, match=r"width=.* multiple of 16"):
        Family.sized(family, None, wrong)
