"""The state of a weight, by which changes are noticed."""

import math

import torch
from torch import Tensor

WeightState = tuple[int, torch.dtype, int, str]  # see `weight_state`
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool})


def weight_state(weight: Tensor) -> WeightState:
    """Return the address, the dtype, the count of changes and a sum of a weight.

    torch does not count changes through `weight.data`. So the sum has entries of every row and
    every column of a matrix of floats in the memory of the host, and some of other arrays. A change
    of few entries may be missed.
    """
    changes = 0 if weight.is_inference() else weight._version
    state = weight.data_ptr(), weight.dtype, changes
    data = weight.detach()
    real = data.is_floating_point()
    known = type(data) is Tensor and (real or data.dtype in INTEGERS)
    if not known or data.device.type != "cpu":
        return *state, ""
    size = data.numel()
    rows, columns = data.shape if data.dim() == 2 and real else (math.isqrt(size), size)
    step = _stride(rows, columns) if data.dim() > 1 else 1
    return *state, float(data.reshape(-1)[::step].sum(dtype=torch.float64)).hex()


def _stride(rows: int, columns: int) -> int:
    """Return a stride through a flat matrix that visits every row and every column."""
    step = max(min(rows, columns), 1)
    while math.gcd(step, columns) > 1:
        step -= 1
    return step
