"""Products with vectors in bytes: how far they are off at most, and that no sum overflows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragspec.retrievers.search.rounded_numba import BYTE, SHORT, Rounded, scan


@pytest.mark.parametrize("width", [1, 24, 700])
@pytest.mark.parametrize("length", [0.0, 1e-4, 1.0, 300.0])
def test_products_are_off_by_no_more_than_is_said(width: int, length: float) -> None:
    drawn = torch.Generator().manual_seed(width)
    vectors = length * torch.randn(203, width, generator=drawn) ** 3
    rounded = Rounded(torch.split(vectors, 50), len(vectors), width)
    for scale in (0.0, 1e-3, 40.0):
        query = scale * torch.randn(width, generator=drawn) ** 3
        found, error = rounded.products(query)
        off = (found.double() - vectors.double() @ query.double()).abs()
        assert found.shape == (203,)
        assert float(off.max()) <= error
        whole = float(query.norm()) * float(vectors.norm(dim=1).max())
        assert error <= 0.1 * whole * max(1.0, width**0.5 / 10.0)  # and it says something


@pytest.mark.parametrize("width", [24, 600, 2000])
def test_the_largest_sums_are_right(width: int) -> None:
    vectors = torch.ones(5, width) * torch.tensor([1.0, -1.0, 2.0, 0.5, 3.0])[:, None]
    found, _ = Rounded([vectors], 5, width).products(torch.full((width,), 7.0))
    assert found.tolist() == pytest.approx([7.0 * width * x for x in (1, -1, 2, 0.5, 3)], rel=1e-6)


def test_sums_are_those_of_whole_numbers() -> None:
    drawn = np.random.default_rng(1)
    whole = drawn.integers(-BYTE, BYTE + 1, (8, 33)).astype(np.int8)
    query = drawn.integers(-SHORT, SHORT + 1, 33).astype(np.int16)
    factors, out = drawn.random(8).astype(np.float32), np.empty(8, np.float32)
    scan(whole, factors, query, 2.0, out)
    sums = whole.astype(np.int64) @ query.astype(np.int64)
    assert out == pytest.approx(sums * factors.astype(np.float64) * 2.0, rel=1e-6)
