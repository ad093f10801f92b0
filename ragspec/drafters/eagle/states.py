"""The target's states over texts, which a head learns to guess: read once while they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ragspec.target.causal import MOST_LOGITS, CausalTarget, read_states

CACHE_BYTES = 4 << 30  # of states in memory, for later epochs


@dataclass(frozen=True, slots=True)
class Reading:
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

    def read(self, numbers: Sequence[int]) -> Reading:
        """Return some of the texts, by number."""
        ...


class StateReader:
    """Reads pieces of text with a target, each of them once while its states fit in memory.

    pieces: token ids. cache_bytes: of states on the CPU, rounded to bfloat16 as all are, so that a
    training does not depend on it.
    """

    def __init__(
        self,
        target: CausalTarget,
        pieces: Sequence[Sequence[int]],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.target, self.pieces = target, pieces
        self._cache: dict[int, torch.Tensor] = {}
        self._room = cache_bytes

    def read(self, numbers: Sequence[int]) -> Reading:
        """Return some of the pieces, by number; of too long ones only the ends are known."""
        states = {n: self._cache[n] for n in numbers if n in self._cache}
        missing = sorted((n for n in numbers if n not in states), key=lambda n: len(self.pieces[n]))
        while missing:
            # Logits of all positions are computed too, so that few pieces fit at once.
            longest = len(self.pieces[missing[-1]])
            most = max(1, MOST_LOGITS // (longest * self.target.vocab_size))
            missing, part = missing[:-most], missing[-most:]
            for number, of_piece in zip(part, self._states(part), strict=True):
                states[number] = of_piece.to("cpu", torch.bfloat16)
                if (size := states[number].nbytes) <= self._room:
                    self._cache[number] = states[number]
                    self._room -= size
        return self._together(numbers, [states[number] for number in numbers])

    def _states(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return the states [copies, T, H] of pieces that the target reads side by side."""
        return read_states(self.target, [self.pieces[number] for number in numbers])

    def _together(self, numbers: Sequence[int], found: Sequence[torch.Tensor]) -> Reading:
        device = self.target.device
        embedded, states = list[torch.Tensor](), list[torch.Tensor]()
        for number, text in zip(numbers, found, strict=True):
            tokens = torch.tensor([list(self.pieces[number])], device=device)
            with torch.no_grad():
                read = self.target.embed(tokens)[:, -text.shape[1] :]
            embedded += read.float().unbind()
            states += text.to(device).float().unbind()
        lengths = torch.tensor([len(row) for row in states], device=device)
        real = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
        pad = torch.nn.utils.rnn.pad_sequence
        return Reading(pad(embedded, batch_first=True), pad(states, batch_first=True), real)
