"""The target's states over texts, which a head learns to guess: read, and kept for later epochs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch

from ragspec.errors import StoreError
from ragspec.target.causal import MOST_LOGITS, CausalTarget, read_states

KEPT = "states-*.bin"
_KEPT_AS = torch.bfloat16
SHARE = 4  # times their size must be free, for much else is to be written


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
    """Reads pieces of text with a target, those that it has read before from a file.

    pieces: token ids. file: None reads every piece anew. States are rounded to bfloat16 either way,
    so that a training does not depend on it.
    """

    def __init__(
        self,
        target: CausalTarget,
        pieces: Sequence[Sequence[int]],
        file: StateFile | None = None,
    ) -> None:
        self.target, self.pieces, self._file = target, pieces, file

    def read(self, numbers: Sequence[int]) -> Reading:
        """Return some of the pieces, by number; of too long ones only the ends are known."""
        file = self._file
        known = {n: found for n in numbers if file and (found := file.get(n)) is not None}
        lacking = sorted((n for n in numbers if n not in known), key=lambda n: len(self.pieces[n]))
        while lacking:
            # Logits of all positions are made on the way, so that not many fit at once.
            longest = len(self.pieces[lacking[-1]])
            most = max(1, MOST_LOGITS // (longest * self.target.vocab_size))
            lacking, part = lacking[:-most], lacking[-most:]
            for number, states in zip(part, self._states(part), strict=True):
                known[number] = states.to(_KEPT_AS)
                if file:
                    file.put(number, known[number])
        return self._together(numbers, [known[number] for number in numbers])

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


class StateFile:
    """States of pieces in a file, in bfloat16: two bytes a number, written as they are read.

    name: of what they are states; a file of another name is of another training, and deleted.
    lengths: of the pieces. copies, width: of the states of one. All room is taken at once, so that
    a full disk is known before the training begins: raises StoreError.
    """

    def __init__(
        self, folder: Path, name: str, lengths: Sequence[int], copies: int, width: int
    ) -> None:
        path = folder / KEPT.replace("*", name[:16])
        for old in folder.glob(KEPT):
            if old.name != path.name:
                old.unlink()
        self._starts = [0, *accumulate(copies * length for length in lengths)]
        flags = 2 * len(lengths)  # before the states: as int32, how many places of each are known
        total = flags + self._starts[-1] * width
        _take_room(path, 2 * total)
        whole = torch.from_file(str(path), shared=True, size=total, dtype=_KEPT_AS)
        self._known = whole[:flags].view(torch.int32)
        self._states = whole[flags:].view(-1, width)
        self._copies = copies

    def get(self, number: int) -> torch.Tensor | None:
        """Return the states [copies, T, H] of a piece; None where it was not read yet."""
        start, length = self._starts[number], int(self._known[number])
        kept = self._states[start : start + self._copies * length]
        return kept.view(self._copies, length, -1) if length else None

    def put(self, number: int, states: torch.Tensor) -> None:
        """Keep the states [copies, T, H] of a piece."""
        flat, start = states.flatten(0, 1), self._starts[number]
        self._states[start : start + len(flat)] = flat
        self._known[number] = states.shape[1]  # last: it says that they are whole


def drop_states(folder: Path) -> None:
    """Delete the states that a training kept in a folder."""
    for path in folder.glob(KEPT):
        path.unlink()


def _take_room(path: Path, size: int) -> None:
    """Give a file its whole size, with room on the disk for it."""
    if path.is_file() and path.stat().st_size == size:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < SHARE * size:
            raise OSError("they would take more than a quarter of the room that is left")
        with path.open("wb") as stream:
            if hasattr(os, "posix_fallocate"):  # a sparse file would end the program when it fills
                os.posix_fallocate(stream.fileno(), 0, size)
            else:
                stream.truncate(size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreError(
            f"the states of the texts, {size / 1e9:.2f} GB, cannot be kept in {path.parent} "
            f"({error}); expected {SHARE} times as much room. Every epoch will read the texts anew."
        ) from error
