"""Texts in batches of one length, in an order that follows from seed and step alone."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Sequence

import torch

from ragspec.errors import InputError
from ragspec.target.causal import CausalTarget

SHORTEST = 4
_MIX = 0x9E3779B97F4A7C15  # odd, so that seeds next to each other give streams far apart


def seeded(seed: int, stream: int, number: int) -> torch.Generator:
    """Return a generator that depends on these three alone, so that a run can go on anywhere."""
    mixed = ((seed * 3 + stream) * _MIX + number * 2 + 1) % (1 << 63)
    return torch.Generator().manual_seed(mixed)


class Batches:
    """Texts cut to `length`, in batches of `size` of one length, shuffled anew in every epoch.

    Longer texts are cut; the last piece overlaps the one before, so that all have full length.
    Raises InputError where there is no text of a few tokens, or one that the target cannot read
    in pieces.
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
        pieces: defaultdict[int, list[list[int]]] = defaultdict(list)
        for text in texts:
            whole = min(len(text), length)
            for start in range(0, len(text), length) if whole >= SHORTEST else ():
                start = min(start, len(text) - whole)
                piece = list(text[start : start + whole])
                _check_piece(target, piece, len(text))
                pieces[whole].append(piece)
        if not pieces:
            raise InputError(
                f"got {len(texts)} texts, none of {SHORTEST} tokens or more; expected text to "
                "learn from."
            )
        self._groups = list(pieces.values())
        self._size, self._seed = size, seed
        self._epoch: tuple[int, list[list[list[int]]]] = (-1, [])

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return sum(-(-len(group) // self._size) for group in self._groups)

    def of(self, step: int) -> list[list[int]]:
        """Return the texts of a step."""
        epoch, place = divmod(step, len(self))
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch)
        return self._epoch[1][place]

    def digest(self) -> str:
        """Return a hash of what is learned from."""
        found = hashlib.sha256()
        for group in self._groups:
            for piece in group:
                found.update(array("q", piece).tobytes() + b"|")
        return found.hexdigest()

    def _shuffled(self, epoch: int) -> list[list[list[int]]]:
        generator, batches = seeded(self._seed, 1, epoch), []
        for group in self._groups:
            order = torch.randperm(len(group), generator=generator).tolist()
            cuts = range(0, len(order), self._size)
            batches += [[group[i] for i in order[at : at + self._size]] for at in cuts]
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
