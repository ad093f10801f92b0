"""Latents by number, so that drafts, texts and reports hold whole numbers, and how they came."""

from __future__ import annotations

import torch

from ragspec.errors import InputError
from ragspec.visual.latents.sampler import Drawn

MOST_LATENTS = 1 << 20  # numbers of a call; those from here on stand for conditions
_FIRST = 1024


class LatentTable:
    """Every latent of a call: number 0 is the zero latent, the others are added as they are drawn.

    steps: T. width: D. told: the shape [C, width] of what the head is told.
    """

    def __init__(self, steps: int, width: int, told: tuple[int, int], like: torch.Tensor) -> None:
        self.paths = like.new_zeros(_FIRST, steps + 1, width)
        self.means = like.new_zeros(_FIRST, steps, width)
        self.told = like.new_zeros(_FIRST, *told)
        self.indices: list[int] = [-1]  # the generated index that each was drawn for

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def latents(self) -> torch.Tensor:
        """The latents [M, D], standardised, and room behind them."""
        return self.paths[:, 0]

    def add(self, drawn: Drawn, indices: list[int]) -> range:
        """Keep latents that were drawn for these indices, and return their numbers.

        Raises InputError where a call draws more than there are numbers for.
        """
        first, count = len(self), len(indices)
        if first + count > MOST_LATENTS:
            raise InputError(
                f"got pictures that take over {MOST_LATENTS:,} drawn latents; expected fewer "
                "pictures in a call, or a smaller window."
            )
        size = len(self.paths)
        if first + count > size:
            size = max(2 * size, first + count)
            self.paths, self.means, self.told = (
                _grown(each, size) for each in (self.paths, self.means, self.told)
            )
        numbers = range(first, first + count)
        self.paths[first : first + count] = drawn.path
        self.means[first : first + count] = drawn.means
        self.told[first : first + count] = drawn.told
        self.indices.extend(indices)
        return numbers

    def add_latent(self, latent: torch.Tensor) -> int:
        """Keep a latent [D] that no path led to, which is no draft of anything."""
        number = len(self)
        like = self.paths[:1]
        path = like.new_zeros(like.shape)
        path[:, 0] = latent
        nothing = Drawn(path, torch.zeros_like(self.means[:1]), torch.zeros_like(self.told[:1]))
        self.add(nothing, [-1])
        return number


def _grown(buffer: torch.Tensor, size: int) -> torch.Tensor:
    grown = buffer.new_zeros(size, *buffer.shape[1:])
    grown[: len(buffer)] = buffer
    return grown
