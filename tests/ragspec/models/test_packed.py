"""Products with packed matrices are those of plain ones."""

from __future__ import annotations

import pytest
import torch

from ragspec.models import packed


def test_free_memory_is_reported() -> None:
    assert packed.free_memory() > 1 << 20


@pytest.mark.skipif(not packed.available(), reason="needs oneDNN on x86")
@pytest.mark.parametrize("rows", [1, 3, 8, 17])
def test_a_product_is_that_of_the_matrix(rows: int) -> None:
    torch.manual_seed(rows)
    matrix, states, bias = torch.randn(50, 24), torch.randn(rows, 24), torch.randn(50)
    result = packed.product(states, packed.packed(matrix, 8), bias)
    torch.testing.assert_close(result, states @ matrix.T + bias)
