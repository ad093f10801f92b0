"""A datastore: the model's hidden state before every token of some texts, and that token.

The memory of a kNN language model (Khandelwal et al. 2020, arXiv 1911.00172, section 2), searched
by squared distance. Keys are the input of the output head. The paper takes the input of the last
feed-forward layer, which was slightly better for its model but does not exist in every model. Keys
are float16. The store is whole or absent.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.engine.engine import Engine
from ragspec.engine.request import expect_engine
from ragspec.errors import DocumentError, InputError, StoreError
from ragspec.needs import LAST
from ragspec.retrievers.corpus.catalogue import ProgressCallback, Texts, tokenized
from ragspec.retrievers.fingerprints import check_prints, prints_of_engine
from ragspec.retrievers.indexes.segment import mapped
from ragspec.retrievers.indexes.suffix_array import TokenRow, checked
from ragspec.retrievers.search.nearest import Exact, Floats, Numbers
from ragspec.sampling.settings import checked_count
from ragspec.storage.filesystem import expect_path
from ragspec.storage.manifest import Contents, Verify
from ragspec.storage.store import OpenStore, open_store, parsing, publish
from ragspec.verification.causal import CausalTarget, read_states
from ragspec.verification.tree_session import MOST_LOGITS

KIND = "datastore"
MOST_KEYS = 1_000_000
KEYS, VALUES, STARTS = "keys.bin", "values.bin", "starts.bin"
WINDOW = 512  # tokens that are read at once
SHARE_KNOWN = 8  # 1/8 of a window repeats the end of the window before
TOGETHER = 64  # windows that are collected, then read in batches of similar length
SAMPLED = 1 << 14  # keys whose mean is subtracted


class Neighbours(NamedTuple):
    """The keys nearest to a state, nearest first: numbers i64 [k], squared distances f64 [k]."""

    numbers: Numbers
    distances: NDArray[np.float64]


class NearestKeys:
    """Searches keys f16 [N, H] exactly; a result does not depend on the other states of a search.

    The squared distance of x and q is |q|^2 less twice x.q - |x|^2 / 2, an inner product of vectors
    with one more number. Centred keys have smaller error bounds. Candidates are measured again in
    float64; of equal distances the lower number comes first.

    Attributes:
        variance: Mean squared distance of the keys from their mean.
    """

    def __init__(self, keys: NDArray[np.float16]) -> None:
        self._keys = keys
        sample = np.asarray(keys[:: max(1, len(keys) // SAMPLED)], np.float32)
        self._mean = sample.mean(axis=0) if len(sample) else np.zeros(keys.shape[1], np.float32)
        vectors = np.empty((len(keys), keys.shape[1] + 1), np.float32)
        np.subtract(keys, self._mean, out=vectors[:, :-1], dtype=np.float32)
        squares = np.einsum("ij,ij->i", vectors[:, :-1], vectors[:, :-1])
        self.variance = float(squares.mean(dtype=np.float64)) if len(keys) else 0.0
        # The scale of the last number balances both parts.
        self._scale = np.float32(max(np.sqrt(squares.max(initial=0.0)), 1e-30))
        vectors[:, -1] = squares * (-0.5 / self._scale)
        self._exact = Exact(vectors)

    def search(self, states: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest keys of each state f32 [Q, H]."""
        last = np.full((len(states), 1), self._scale, np.float32)
        candidates = self._exact.candidates(np.hstack([states - self._mean, last]), k)
        neighbours = []
        for state, numbers in zip(states, candidates, strict=True):
            rows = self._keys[numbers].astype(np.float64) - state.astype(np.float64)
            distances: NDArray[np.float64] = np.square(rows).sum(axis=1)
            order = np.lexsort((numbers, distances))[:k]
            neighbours.append(Neighbours(numbers[order], distances[order]))
        return neighbours


