"""Memory of the host from which a tensor of a device is written without waiting."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.models.device import is_cuda, pins


class Staging:
    """What is sent to one tensor, again and again; there: i64, whose address stays.

    Pinned memory is taken once: to pin some for each step costs more than the copy.
    """

    def __init__(self, there: torch.Tensor) -> None:
        self._there = there
        self._here = torch.empty(
            there.shape, dtype=there.dtype, device="cpu", pin_memory=pins(there.device)
        )
        self._values = self._here.numpy()
        self._sent = torch.Event(there.device) if is_cuda(there.device) else None

    def send(self, values: NDArray[np.int64]) -> None:
        """Write the values; waits only where those sent before are still on their way."""
        if self._sent is not None:
            self._sent.synchronize()
        self._values[:] = values
        self._there.copy_(self._here, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
