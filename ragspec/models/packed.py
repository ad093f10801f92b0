"""Matrix products with a matrix that is stored in the layout of oneDNN's kernels (x86).

For a few rows, BLAS spends much of each product on rearranging the matrix. oneDNN accepts a matrix
that was rearranged beforehand.
"""

from __future__ import annotations

import os
import platform

import torch
from torch import Tensor

MOST_SHARE = 0.25  # of the free memory may go to packed copies


def available() -> bool:
    """Return whether this machine has kernels for packed matrices."""
    return (
        platform.machine().lower() in ("x86_64", "amd64")
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def halves() -> bool:
    """Return whether this CPU multiplies bfloat16 fast. Without AVX-512 it is emulated."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(matrix: Tensor, rows: int) -> Tensor:
    """Return a matrix [M, N] in the layout that is fastest for products with `rows` rows."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, rows)
    return reordered


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [..., N] times a packed [M, N], transposed, plus a bias [M] -> [..., M]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")
    return out


def free_memory() -> int:
    """Return the bytes of memory that are available without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            record = dict(line.split(":", 1) for line in lines)
        return int(record["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return pages * os.sysconf("SC_PAGE_SIZE") // 2 if pages > 0 else 0
