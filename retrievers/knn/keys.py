"""The keys of a datastore: the input of a model's output head after every prefix of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.catalogue import ProgressCallback
from ragspec.retrievers.indexes.suffix_array import check_ids

if TYPE_CHECKING:
    from ragspec.verification.causal import CausalTarget

KEYS, VALUES, STARTS = "keys.bin", "values.bin", "starts.bin"
WINDOW = 512  # tokens that are read at once
SHARE_KNOWN = 8  # 1/8 of a window repeats the end of the window before
TOGETHER = 64  # windows that are collected, then read in batches of similar length


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens to read together.

    Attributes:
        values: Tokens that follow the last `len(values)` tokens, which get keys.
        ends: Whether it is the last window of its document.
    """

    tokens: list[int]
    values: list[int]
    ends: bool


@dataclass(frozen=True, slots=True)
class KeysWritten:
    """The number of keys that were written, their width, and the number of documents."""

    keys: int
    width: int
    documents: int


class KeyReader:
    """Reads documents with a target, window by window.

    Args:
        before: Tokens in front of every window, such as BOS.
    """

    def __init__(self, target: CausalTarget, before: Sequence[int] = ()) -> None:
        from ragspec.verification.tree_session import MOST_LOGITS

        self.target = target
        self.before = list(before)
        self.room = MOST_LOGITS // target.vocab_size  # tokens of a batch, whose logits are made too
        most = min(WINDOW, self.room)
        self.size = min(most, target.max_length or most) - len(self.before)

    def windows(
        self, documents: Iterable[Sequence[int] | NDArray[Any]], most: int
    ) -> Iterator[TokenWindow]:
        """Yield windows that give every token of a document but the last a key, `most` in total.

        Raises:
            InputError: An id is outside the vocabulary.
        """
        total = 0
        for number, document in enumerate(documents):
            check_ids(np.asarray(document), self.target.vocab_size, f"document {number}")
            row = np.asarray(document)[: most - total + 1].tolist()
            last, start, end, repeated = len(row) - 1, 0, 0, 0
            while end < last:
                end = min(start + self.size, last)
                values = row[start + repeated + 1 : end + 1]
                yield TokenWindow([*self.before, *row[start:end]], values, end == last)
                total += len(values)
                repeated = self.size // SHARE_KNOWN
                start = end - repeated
            if total >= most:
                return

    def states(self, windows: Sequence[TokenWindow]) -> list[NDArray[np.float16]]:
        """Return the keys f16 [n, H] of windows, in their order."""
        from ragspec.verification.causal import read_states

        record: dict[int, NDArray[np.float16]] = {}
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))
        while order:  # longest first, so that little is padded
            longest = len(windows[order[0]].tokens)
            most = max(1, self.room // longest)
            part, order = order[:most], order[most:]
            states = read_states(self.target, [windows[i].tokens for i in part])
            for i, state in zip(part, states, strict=True):
                record[i] = _halved(state[0, -len(windows[i].values) :].float().cpu().numpy())
        return [record[i] for i in range(len(windows))]


def write_keys(
    folder: Path,
    documents: Iterable[Sequence[int] | NDArray[Any]],
    reader: KeyReader,
    most: int,
    on_progress: ProgressCallback,
) -> KeysWritten:
    """Write keys f16 [N, H], values i32 [N] (the tokens that follow) and starts i64 [D + 1].

    Args:
        most: Number of keys to stop at.
        on_progress: Called with the documents and keys so far.

    Raises:
        InputError: An id is outside the vocabulary.
        StoreError: The disk is full.
    """
    keys, starts, width = 0, [0], 0
    try:
        with (folder / KEYS).open("wb") as states, (folder / VALUES).open("wb") as values:
            stream = reader.windows(documents, most)
            while windows := list(islice(stream, TOGETHER)):
                for window, rows in zip(windows, reader.states(windows), strict=True):
                    states.write(rows.tobytes())
                    values.write(np.asarray(window.values, "<i4").tobytes())
                    keys, width = keys + len(rows), rows.shape[1]
                    if window.ends:
                        starts.append(keys)
                on_progress(len(starts) - 1, keys)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot take the keys ({error.strerror}) after {keys:,} of them; expected "
            "about 2 bytes a number. Free some room, or ask for fewer with max_tokens."
        ) from error
    np.asarray(starts, "<i8").tofile(folder / STARTS)
    return KeysWritten(keys, width, len(starts) - 1)


def _halved(states: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round states to float16; raise InputError if any is not finite then."""
    with np.errstate(over="ignore"):  # checked below
        halved = states.astype("<f2")
    if not np.isfinite(halved).all():
        raise InputError(
            "the model's hidden states are not finite in float16; expected numbers below 65,504. "
            "A model that overflows there cannot have a datastore."
        )
    return halved
