"""The catalogue of a corpus on disk, and the view that a reader has of one generation.

A corpus is a store (`storage.store`). Its manifest lists the segments, oldest text first; each is a
folder with a scope and a source. A view is opened once and never changes. The next view reuses the
segments that both have.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ragspec.drafters.method import GLOBAL
from ragspec.engine.plain_text import MARK, encode_text, mark_special_tokens
from ragspec.engine.prompts import well_formed
from ragspec.errors import InputError
from ragspec.retrievers.indexes.segment import FILES, Segment
from ragspec.retrievers.indexes.suffix_array import TokenRow, token_row
from ragspec.storage.manifest import FileRecord, Verify, check_file
from ragspec.storage.store import OpenStore, open_store, parsing, pointer_bytes, read_newest
from ragspec.types import Tokenizer

KIND = "corpus"
BATCH = 256  # documents that are tokenized together

Text = str | Sequence[int] | TokenRow
Texts = Iterable[Text]
ProgressCallback = Callable[[int, int], None]  # documents and tokens so far
Files = tuple[tuple[str, FileRecord], ...]  # of a segment, by name


class SegmentSource(StrEnum):
    """The origin of a segment's text: built from a corpus, or appended while in use."""

    BUILT = "built"
    APPENDED = "appended"


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """The manifest's entry of one segment; tokens and documents are counts."""

    name: str
    scope: str
    source: SegmentSource
    tokens: int
    documents: int


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The parameters of one generation of a corpus.

    Attributes:
        fingerprints: Of the tokenizer and of the model that wrote the texts, if known.
        serial: Number of the next segment; no name is used twice.
        segments: Oldest text first.
    """

    vocab_size: int
    depth: int
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    serial: int = 1
    segments: tuple[SegmentRecord, ...] = ()

    @property
    def parameters(self) -> dict[str, object]:
        """The manifest's parameters, without the fingerprints."""
        return {name: value for name, value in asdict(self).items() if name != "fingerprints"}


def read_catalogue(store: OpenStore) -> Catalogue:
    """Return the catalogue of a checked generation; raise StoreError if it is malformed."""
    parameters = store.manifest.parameters
    with parsing(store.path):
        segments = tuple(
            SegmentRecord(**{**record, "source": SegmentSource(record["source"])})
            for record in parameters["segments"]
        )
        sizes = {name: int(parameters[name]) for name in ("vocab_size", "depth", "serial")}
    return Catalogue(**sizes, fingerprints=store.manifest.fingerprints, segments=segments)


def files_of(store: OpenStore, record: SegmentRecord) -> Files:
    """Return the records of one segment's files; raise StoreError if one is missing."""
    return tuple((name, store.record(name)) for name in (f"{record.name}/{file}" for file in FILES))


def open_segment(
    store: OpenStore, catalogue: Catalogue, record: SegmentRecord, verify: Verify
) -> Segment:
    """Map one segment into memory; raise StoreError if its files do not match the records."""
    for name, each in files_of(store, record):
        check_file(store.path, name, each, verify)
    return Segment.open(store.path / record.name, catalogue.vocab_size, catalogue.depth)


@dataclass(frozen=True, slots=True)
class View:
    """One generation, open.

    Attributes:
        segments: In the order of the catalogue.
        pointer: The pointer file's bytes; a newer generation changes them.
    """

    store: OpenStore
    catalogue: Catalogue
    segments: tuple[Segment, ...]
    pointer: bytes

    def visible(self, scope: str) -> tuple[Segment, ...]:
        """Return the segments of global text and those of the scope."""
        pairs = zip(self.catalogue.segments, self.segments, strict=True)
        return tuple(segment for record, segment in pairs if record.scope in (GLOBAL, scope))


def open_view(root: Path, verify: Verify, *, last: View | None = None) -> View:
    """Check the current generation and open it. A reader that two writers overtake starts again.

    Args:
        verify: "full" hashes every file, "size" compares sizes only.
        last: An older view, whose open segments are reused and not checked again.

    Raises:
        StoreError: The store is missing or damaged.
    """
    reusable: dict[Files, Segment] = {}
    if last is not None:
        pairs = zip(last.catalogue.segments, last.segments, strict=True)
        reusable = {files_of(last.store, record): segment for record, segment in pairs}

    def read() -> View:
        pointer = pointer_bytes(root)
        store = open_store(root, KIND, verify="size")
        catalogue = read_catalogue(store)
        segments = tuple(
            reusable.get(files_of(store, record)) or open_segment(store, catalogue, record, verify)
            for record in catalogue.segments
        )
        return View(store, catalogue, segments, pointer)

    return read_newest(root, read)


def tokenized(
    texts: Texts, tokenizer: "Tokenizer | None", progress: ProgressCallback = lambda *_: None
) -> Iterator[TokenRow]:
    """Yield the token ids of every document [T]; token ids pass unchanged.

    No special tokens are added. Lone surrogates become U+FFFD.

    Args:
        progress: Called after each batch with the documents and tokens so far.

    Raises:
        InputError: A text comes without a tokenizer, or a document is no row of token ids.
    """
    if isinstance(texts, str) or not (hasattr(texts, "__iter__") or hasattr(texts, "__getitem__")):
        raise InputError(f"got {texts!r:.40}; expected a list or stream of texts or of token ids.")
    stream = iter(texts)
    documents = tokens = 0
    while batch := list(islice(stream, BATCH)):
        for row in _rows(batch, tokenizer):
            documents, tokens = documents + 1, tokens + len(row)
            yield row
        progress(documents, tokens)


def chunks(documents: Iterator[TokenRow], most: int) -> Iterator[Iterator[TokenRow]]:
    """Split documents into streams of about `most` tokens; exhaust each before the next."""
    chunk = size = 0

    def chunk_of(document: TokenRow) -> int:
        nonlocal chunk, size
        if size >= most:
            chunk, size = chunk + 1, 0
        size += len(document)
        return chunk

    return (rows for _, rows in groupby(documents, chunk_of))


def _rows(batch: list[Text], tokenizer: "Tokenizer | None") -> Iterator[TokenRow]:
    texts = [mark_special_tokens(well_formed(x), tokenizer) for x in batch if isinstance(x, str)]
    encoded: Iterator[Any] = iter(())
    if texts:
        if tokenizer is None:
            raise InputError("got a text but no tokenizer; pass one, or token ids.")
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        encoded = (
            encode_text(tokenizer, text).ids if MARK in text else row
            for text, row in zip(texts, tokenizer(texts, **options)["input_ids"], strict=True)
        )
    for item in batch:
        yield token_row(next(encoded) if isinstance(item, str) else item)
