"""Products with vectors in bytes: how far they are off at most, and that no sum overflows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba", exc_type=ImportError)

from ragspec.retrievers.search import rounded_numba
from ragspec.retrievers.search.rounded_numba import BYTE, SHORT, Rounded, scan


@pytest.mark.parametrize("width", [1, 24, 701])
@pytest.mark.parametrize("length", [0.0, 1e-4, 1.0, 300.0])
def test_products_are_off_by_no_more_than_is_said(width: int, length: float) -> None:
    drawn = torch.Generator().manual_seed(width)
    vectors = length * torch.randn(203, width, generator=drawn) ** 3
    rounded = Rounded(torch.split(vectors, 50), len(vectors), width)
    queries = torch.tensor([0.0, 1e-3, 40.0, 1.0, 7.0, 2.0])[:, None]
    queries = queries * torch.randn(6, width, generator=drawn) ** 3
    for count in (1, 2, 4, 5, 6):
        found, errors = rounded.products(queries[:count])
        off = (found.double() - queries[:count].double() @ vectors.double().T).abs()
        assert found.shape == (count, 203)
        for query, most, error in zip(queries, off.amax(1).tolist(), errors, strict=False):
            assert most <= error
            whole = float(query.norm()) * float(vectors.norm(dim=1).max())
            assert error <= 0.1 * whole * max(1.0, width**0.5 / 10.0)  # and it says something


@pytest.mark.parametrize("width", [24, 600, 2000])
def test_the_largest_sums_are_right(width: int) -> None:
    signs = torch.tensor([1.0, -1.0, 2.0, 0.5, 3.0])
    rounded = Rounded([torch.ones(5, width) * signs[:, None]], 5, width)
    found, _ = rounded.products(torch.full((3, width), 7.0))
    for row in found:
        assert row.tolist() == pytest.approx((7.0 * width * signs).tolist(), rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_are_those_of_whole_numbers(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_numba, "LEAST_GROUPS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    drawn = np.random.default_rng(1)
    pairs = drawn.integers(-BYTE, BYTE + 1, (7, 17, 16, 2)).astype(np.int8)
    queries = drawn.integers(-SHORT, SHORT + 1, (7, 34)).astype(np.int16)
    factors, scales = (drawn.random(size).astype(np.float32) for size in ((7, 16), 7))
    vectors = pairs.transpose(0, 2, 1, 3).reshape(7 * 16, 34).astype(np.int64)
    sums = queries.astype(np.int64) @ vectors.T
    expected = sums * factors.astype(np.float64).ravel() * scales.astype(np.float64)[:, None]
    for count in range(1, 8):  # lone ones, groups of four, and what is left of them
        out = np.empty((count, 7 * 16), np.float32)
        scan(pairs, factors, queries[:count], scales[:count], out)
        assert out == pytest.approx(expected[:count], rel=1e-6)
