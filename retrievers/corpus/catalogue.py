"""What a corpus on disk says about itself, and the view that readers have of one generation.

A corpus is one store (`storage.store`) whose manifest lists its segments, oldest text first, each a
folder with a scope and a source. A view is opened once and never changes; the next one takes over
the segments that are still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ragspec.drafters.method import GLOBAL
from ragspec.engine.prompts import well_formed
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.indexes.segment import FILES, Segment
from ragspec.retrievers.indexes.suffix_array import token_row
from ragspec.storage.manifest import FileRecord, Verify, check_file
from ragspec.storage.store import POINTER, OpenStore, open_store

KIND = "corpus"
MODEL, TOKENIZER = "model", "tokenizer"


class SegmentSource(StrEnum):
    """How a segment's text came in: built from a corpus, or appended while in use."""

    BUILT = "built"
    APPENDED = "appended"


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """What the manifest says about one segment; tokens and documents are counts."""

    name: str
    scope: str
    source: SegmentSource
    tokens: int
    documents: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The parameters of one generation: its segments, oldest text first.

    serial: the number of the next segment; a name is never given twice. model: the fingerprint of
    the model whose outputs are in it, None where there are none.
    """

    vocab_size: int
    depth: int
    tokenizer: str | None = None
    model: str | None = None
    serial: int = 1
    segments: tuple[SegmentRecord, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens in all segments."""
        return sum(record.tokens for record in self.segments)

    @property
    def fingerprints(self) -> dict[str, str]:
        """What the store was made with, as the manifest has it."""
        pairs = {TOKENIZER: self.tokenizer, MODEL: self.model}
        return {name: value for name, value in pairs.items() if value is not None}

    @property
    def parameters(self) -> dict[str, Any]:
        """What the manifest keeps beside the fingerprints."""
        return {
            "vocab_size": self.vocab_size,
            "depth": self.depth,
            "serial": self.serial,
            "segments": [asdict(record) for record in self.segments],
        }


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """What a corpus holds; counts are of tokens and documents, bytes of the files on disk.

    tokenizer, model: fingerprints of what it was made with. segments: oldest text first. waiting:
    tokens that were appended and are in memory only. dropped: tokens lost because they could not
    be written.
    """

    path: str
    generation: str
    tokens: int
    documents: int
    bytes: int
    vocab_size: int
    depth: int
    tokenizer: str | None
    model: str | None
    segments: tuple[SegmentRecord, ...]
    waiting: int = 0
    dropped: int = 0

    @property
    def scopes(self) -> dict[str, int]:
        """Tokens on disk by scope."""
        fields: dict[str, int] = {}
        for record in self.segments:
            fields[record.scope] = fields.get(record.scope, 0) + record.tokens
        return fields

    def as_dict(self) -> dict[str, Any]:
        """Return the whole as what JSON can hold."""
        return asdict(self) | {"scopes": self.scopes}


def read_catalogue(store: OpenStore) -> Catalogue:
    """Return what a checked generation holds; raises StoreError where that makes no sense."""
    parameters, prints = store.manifest.parameters, store.manifest.fingerprints
    try:
        segments = tuple(
            SegmentRecord(
                str(raw["name"]), str(raw["scope"]), SegmentSource(raw["source"]),
                int(raw["tokens"]), int(raw["documents"]),
            )
            for raw in parameters["segments"]
        )  # fmt: skip
        sizes = (int(parameters[name]) for name in ("vocab_size", "depth", "serial"))
        vocab_size, depth, serial = sizes
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{store.path} cannot be read ({error}); build it again.") from error
    return Catalogue(
        vocab_size, depth, prints.get(TOKENIZER), prints.get(MODEL), serial, segments
    )  # fmt: skip


def read_pointer(root: Path) -> bytes:
    """Return the pointer file's bytes, empty where it cannot be read."""
    try:
        return (root / POINTER).read_bytes()
    except OSError:
        return b""


def files_of(store: OpenStore, record: SegmentRecord) -> dict[str, FileRecord]:
    """Return the records of the files of one segment, by name; raises StoreError without one."""
    fields: dict[str, FileRecord] = {}
    for file in FILES:
        name = f"{record.name}/{file}"
        if name not in store.manifest.files:
            raise StoreError(f"{store.path} lists no file {name}; build the store again.")
        fields[name] = store.manifest.files[name]
    return fields