class Datastore:
    """Keys f16 [N, H] of the contexts in some texts, and the tokens [N] that followed them."""

    def __init__(self, store: OpenStore) -> None:
        facts = store.manifest.parameters
        self._store = store
        self.width, self.vocab_size = int(facts["width"]), int(facts["vocab_size"])
        count, documents = int(facts["keys"]), int(facts["documents"])
        self.keys: NDArray[np.float16] = mapped(store.file(KEYS), "<f2").reshape(count, self.width)
        self.values: Numbers = mapped(store.file(VALUES), "<i4").reshape(count).astype(np.int64)
        self.starts: Numbers = mapped(store.file(STARTS), "<i8").reshape(documents + 1)
        if not 0 <= self.values.min(initial=0) <= self.values.max(initial=0) < self.vocab_size:
            raise ValueError(f"its tokens are not in 0 to {self.vocab_size - 1}")

    @classmethod
    def build(
        cls,
        texts: Texts,
        engine: Engine,
        out: str | os.PathLike[str],
        *,
        max_tokens: int = MOST_KEYS,
        progress: ProgressCallback = lambda documents, keys: None,
    ) -> "Datastore":
        """Read texts with an engine's model and write its hidden state before every token.

        An older datastore in `out` is replaced once the new one is whole.

        Args:
            texts: Texts or rows of token ids, may be a stream.
            max_tokens: Number of keys to stop at; each takes twice the model's width in bytes.
            progress: Called with the documents and keys so far.

        Raises:
            InputError: An argument or a document is out of range.
            DocumentError: No text has two tokens.
            StoreError: The folder cannot be written.
        """
        expect_engine(engine, bare=True)
        if not callable(progress):
            raise InputError(f"progress is {progress!r}; expected a function of two numbers.")
        max_tokens = checked_count(max_tokens, "max_tokens")
        rows = tokenized(texts, engine.tokenizer)

        def fill(folder: Path) -> Contents:
            facts = _write_keys(folder, rows, engine, max_tokens, progress)
            if not facts["keys"]:
                raise DocumentError(
                    "the texts hold no two tokens in a row; no datastore was written. Name texts."
                )
            return Contents(facts, prints_of_engine(engine))

        publish(expect_path(out, "the datastore"), KIND, fill)
        return cls.open(out, verify="size")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: Verify = "full") -> "Datastore":
        """Open a datastore that `build` wrote.

        Args:
            verify: "full" hashes every file, "size" compares sizes only.

        Raises:
            StoreError: The store is missing, damaged or of another kind.
        """
        store = open_store(root := expect_path(path, "the datastore"), KIND, verify=verify)
        with parsing(root):
            return cls(store)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.values)

    @property
    def path(self) -> Path:
        """The folder of the datastore."""
        return self._store.path.parent

    @cached_property
    def near(self) -> NearestKeys:
        """The search among the keys, which takes seconds to prepare for a million."""
        return NearestKeys(self.keys)

    def following(self, numbers: Numbers, count: int) -> Numbers:
        """Return each key and the `count` next ones of its text: [k] -> [k * (count + 1)] or fewer.

        The keys of the first number come first.
        """
        ends = self.starts[np.searchsorted(self.starts, numbers, side="right")]
        following: Numbers = numbers[:, None] + np.arange(count + 1)
        return following[following < ends[:, None]]

    def check(self, engine: Engine) -> None:
        """Raise StoreError if the datastore was made with another model or tokenizer."""
        prints = self._store.manifest.fingerprints
        check_prints(f"the datastore {self.path}", prints, prints_of_engine(engine))

    def info(self) -> dict[str, object]:
        """Return sizes and fingerprints as JSON types."""
        manifest = self._store.manifest
        size = sum(record.size for record in manifest.files.values())
        facts = {"path": str(self.path), "bytes": size, "tokenizer": None}
        return {**facts, **manifest.parameters, **manifest.fingerprints}


class TokenWindow(NamedTuple):
    """Tokens to read together.

    Attributes:
        values: Tokens that follow the last `len(values)` tokens, which get keys.
        ends: Whether it is the last window of its document.
    """

    tokens: list[int]
    values: list[int]
    ends: bool


def _write_keys(
    folder: Path, texts: Iterable[TokenRow], engine: Engine, most: int, progress: ProgressCallback
) -> dict[str, int]:
    """Write keys f16 [N, H], values i32 [N] and starts i64 [D + 1]; return their sizes."""
    target, tokenizer = engine.target, engine.tokenizer
    first = None if tokenizer is None else tokenizer.bos_token_id
    before = [] if tokenizer is None or first is None else tokenizer("")["input_ids"][:1]
    before = before if before == [first] else []  # which stands before every text
    room = MOST_LOGITS // target.vocab_size  # of a text whose logits are computed at once
    size = min(WINDOW, room, target.max_length or WINDOW)
    stream = _windows(_limited(checked(texts, target.vocab_size), most), size, before)
    keys, starts, width = 0, [0], 0
    try:
        with (folder / KEYS).open("wb") as states, (folder / VALUES).open("wb") as values:
            while windows := list(islice(stream, TOGETHER)):
                for window, rows in zip(windows, _states(target, windows), strict=True):
                    states.write(rows.tobytes())
                    values.write(np.asarray(window.values, "<i4").tobytes())
                    keys, width = keys + len(rows), rows.shape[1]
                    if window.ends:
                        starts.append(keys)
                progress(len(starts) - 1, keys)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot take the keys ({error.strerror}) after {keys:,} of them; expected "
            "about 2 bytes a number. Free some room, or ask for fewer with max_tokens."
        ) from error
    np.asarray(starts, "<i8").tofile(folder / STARTS)
    sizes = {"keys": keys, "width": width, "documents": len(starts) - 1}
    return {**sizes, "vocab_size": target.vocab_size}


def _limited(documents: Iterable[TokenRow], most: int) -> Iterator[TokenRow]:
    """Yield documents that have `most` keys in total, one for every token but the last."""
    for document in documents:
        yield document[: most + 1]
        most -= max(len(document) - 1, 0)
        if most <= 0:
            return


def _windows(rows: Iterable[TokenRow], size: int, before: Sequence[int]) -> Iterator[TokenWindow]:
    """Yield windows of at most `size` tokens; each has `before` in front."""
    size -= len(before)
    for row in (document.tolist() for document in rows):
        last, start, end, repeated = len(row) - 1, 0, 0, 0
        while end < last:
            end = min(start + size, last)
            values = row[start + repeated + 1 : end + 1]
            yield TokenWindow([*before, *row[start:end]], values, end == last)
            repeated = size // SHARE_KNOWN
            start = end - repeated


def _states(target: CausalTarget, windows: Sequence[TokenWindow]) -> list[NDArray[np.float16]]:
    """Return the keys f16 [n, H] of windows, in their order."""
    keys = {
        i: _halved(state.of((LAST,))[0, -len(windows[i].values) :].float().cpu().numpy())
        for i, state in read_states(target, [window.tokens for window in windows])
    }
    return [keys[i] for i in range(len(windows))]


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
