"""Latents by number, so that drafts, texts and reports hold whole numbers, and how they came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.visual.latents.sampler import LatentSample, Sampler

MOST_LATENTS = 1 << 20  # numbers of a call; those from here on stand for conditions
_FIRST = 1024


class LatentTable:
    """Every latent of a call: number 0 is the zero latent, the others are added as they are drawn.

    steps: T. width: D. spread: see `Sampler`. Heads of several models may draw into one table:
    `conditioning` [C, width of the head] and `sampler` say of each latent who drew it, told of
    what.
    """

    def __init__(self, steps: int, width: int, like: Tensor, spread: bool = False) -> None:
        self.paths = like.new_zeros(_FIRST, steps + 1, width)
        self.means = like.new_zeros(_FIRST, steps, width)
        kind = torch.promote_types(like.dtype, torch.float32)
        self.deviations = like.new_ones(_FIRST, steps, width if spread else 1, dtype=kind)
        self.conditioning = [like.new_zeros(0, 0)]
        self.indices = [-1]  # the generated index that each was drawn for
        self._samplers: list[Sampler | None] = [None]

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def latents(self) -> Tensor:
        """The latents [M, D], standardised, and room behind them."""
        return self.paths[:, 0]

    def sampler(self, number: int) -> Sampler:
        """Return what drew a latent, of one that was drawn."""
        sampler = self._samplers[number]
        assert sampler is not None
        return sampler

    def add(
        self, sample: LatentSample, indices: Sequence[int], samplers: Sequence[Sampler]
    ) -> range:
        """Keep latents that samplers drew for these indices, one each, and return their numbers.

        Raises InputError where a call draws more than there are numbers for.
        """
        numbers = self._numbers(len(indices))
        self.paths[numbers.start : numbers.stop] = sample.path
        self.means[numbers.start : numbers.stop] = sample.means
        self.deviations[numbers.start : numbers.stop] = sample.deviations
        self.conditioning.extend(sample.conditioning)
        self.indices.extend(indices)
        self._samplers.extend(samplers)
        return numbers

    def add_latent(self, latent: Tensor) -> int:
        """Keep a latent [D] that no path led to, which is no draft of anything."""
        number = self._numbers(1).start
        self.paths[number, 0] = latent
        self.conditioning.append(self.conditioning[0])
        self.indices.append(-1)
        self._samplers.append(None)
        return number

    def replace(self, number: int, latent: Tensor) -> None:
        """Let another latent [D] stand under a number, wherever that was written."""
        self.paths[number, 0] = latent

    def _numbers(self, count: int) -> range:
        """Return the next numbers, and make room for them."""
        first = len(self)
        if first + count > MOST_LATENTS:
            raise InputError(
                f"got pictures that take over {MOST_LATENTS:,} drawn latents; expected fewer "
                "pictures in a call, or a smaller window."
            )
        size = len(self.paths)
        if first + count > size:
            size = max(2 * size, first + count)
            self.paths, self.means = _grown(self.paths, size), _grown(self.means, size)
            self.deviations = _grown(self.deviations, size)
        return range(first, first + count)


def _grown(buffer: Tensor, size: int) -> Tensor:
    grown = buffer.new_zeros(size, *buffer.shape[1:])
    grown[: len(buffer)] = buffer
    return grown
