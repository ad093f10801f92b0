"""The progress bar of an image pipeline, and the callback after each pass over the images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.visual.models.raster import Raster


class Progress:
    """Follows the steps of a run: B images of `codes` codes, `side_by_side` of them at a time.

    raster: where some of these tokens only end a row; a callback is told of the others alone.

    callback(pipeline, step, codes, {"codes": i64 [B, codes]}) is called after every pass; `codes`
    counts those of the image of the batch that is furthest behind.
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
        """Take note of a step of image number `row`; the images of a pass come in order."""
        if row <= self._last or row // self._side_by_side != self._last // self._side_by_side:
            self._end_of_pass()
        self._last = row
        start, new = self._counts[row], len(step.tokens)
        self._codes[row, start : start + new] = torch.tensor(step.tokens)
        self._counts[row] = start + new
        self._bar.update(new)

    def finish(self) -> None:
        """Take note of the end of the run."""
        self._end_of_pass()

    def step_tensors(self, first: int) -> dict[str, Tensor]:
        """Return what a callback hears; first: the image that begins the batch of the pass."""
        return {"codes": self._samples().clone()}

    def _end_of_pass(self) -> None:
        if self._last < 0:
            return
        if self._callback is not None:
            first = self._last // self._side_by_side * self._side_by_side
            least = min(self._counts[first : first + self._side_by_side])
            tensors, codes = self.step_tensors(first), self._raster.codes_in(least)
            returned = self._callback(self._pipeline, self._passes, codes, tensors)
            for name, stands in self.step_tensors(first).items():
                check_returned(returned, name, stands)
        self._passes += 1

    def _samples(self) -> Tensor:
        """Return the codes that stand, i64 [B, codes]."""
        return self._codes if not self._raster.ends else self._codes[:, self._raster.places]


def check_returned(returned: Any, name: str, stands: Tensor) -> None:
    """Raise InputError where a callback would have other codes or latents than it was told."""
    result = returned.get(name) if isinstance(returned, dict) else None
    if result is not None and not torch.equal(torch.as_tensor(result).cpu(), stands.cpu()):
        raise InputError(
            f"callback_on_step_end returned other {name} than it received; {name} that stand "
            "cannot be changed. Return them as they are, or nothing, and set "
            "pipe._interrupt = True to end."
        )
