"""A datastore: for every beginning of some texts, what the model made of it and what came next.

The memory of a kNN language model (Khandelwal et al. 2020, arXiv 1911.00172, section 2). Keys are
what the output head reads; the paper takes the input of the last feed-forward layer, which was a
little better for its model and is none for others. Keys are float16 beside their tokens, in a store
that is whole or absent; a search never answers with a part of a file that was changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.errors import DocumentError, InputError, StoreError
from ragspec.retrievers.corpus.catalogue import Texts, tokenized
from ragspec.retrievers.fingerprints import check_prints, prints_of
from ragspec.retrievers.knn.keys import (
    KEYS,
    STARTS,
    VALUES,
    KeyReader,
    KeysWritten,
    ProgressCallback,
    write_keys,
)
from ragspec.retrievers.knn.mixture import Fit, fit
from ragspec.retrievers.knn.nearest_keys import ApproximateKeys, NearestKeys, Neighbours
from ragspec.retrievers.search.nearest import FLAT, KINDS, Approximate, Floats, Numbers
from ragspec.storage.manifest import Contents, Verify
from ragspec.storage.store import OpenStore, open_store, publish

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine

KIND = "datastore"
INDEX = "nearest.faiss"
LAYER = "input of the output head"
MOST_KEYS = 1_000_000


@dataclass(frozen=True, slots=True)
class DatastoreInfo:
    """What a datastore holds. fits: temperatures by number of neighbours, see `Fit`."""

    path: str
    keys: int
    width: int
    documents: int
    vocab_size: int
    layer: str
    search: str
    bytes: int
    model: str
    tokenizer: str | None
    fits: tuple[Fit, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self)


class Datastore:
    """Keys f16 [N, H] of the contexts in some texts, and the tokens [N] that followed them."""

    def __init__(self, store: OpenStore) -> None:
        facts = store.manifest.parameters
        self._store = store
        self.width = int(facts["width"])
        self.vocab_size = int(facts["vocab_size"])
        self.layer = str(facts["layer"])
        self.kind = str(facts.get("search", FLAT))
        self.fits_known = tuple(Fit(**record) for record in facts["fits"])
        count, documents = int(facts["keys"]), int(facts["documents"])
        self.keys: NDArray[np.float16] = _mapped(store.file(KEYS), "<f2", (count, self.width))
        values = _mapped(store.file(VALUES), "<i4", (count,))
        self.values: Numbers = np.asarray(values, np.int64)
        self.starts: Numbers = np.asarray(_mapped(store.file(STARTS), "<i8", (documents + 1,)))
        if self.layer != LAYER or (self.values >= self.vocab_size).any() or (self.values < 0).any():
            raise StoreError(
                f"{self.path} holds keys of the {self.layer!r} and tokens up to "
                f"{self.values.max(initial=0)}; expected the {LAYER!r} and {self.vocab_size} "
                "tokens: build it again."
            )

    @classmethod
    def build(
        cls,
        texts: Texts,
        engine: Engine,
        out: str | os.PathLike[str],
        *,
        max_tokens: int = MOST_KEYS,
        search: str = FLAT,
        progress: ProgressCallback = lambda documents, keys: None,
    ) -> Datastore:
        """Read texts with an engine's model and keep what it made of every beginning.

        Args:
            texts: Texts or rows of token ids, may be a stream.
            max_tokens: Keys to stop at; each takes twice the model's width in bytes.
            search: "exact", or "hnsw" or "ivf" of faiss, which find most of the nearest sooner.
            progress: Called with the documents and keys so far. An older datastore in `out` is
                replaced once the new one is whole.

        Raises:
            InputError, DocumentError: Where no text has two tokens.
            StoreError: What is wrong, and a remedy.
        """
        if max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}; expected at least 1.")
        if search not in KINDS:
            raise InputError(f"search is {search!r}; expected one of {', '.join(KINDS)}.")
        reader = KeyReader(engine.target, _beginning(engine.tokenizer))
        rows = tokenized(texts, engine.tokenizer)

        def fill(folder: Path) -> Contents:
            written = write_keys(folder, rows, reader, max_tokens, progress)
            if not written.keys:
                raise DocumentError(
                    "the texts hold no two tokens in a row; no datastore was written. Name texts."
                )
            return Contents(
                _facts(engine, folder, written, search), prints_of(engine.model, engine.tokenizer)
            )

        publish(Path(out), KIND, fill)
        return cls.open(out, verify="size")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: Verify = "full") -> Datastore:
        """Open what `build` wrote; verify: "full" hashes every file, "size" compares sizes.

        Raises:
            StoreError: Where it is missing, damaged or something else.
        """
        store = open_store(Path(path), KIND, verify=verify)
        try:
            return cls(store)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{path} cannot be read ({error}); build it again.") from error

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.values)

    @property
    def path(self) -> Path:
        """The folder of the datastore."""
        return self._store.path.parent

    @cached_property
    def near(self) -> NearestKeys | ApproximateKeys:
        """What searches the keys; raises StoreError for an index that is not theirs."""
        if self.kind == FLAT:
            return NearestKeys(self.keys)
        facts, path = self._store.manifest.parameters, self._store.file(INDEX)
        parameters = facts["search_parameters"]
        index = Approximate.load(path, self.kind, parameters, self.keys)  # type: ignore[arg-type]
        if not index.by_distance:
            raise StoreError(
                f"{path.name} goes by inner products, expected squared distances; build the "
                "datastore again."
            )
        return ApproximateKeys(self.keys, index)

    def search(self, states: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest keys of each state f32 [Q, H]; raises InputError for other sizes."""
        if states.shape[1] != self.width:
            raise InputError(
                f"got states of {states.shape[1]} numbers, the datastore has {self.width}; "
                "expected those of the model that it was built with."
            )
        return self.near.search(states, k)

    def temperature(self, k: int) -> float:
        """Return the fitted temperature for so many neighbours: that of the nearest number."""
        nearest = min(self.fits_known, key=lambda fit: abs(np.log(fit.k) - np.log(k)))
        return nearest.temperature

    def following(self, numbers: Numbers, count: int) -> Numbers:
        """Return keys and the `count` next ones behind each, never of another text.

        numbers [k] -> [k * (count + 1)] or fewer; those of the first come first.
        """
        ends = self.starts[np.searchsorted(self.starts, numbers, side="right")]
        result = numbers[:, None] + np.arange(count + 1)
        return result[result < ends[:, None]]

    def check(self, engine: Engine) -> None:
        """Raise StoreError where the datastore is of another model or tokenizer."""
        prints = self._store.manifest.fingerprints
        check_prints(
            f"the datastore {self.path}", prints, prints_of(engine.model, engine.tokenizer)
        )

    def info(self) -> DatastoreInfo:
        """Return what it holds."""
        prints, files = self._store.manifest.fingerprints, self._store.manifest.files
        return DatastoreInfo(
            path=str(self.path),
            keys=len(self),
            width=self.width,
            documents=len(self.starts) - 1,
            vocab_size=self.vocab_size,
            layer=self.layer,
            search=self.kind,
            bytes=sum(record.size for record in files.values()),
            model=prints["model"],
            tokenizer=prints.get("tokenizer"),
            fits=self.fits_known,
        )


