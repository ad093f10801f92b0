"""The progress of a call: its bar, its callback after each forward, and each complete image."""

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
        pipeline: Passed to the callback.
        bar: An attribute, too. Counts tokens by `update`.
        images: B.
        raster: The grid; the callback receives only the codes.
        side_by_side: Images in a batch.
        callback: See `ImageCall.callback_on_step_end`.
        on_image: Called with the number and the tokens of each complete image.
        tensor: See `Family.step_tensor`; None for the codes.

    Attributes:
        interrupted: Whether the callback ended the call.
    """

    def __init__(
        self,
        pipeline: Any,
        bar: Any,
        images: int,
        raster: Raster,
        side_by_side: int = 1,
        *,
        callback: Callable[..., Any] | None = None,
        on_image: Callable[[int, list[int]], None] | None = None,
        tensor: tuple[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self._pipeline, self.bar = pipeline, bar
        self._callback, self._on_image = callback, on_image
        self._side_by_side, self._raster = side_by_side, raster
        self._name, self._numbers = tensor or ("codes", torch.clone)
        self._tokens = torch.full((images, raster.tokens), -1, dtype=torch.int64)
        self._counts = [0] * images
        self._last = -1
        self._passes = 0
        self.interrupted = False

    def step(self, row: int, step: Step) -> None:
        """Record a step of image number `row`; the images of a forward come in order."""
        if row <= self._last or row // self._side_by_side != self._last // self._side_by_side:
            self.finish()
        self._last = row
        start, new = self._counts[row], len(step.tokens)
        self._tokens[row, start : start + new] = torch.tensor(step.tokens)
        self._counts[row] = start + new
        self.bar.update(new)
        if self._on_image is not None and start < start + new == self._raster.tokens:
            self._on_image(row, self._tokens[row].tolist())

    def finish(self) -> None:
        """End a forward: call the callback and check the tensor that it returns."""
        if self._last < 0:
            return
        if self._callback is not None:
            first = self._last // self._side_by_side * self._side_by_side
            least = min(self._counts[first : first + self._side_by_side])
            tokens = self._tokens[:, self._raster.places]
            self.report(self._raster.codes_in(least), self._numbers(tokens))

    def report(self, count: int, tensor: Tensor) -> None:
        """Call the callback with the count of the image that is furthest behind, and the tensor.

        Raises:
            InputError: The callback returned another tensor than it received.
        """
        if self._callback is None:
            return
        name, before = self._name, tensor.clone()
        returned = self._callback(self._pipeline, self._passes, count, {name: tensor})
        self._passes += 1
        self.interrupted = self.interrupted or returned is True
        after = returned.get(name) if isinstance(returned, dict) else None
        if after is not None and not torch.equal(torch.as_tensor(after).cpu(), before.cpu()):
            raise InputError(
                f"callback_on_step_end returned other {name} than it received; {name} that stand "
                "cannot be changed. Return them as they are, or nothing, and True to end."
            )
