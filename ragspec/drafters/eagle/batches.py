"""Texts in batches of like lengths, in an order that follows from seed and step alone."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch

from ragspec.errors import InputError
from ragspec.target.causal import CausalTarget

SHORTEST = 4
NEAR = 16  # batches of which the texts are sorted by length
_MIX = 0x9E3779B97F4A7C15  # odd, so that seeds next to each other give streams far apart


def seeded(seed: int, stream: int, number: int) -> torch.Generator:
    """Return a generator that depends on these three alone, so that a run can go on anywhere."""
    mixed = ((seed * 3 + stream) * _MIX + number * 2 + 1) % (1 << 63)
    return torch.Generator().manual_seed(mixed)


class Batches:
    """Texts cut to `length`, in batches of `size` of about one length, shuffled in every epoch.

    pieces: all of them, by the number that `of` gives. Longer texts are cut; the last piece
    overlaps the one before, so that all have full length. Raises InputError where there is no text
    of a few tokens, or one that the target cannot read in pieces.
    """

    def __init__(
        self,
        target: CausalTarget,
        texts: Sequence[Sequence[int]],
        *,
        size: int,
        length: int,
        seed: int,
    ) -> None:
        self.pieces: list[list[int]] = []
        for text in texts:
            whole = min(len(text), length)
            for start in range(0, len(text), length) if whole >= SHORTEST else ():
                start = min(start, len(text) - whole)
                piece = list(text[start : start + whole])
                _check_piece(target, piece, len(text))
                self.pieces.append(piece)
        if not self.pieces:
            raise InputError(
                f"got {len(texts)} texts, none of {SHORTEST} tokens or more; expected text to "
                "learn from."
            )
        self._size, self._seed = size, seed
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return -(-len(self.pieces) // self._size)

    def of(self, step: int) -> list[int]:
        """Return the numbers of the pieces of a step."""
        epoch, place = divmod(step, len(self))
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch)
        return self._epoch[1][place]

    def digest(self) -> str:
        """Return a hash of what is learned from."""
        found = hashlib.sha256()
        for piece in self.pieces:
            found.update(array("q", piece).tobytes() + b"|")
        return found.hexdigest()

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """Return batches in random order; texts of like lengths stand together among some dozens.

        So little is padded, and yet a batch is hardly ever the same one twice.
        """
        generator, size = seeded(self._seed, 1, epoch), self._size
        order = torch.randperm(len(self.pieces), generator=generator).tolist()
        near = [order[at : at + NEAR * size] for at in range(0, len(order), NEAR * size)]
        order = [n for some in near for n in sorted(some, key=lambda n: len(self.pieces[n]))]
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _check_piece(target: CausalTarget, piece: list[int], whole: int) -> None:
    """Raise InputError for a piece, of a text of `whole` tokens, that the target cannot read."""
    try:
        target.check_prompt(piece)
    except InputError as error:
        if len(piece) == whole:
            raise
        raise InputError(
            f"got a text of {whole} tokens that length={len(piece)} cuts into pieces which the "
            f"target cannot read ({error}); expected it whole. Set length to {whole} or more."
        ) from error