def open_segment(store: OpenStore, record: SegmentRecord, verify: Verify) -> Segment:
    """Map one segment; raises StoreError where its files are not those of its records."""
    for name, each in files_of(store, record).items():
        check_file(store.path, name, each, verify)
    segment = Segment.open(store.path / record.name)
    result = (len(segment), segment.document_count)
    if result != (record.tokens, record.documents):
        raise StoreError(
            f"{store.path / record.name} holds {result} tokens and documents, expected "
            f"{(record.tokens, record.documents)}; build the store again."
        )
    return segment


@dataclass(frozen=True, slots=True)
class View:
    """One generation, open: its segments in the order of the catalogue.

    pointer: the bytes that named it, by which a newer one is noticed.
    """

    store: OpenStore
    catalogue: Catalogue
    segments: tuple[Segment, ...]
    pointer: bytes

    def visible(self, scope: str) -> tuple[Segment, ...]:
        """Return the segments that everybody sees, and those of the scope itself."""
        pairs = zip(self.catalogue.segments, self.segments, strict=True)
        return tuple(segment for record, segment in pairs if record.scope in (GLOBAL, scope))


def open_view(
    root: Path,
    verify: Verify,
    *,
    expected: Mapping[str, str] | None = None,
    last: View | None = None,
) -> View:
    """Check the current generation and open it.

    verify: "full" hashes every file, "size" compares sizes only. expected: fingerprints that the
    store must have. last: an older view; what it has open is taken over and not checked again.
    A reader that is overtaken by two writers begins again. Raises StoreError.
    """
    if verify not in ("full", "size"):
        raise InputError(f"verify is {verify!r}; expected 'full' or 'size'.")
    while True:
        pointer = read_pointer(root)
        try:
            store = open_store(root, KIND, verify="size", fingerprints=expected)
            catalogue = read_catalogue(store)
            known = _open_segments(last)
            segments = tuple(
                known.get(_identity(store, record)) or open_segment(store, record, verify)
                for record in catalogue.segments
            )
        except StoreError:
            if pointer == read_pointer(root):
                raise
            continue
        return View(store, catalogue, segments, pointer)


_Identity = tuple[tuple[str, FileRecord], ...]


def _identity(store: OpenStore, record: SegmentRecord) -> _Identity:
    return tuple(files_of(store, record).items())


def _open_segments(view: View | None) -> dict[_Identity, Segment]:
    if view is None:
        return {}
    pairs = zip(view.catalogue.segments, view.segments, strict=True)
    return {_identity(view.store, record): segment for record, segment in pairs}


Texts = Iterable[str | Sequence[int] | NDArray[Any]]


ProgressCallback = Callable[[int, int], None]


BATCH = 256


def tokenized(
    texts: Texts, tokenizer: Any, progress: ProgressCallback = lambda documents, tokens: None
) -> Iterator[NDArray[Any]]:
    """Yield the token ids of every document [T], those that are token ids already as they are.

    No special tokens are added; lone surrogates become U+FFFD. progress: called with the documents
    and tokens so far, once a batch. Raises InputError for a text without a tokenizer.
    """
    if isinstance(texts, str):
        raise InputError("got one text; expected a list or a stream of texts or of token ids.")
    stream = iter(texts)
    documents = tokens = 0
    while batch := list(islice(stream, BATCH)):
        for row in _rows(batch, tokenizer):
            documents, tokens = documents + 1, tokens + len(row)
            yield row
        progress(documents, tokens)


def chunks(documents: Iterator[NDArray[Any]], most: int) -> Iterator[Iterator[NDArray[Any]]]:
    """Yield streams of documents of about `most` tokens each; use up one before the next."""
    for first in documents:
        yield _piece(first, documents, most)


def _piece(first: NDArray[Any], rest: Iterator[NDArray[Any]], most: int) -> Iterator[NDArray[Any]]:
    size = 0
    for document in chain((first,), rest):
        yield document
        size += len(document)
        if size >= most:
            return


def _rows(batch: list[Any], tokenizer: Any) -> Iterator[NDArray[Any]]:
    texts = [well_formed(item) for item in batch if isinstance(item, str)]
    if texts and tokenizer is None:
        raise InputError("got a text but no tokenizer; pass one, or token ids.")
    result: Iterator[Any] = iter(())
    if texts:
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        result = iter(tokenizer(texts, **options)["input_ids"])
    for item in batch:
        yield token_row(next(result) if isinstance(item, str) else item)
