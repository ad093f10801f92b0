"""Batches of texts in a seeded order, and the target states over them that a head learns from."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ragspec.errors import InputError
from ragspec.verification.causal import MOST_LOGITS, CausalTarget, read_states

SHORTEST = 4
NEAR = 16  # batches of which the texts are sorted by length
_MIX = 0x9E3779B97F4A7C15  # odd, so that seeds next to each other give streams far apart


def seeded(seed: int, stream: int, number: int) -> torch.Generator:
    """Return a generator that depends on these three alone, so that a run can go on anywhere."""
    mixed = ((seed * 3 + stream) * _MIX + number * 2 + 1) % (1 << 63)
    return torch.Generator().manual_seed(mixed)


class Batches:
    """Texts cut to `length`, in batches of `size` of about one length, shuffled in every epoch.

    chunks: all of them, by the number that `of` gives. Longer texts are cut; the last piece
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
        self.chunks: list[list[int]] = []
        for text in texts:
            whole = min(len(text), length)
            for start in range(0, len(text), length) if whole >= SHORTEST else ():
                start = min(start, len(text) - whole)
                piece = list(text[start : start + whole])
                _check_piece(target, piece, len(text))
                self.chunks.append(piece)
        if not self.chunks:
            raise InputError(
                f"got {len(texts)} texts, none of {SHORTEST} tokens or more; expected text to "
                "learn from."
            )
        self._size, self._seed = size, seed
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return -(-len(self.chunks) // self._size)

    def of(self, step: int) -> list[int]:
        """Return the numbers of the pieces of a step."""
        epoch, place = divmod(step, len(self))
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffled(epoch)
        return self._epoch[1][place]

    def digest(self) -> str:
        """Return a hash of what is learned from."""
        result = hashlib.sha256()
        for piece in self.chunks:
            result.update(array("q", piece).tobytes() + b"|")
        return result.hexdigest()

    def _shuffled(self, epoch: int) -> list[list[int]]:
        """Return batches in random order; texts of like lengths stand together among some dozens.

        So little is padded, and yet a batch is hardly ever the same one twice.
        """
        generator, size = seeded(self._seed, 1, epoch), self._size
        order = torch.randperm(len(self.chunks), generator=generator).tolist()
        near = [order[at : at + NEAR * size] for at in range(0, len(order), NEAR * size)]
        order = [n for some in near for n in sorted(some, key=lambda n: len(self.chunks[n]))]
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


CACHE_BYTES = 4 << 30  # of states in memory, for later epochs


@dataclass(frozen=True, slots=True)
class StateRead:
    """Texts as a target reads them, one after the other in rows; R: texts times copies.

    embedded f32 [R, T, E]: what its first layer reads. states f32 [R, T, H]: what its output head
    does. real bool [R, T]: False where a shorter text is padded, on the right, and where a head is
    not to learn. places i64 [R, T]: where the tokens stand; None: one behind the other.
    """

    embedded: torch.Tensor
    states: torch.Tensor
    real: torch.Tensor
    places: torch.Tensor | None = None


class Reads(Protocol):
    """What reads the texts that a head learns from."""

    def read(self, numbers: Sequence[int]) -> StateRead:
        """Return some of the texts, by number."""
        ...


class StateReader:
    """Reads pieces of text with a target, each of them once while its states fit in memory.

    chunks: token ids. cache_bytes: of states on the CPU, rounded to bfloat16 as all are, so that a
    training does not depend on it.
    """

    def __init__(
        self, target: CausalTarget, chunks: Sequence[Sequence[int]], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.target, self.chunks = target, chunks
        self._cache: dict[int, torch.Tensor] = {}
        self._room = cache_bytes

    def read(self, numbers: Sequence[int]) -> StateRead:
        """Return some of the pieces, by number; of too long ones only the ends are known."""
        states = {n: self._cache[n] for n in numbers if n in self._cache}
        missing = sorted((n for n in numbers if n not in states), key=lambda n: len(self.chunks[n]))
        while missing:
            # Logits of all positions are computed too, so that few pieces fit at once.
            longest = len(self.chunks[missing[-1]])
            most = max(1, MOST_LOGITS // (longest * self.target.vocab_size))
            missing, part = missing[:-most], missing[-most:]
            for number, of_piece in zip(part, self._states(part), strict=True):
                states[number] = of_piece.to("cpu", torch.bfloat16)
                if (size := states[number].nbytes) <= self._room:
                    self._cache[number] = states[number]
                    self._room -= size
        return self._together(numbers, [states[number] for number in numbers])

    def _states(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return the states [copies, T, H] of pieces that the target reads in one batch."""
        return read_states(self.target, [self.chunks[number] for number in numbers])

    def _together(self, numbers: Sequence[int], result: Sequence[torch.Tensor]) -> StateRead:
        device = self.target.device
        embedded, states = list[torch.Tensor](), list[torch.Tensor]()
        for number, text in zip(numbers, result, strict=True):
            tokens = torch.tensor([list(self.chunks[number])], device=device)
            with torch.no_grad():
                read = self.target.embed(tokens)[:, -text.shape[1] :]
            embedded += read.float().unbind()
            states += text.to(device).float().unbind()
        lengths = torch.tensor([len(row) for row in states], device=device)
        real = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
        pad = torch.nn.utils.rnn.pad_sequence
        return StateRead(pad(embedded, batch_first=True), pad(states, batch_first=True), real)
