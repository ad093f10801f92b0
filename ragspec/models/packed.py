"""Products with a matrix that is kept in the layout of oneDNN's kernels (x86).

For a few rows BLAS spends much of a product on rearranging the matrix, at every call; oneDNN takes
it rearranged beforehand.
"""

from __future__ import annotations

import os
import platform

import torch
from torch import Tensor

MOST_SHARE = 0.25  # of the memory that is free, for a second copy


def available() -> bool:
    """Tell whether this machine's kernels take packed matrices."""
    return (
        platform.machine().lower() in ("x86_64", "amd64")
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def halves() -> bool:
    """Tell whether this CPU multiplies bfloat16 fast: without AVX-512 it is emulated."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(matrix: Tensor, rows: int) -> Tensor:
    """Return a matrix [M, N] in the layout that suits products with so many rows best."""
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, rows)
    return result


def product(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows [..., N] times a packed matrix, transposed: [..., M], and a bias [M] added."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], "")
    return out


def free_memory() -> int:
    """Return the bytes that can be had without pushing anything out."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            record = dict(line.split(":", 1) for line in lines)
        return int(record["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        return pages * os.sysconf("SC_PAGE_SIZE") // 2 if pages > 0 else 0
