"""The progress bar of an image pipeline, and its callback after each forward of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.visual.models.raster import Raster


class Progress:
    """Reports the steps of a run over B images, `side_by_side` of them in one batch.

    Args:
        codes: Tokens of an image.
        callback: Called as callback(pipeline, step, codes, {"codes": i64 [B, h * w]}) after each
            forward; `codes` counts those of the batch's image that is furthest behind.
        raster: The grid, if some tokens end rows; the callback receives only the codes.
    """

    def __init__(
        self,
        pipeline: Any,
        bar: Any,
        images: int,
        codes: int,
        side_by_side: int,
        callback: Callable[..., Any] | None = None,
        raster: Raster | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._bar = bar
        self._callback = callback
        self._side_by_side = side_by_side
        self._codes = torch.full((images, codes), -1, dtype=torch.int64)
        self._counts = [0] * images
        self._raster = raster or Raster(1, codes)
        self._last = -1
        self._passes = 0

    def step(self, row: int, step: Step) -> None:
        """Record a step of image number `row`; the images of a forward come in order."""
        if row <= self._last or row // self._side_by_side != self._last // self._side_by_side:
            self.finish()
        self._last = row
        start, new = self._counts[row], len(step.tokens)
        self._codes[row, start : start + new] = torch.tensor(step.tokens)
        self._counts[row] = start + new
        self._bar.update(new)

    def step_tensors(self) -> dict[str, Tensor]:
        """Return copies of the tensors that the callback receives."""
        codes = self._codes[:, self._raster.places] if self._raster.ends else self._codes
        return {"codes": codes.clone()}

    def finish(self) -> None:
        """End a forward: call the callback and check the tensors that it returns."""
        if self._last < 0:
            return
        if self._callback is not None:
            first = self._last // self._side_by_side * self._side_by_side
            least = min(self._counts[first : first + self._side_by_side])
            tensors, codes = self.step_tensors(), self._raster.codes_in(least)
            returned = self._callback(self._pipeline, self._passes, codes, tensors)
            for name, expected in self.step_tensors().items():
                check_returned(returned, name, expected)
        self._passes += 1


def check_returned(returned: Any, name: str, expected: Tensor) -> None:
    """Raise InputError if a callback returned other codes or latents than it received."""
    values = returned.get(name) if isinstance(returned, dict) else None
    if values is not None and not torch.equal(torch.as_tensor(values).cpu(), expected.cpu()):
        raise InputError(
            f"callback_on_step_end returned other {name} than it received; {name} that stand "
            "cannot be changed. Return them as they are, or nothing, and set "
            "pipe._interrupt = True to end."
        )