def _facts(engine: Engine, folder: Path, written: KeysWritten, search: str) -> Mapping[str, Any]:
    """Return what the manifest says, temperatures fitted and keys indexed."""
    keys = _mapped(folder / KEYS, "<f2", (written.keys, written.width))
    values = np.asarray(_mapped(folder / VALUES, "<i4", (written.keys,)), np.int64)
    target = engine.target

    def head(states: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            current = states[None].to(target.device, target.dtype)
            return target.head_logits(current, torch.arange(len(states))[None])[0]

    fits = fit(keys, values, NearestKeys(keys), head)
    parameters: Mapping[str, int] = {}
    if search != FLAT:
        vectors = np.asarray(keys, np.float32)
        index = Approximate.build(vectors, search, distances=True)
        index.save(folder / INDEX)
        parameters = index.parameters
    return {
        **asdict(written),
        "vocab_size": target.vocab_size,
        "layer": LAYER,
        "dtype": str(target.dtype),
        "fits": [asdict(each) for each in fits],
        "search": search,
        "search_parameters": dict(parameters),
    }


def _beginning(tokenizer: Any) -> Sequence[int]:
    """Return the tokens that a tokenizer puts before every text."""
    if tokenizer is None or tokenizer.bos_token_id is None:
        return ()
    ids = tokenizer("")["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else ()


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file of plain numbers; raises ValueError where it is of another size."""
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if path.stat().st_size != expected:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, expected {expected}")
    return np.memmap(path, dtype, "r", shape=shape) if expected else np.zeros(shape, dtype)
