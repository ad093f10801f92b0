"""Latents by number, so that drafts, sequences and reports are of whole numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.visual.latents.sampler import LatentSample, Sampler

MOST_LATENTS = 1 << 20  # limit of numbers per call; those from here on stand for conditions
_FIRST = 1024
OUTCOMES = ("target", "accepted", "reflected", "redrawn")
"""There was no draft; it was kept; its mirror image replaced it; another latent replaced it."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one committed latent; latents are numbers of the table.

    Attributes:
        index: Its index among the generated latents.
        drafted: The draft that was judged there, or None.
        target_number: The target's own latent, sampled at that forward.
        emitted: The committed latent.
    """

    index: int
    drafted: int | None
    target_number: int
    emitted: int

    @property
    def accepted(self) -> bool:
        """Whether the draft was kept."""
        return self.emitted == self.drafted


class LatentTable:
    """Every latent of a call by number: 0 is the zero latent, the others are added when sampled.

    Heads of several models may sample into one table, which records each latent's sampler.

    Args:
        steps, width: T, and the size D of a latent.
        like: A tensor with the device and dtype of the latents.
    """

    def __init__(self, steps: int, width: int, like: Tensor) -> None:
        self.paths = like.new_zeros(_FIRST, steps + 1, width)
        self.means = like.new_zeros(_FIRST, steps, width)
        kind = torch.promote_types(like.dtype, torch.float32)
        self.deviations = like.new_ones(_FIRST, steps, width, dtype=kind)
        self.conditioning = [like.new_zeros(0, 0)]  # of each latent, [C, width of the head]
        self.indices = [-1]  # generated index that each latent was sampled for
        self._samplers: list[Sampler | None] = [None]
        self.judged: dict[int, Judged] = {}  # the verdicts on committed latents, by number

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def latents(self) -> Tensor:
        """The latents [M, D], standardised, including spare rows at the end."""
        return self.paths[:, 0]

    def sampler(self, number: int) -> Sampler:
        """Return the sampler of a sampled latent."""
        sampler = self._samplers[number]
        assert sampler is not None
        return sampler

    def add(
        self, sample: LatentSample, indices: Sequence[int], samplers: Sequence[Sampler]
    ) -> range:
        """Store latents, one for each index and its sampler, and return their numbers."""
        numbers = self._numbers(len(indices))
        self.paths[numbers.start : numbers.stop] = sample.path
        self.means[numbers.start : numbers.stop] = sample.means
        self.deviations[numbers.start : numbers.stop] = sample.deviations
        self.conditioning.extend(sample.conditioning)
        self.indices.extend(indices)
        self._samplers.extend(samplers)
        return numbers

    def add_latent(self, latent: Tensor) -> int:
        """Store a latent [D] without a path, which is never a draft, and return its number."""
        number = self._numbers(1).start
        self.paths[number, 0] = latent
        self.conditioning.append(self.conditioning[0])
        self.indices.append(-1)
        self._samplers.append(None)
        return number

    def distances(self, judged: Sequence[Judged]) -> Tensor:
        """Return how far committed latents are from the target's own, in deviations: f64 [n]."""
        numbers = [(each.emitted, each.target_number) for each in judged]
        emitted, sampled = self.latents[torch.tensor(numbers).long().reshape(-1, 2)].unbind(1)
        distances: Tensor = torch.linalg.vector_norm((emitted - sampled).double(), dim=-1).cpu()
        return distances

    def _numbers(self, count: int) -> range:
        """Return the next numbers and make room for them; raise InputError past the last one."""
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
