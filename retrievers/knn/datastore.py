"""A datastore: the model's hidden state before every token of some texts, and that token.

The memory of a kNN language model (Khandelwal et al. 2020, arXiv 1911.00172, section 2). Keys are
the input of the output head. The paper takes the input of the last feed-forward layer, which was
slightly better for its model but does not exist in every model. Keys are float16. The store is
whole or absent.
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
from torch import Tensor

from ragspec.errors import DocumentError, InputError, StoreError
from ragspec.retrievers.corpus.catalogue import ProgressCallback, Texts, tokenized
from ragspec.retrievers.fingerprints import check_prints, prints_of
from ragspec.retrievers.knn.keys import KEYS, STARTS, VALUES, KeyReader, KeysWritten, write_keys
from ragspec.retrievers.knn.neighbours import Fit, NearestKeys, Neighbours, fit_temperature
from ragspec.retrievers.search.nearest import Floats, Numbers
from ragspec.storage.manifest import Contents, Verify
from ragspec.storage.store import OpenStore, open_store, publish

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine

KIND = "datastore"
LAYER = "input of the output head"
MOST_KEYS = 1_000_000


@dataclass(frozen=True, slots=True)
class DatastoreInfo:
    """The contents of a datastore, with the fitted temperature of its distances."""

    path: str
    keys: int
    width: int
    documents: int
    vocab_size: int
    layer: str
    bytes: int
    model: str
    tokenizer: str | None
    fit: Fit

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
        self.fit = Fit(**facts["fit"])
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
        progress: ProgressCallback = lambda documents, keys: None,
    ) -> Datastore:
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
        if max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}; expected at least 1.")
        reader = KeyReader(engine.target, _beginning(engine.tokenizer))
        rows = tokenized(texts, engine.tokenizer)

        def fill(folder: Path) -> Contents:
            written = write_keys(folder, rows, reader, max_tokens, progress)
            if not written.keys:
                raise DocumentError(
                    "the texts hold no two tokens in a row; no datastore was written. Name texts."
                )
            return Contents(
                _facts(engine, folder, written), prints_of(engine.model, engine.tokenizer)
            )

        publish(Path(out), KIND, fill)
        return cls.open(out, verify="size")

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: Verify = "full") -> Datastore:
        """Open a datastore that `build` wrote.

        Args:
            verify: "full" hashes every file, "size" compares sizes only.

        Raises:
            StoreError: The store is missing, damaged or of another kind.
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
    def near(self) -> NearestKeys:
        """The search among the keys."""
        return NearestKeys(self.keys)

    def search(self, states: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest keys of each state f32 [Q, H].

        Raises:
            InputError: The states have another width than the keys.
        """
        if states.shape[1] != self.width:
            raise InputError(
                f"got states of {states.shape[1]} numbers, the datastore has {self.width}; "
                "expected those of the model that it was built with."
            )
        return self.near.search(states, k)

    def following(self, numbers: Numbers, count: int) -> Numbers:
        """Return each key and the `count` next ones of its text: [k] -> [k * (count + 1)] or fewer.

        The keys of the first number come first.
        """
        ends = self.starts[np.searchsorted(self.starts, numbers, side="right")]
        following: Numbers = numbers[:, None] + np.arange(count + 1)
        return following[following < ends[:, None]]

    def check(self, engine: Engine) -> None:
        """Raise StoreError if the datastore was made with another model or tokenizer."""
        expected = prints_of(engine.model, engine.tokenizer)
        check_prints(f"the datastore {self.path}", self._store.manifest.fingerprints, expected)

    def info(self) -> DatastoreInfo:
        """Return the contents of the datastore."""
        prints, files = self._store.manifest.fingerprints, self._store.manifest.files
        return DatastoreInfo(
            path=str(self.path),
            keys=len(self),
            width=self.width,
            documents=len(self.starts) - 1,
            vocab_size=self.vocab_size,
            layer=self.layer,
            bytes=sum(record.size for record in files.values()),
            model=prints["model"],
            tokenizer=prints.get("tokenizer"),
            fit=self.fit,
        )


def _facts(engine: Engine, folder: Path, written: KeysWritten) -> Mapping[str, Any]:
    """Fit the temperature and return the parameters of the manifest."""
    keys = _mapped(folder / KEYS, "<f2", (written.keys, written.width))
    values = np.asarray(_mapped(folder / VALUES, "<i4", (written.keys,)), np.int64)
    target = engine.target

    def head(states: Tensor) -> Tensor:
        with torch.no_grad():
            rows = states[None].to(target.device, target.dtype)
            return target.head_logits(rows, torch.arange(len(states))[None])[0]

    return {
        **asdict(written),
        "vocab_size": target.vocab_size,
        "layer": LAYER,
        "dtype": str(target.dtype),
        "fit": asdict(fit_temperature(keys, values, head)),
    }


def _beginning(tokenizer: Any) -> Sequence[int]:
    """Return the tokens that a tokenizer puts before every text."""
    if tokenizer is None or tokenizer.bos_token_id is None:
        return ()
    ids = tokenizer("")["input_ids"]
    return ids[:1] if ids[:1] == [tokenizer.bos_token_id] else ()


def _mapped(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file of plain numbers into memory; raise ValueError if it has another size."""
    expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if path.stat().st_size != expected:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, expected {expected}")
    return np.memmap(path, dtype, "r", shape=shape) if expected else np.zeros(shape, dtype)
