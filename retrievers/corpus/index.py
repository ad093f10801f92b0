"""The corpus index: text on disk that grows while in use and drafts for any request.

Immutable segments are mapped into memory. Appended text waits in memory, visible at once, until
there is enough for a segment. A request keeps the segments that were visible when it opened. One
process writes at a time and any number read; every change starts from the newest generation on
disk. Text has a scope: the text of one tenant is never offered to another.
"""

import os
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ragspec.drafters.fuse import within
from ragspec.drafters.method import GLOBAL
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.catalogue import (
    Catalogue,
    SegmentSource,
    Texts,
    View,
    chunks,
    open_view,
    tokenized,
)
from ragspec.retrievers.corpus.rest import RestDrafter
from ragspec.retrievers.corpus.revision import LARGEST, MERGED, AppendBuffer, Revision, revise
from ragspec.retrievers.fingerprints import check_prints, prints_of
from ragspec.retrievers.indexes.segment import DEPTH, Segment, segment_in_memory
from ragspec.retrievers.indexes.suffix_array import TokenRow, checked
from ragspec.sampling.settings import checked_count
from ragspec.storage.filesystem import expect_path
from ragspec.storage.manifest import Verify
from ragspec.storage.store import checked_scope, pointer_bytes
from ragspec.types import PreTrainedModel, Tokenizer

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.reports.generation import Generation

LEAD = 16  # prompt tokens stored in front of a recorded answer, so that its start matches too
FLUSH_TOKENS = 1 << 16
BEHIND = 4  # if the disk refuses text, at most so many times `flush_tokens` wait in memory
SHARE = 8  # a segment has at most 1/8 of `max_tokens`, since eviction drops whole segments


class CorpusIndex:
    """Text on disk to draft from; made by `build` or `open`.

    Any number of threads may use it. Close it to write the text that was appended last.

    Raises:
        StoreError: By every method, if the corpus is closed or cannot be read or written.
    """

    def __init__(
        self, root: Path, view: View, verify: Verify, flush_tokens: int, max_tokens: int | None
    ) -> None:
        self.path, self._view, self._max_tokens = root, view, max_tokens
        self._verify: Verify = verify
        # Fingerprint of the model that writes appended text.
        self._model = view.catalogue.fingerprints.get("model")
        self._buffer = AppendBuffer(view.catalogue.vocab_size, view.catalogue.depth)
        self._flush_tokens = self._flush_at = flush_tokens
        self._closed = False
        self._lock = threading.RLock()
        self._recording: dict[object, Callable[[], object]] = {}
        # Not __del__: at interpreter exit it would run too late to warn.
        weakref.finalize(self, _warn_lost, root, self._buffer)

    @classmethod
    def build(
        cls,
        texts_or_tokens: Texts,
        tokenizer: "Tokenizer | int",
        out: str | os.PathLike[str],
        *,
        scope: str = GLOBAL,
        model: "PreTrainedModel | Engine | str | None" = None,
        depth: int = DEPTH,
        segment_tokens: int = LARGEST,
        **options: Any,
    ) -> "CorpusIndex":
        """Write a new corpus, in place of an older one, and open it.

        Args:
            texts_or_tokens: Texts, or token ids [T] each, streamed one document at a time. An empty
                stream makes an empty corpus to append to. `tokenized` streams with a callback.
            tokenizer: For token ids, the size of the vocabulary.
            model: The model (or engine, or fingerprint) that wrote the texts, None if no model did.
            depth: See `build_segment`.
            segment_tokens: Most tokens of a segment; building takes up to 24 bytes for each.
            options: As in `open`.

        Raises:
            InputError: An argument or a document is out of range.
            StoreError: `out` holds another kind of store or cannot be written.
        """
        _check_open_options(**options)
        encoder = None if isinstance(tokenizer, int) else tokenizer
        count = tokenizer if encoder is None else len(encoder)
        size = checked_count(count, "tokenizer, or the size of the vocabulary,")
        checked_scope(scope)
        catalogue = Catalogue(size, checked_count(depth, "depth", 2), prints_of(model, encoder))
        documents = checked(tokenized(texts_or_tokens, encoder), size)

        def fill(revision: Revision) -> None:
            for piece in chunks(documents, checked_count(segment_tokens, "segment_tokens")):
                revision.write(piece, scope, SegmentSource.BUILT)

        revise(expect_path(out, "the corpus"), fill, new=catalogue)
        return cls.open(out, **options)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: "Tokenizer | None" = None,
        model: "PreTrainedModel | Engine | str | None" = None,
        verify: Verify = "full",
        flush_tokens: int = FLUSH_TOKENS,
        max_tokens: int | None = None,
    ) -> "CorpusIndex":
        """Open a corpus; raise StoreError if it is missing, damaged or does not fit.

        Args:
            tokenizer, model: What the corpus must have been made with, None for anything. Text that
                no model wrote fits every model, token ids of no known tokenizer every tokenizer.
            verify: "full" hashes every file; "size" compares sizes, which misses changed bytes.
            flush_tokens: Appended tokens that are written together.
            max_tokens: Most appended tokens to keep, None for all; the oldest segments go first.
        """
        _check_open_options(verify, flush_tokens, max_tokens)
        root = expect_path(path, "the corpus")
        view = open_view(root, verify)
        check_prints(str(root), view.catalogue.fingerprints, prints_of(model, tokenizer))
        return cls(root, view, verify, flush_tokens, max_tokens)

    @property
    def vocab_size(self) -> int:
        """The number of token ids; the model of a request must know all of them."""
        return self._view.catalogue.vocab_size

    @property
    def depth(self) -> int:
        """Tokens to which the segments are sorted: the longest match plus the deepest draft."""
        return self._view.catalogue.depth

    def segments(self, scope: str = GLOBAL) -> tuple[Segment, ...]:
        """Return the segments visible now, which are those of global text and of the scope."""
        with self._lock:
            self._check_open()
            names = dict.fromkeys((GLOBAL, scope))
            waiting = [segment for name in names for segment in self._buffer.segments(name)]
            return (*self._view.visible(scope), *waiting)

    def drafter(self, scope: str = GLOBAL, **options: Any) -> RestDrafter:
        """Return a drafter over the text visible in a scope, with the options of `RestDrafter`.

        The compiled look-ups are loaded now, not during the first request.

        Raises:
            InputError: The scope or an option is out of range.
        """
        drafter = RestDrafter(self, scope, **options)
        segment_in_memory([np.zeros(2, np.int32)], self.vocab_size, self.depth).warm_up()
        return drafter

    def append(self, tokens: Sequence[int] | TokenRow, *, scope: str) -> None:
        """Append one document of token ids [T]; requests that open afterwards see it.

        `flush`, `close`, or enough further text writes it to disk; a killed process loses only
        unwritten text. If the disk refuses the text, a warning is issued and a bounded part stays
        in memory.

        Raises:
            InputError: The scope or a token id is out of range.
        """
        with self._lock:
            self._check_open()
            self._buffer.append(tokens, checked_scope(scope))
            if self._buffer.tokens < self._flush_at:
                return
            try:
                self.flush()
            except Exception as error:
                most = BEHIND * self._flush_tokens
                self._buffer.drop(most - self._flush_tokens)
                self._flush_at = self._buffer.tokens + self._flush_tokens  # the next attempt
                warnings.warn(
                    f"{self.path} could not be written ({error}); what was appended stays in "
                    f"memory, at most about {most} tokens of it.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def record(self, engine: "Engine", *, scope: str, lead: int = LEAD) -> Callable[[], object]:
        """Append every answer that the engine finishes from now on; return a function to stop it.

        Args:
            scope: Scope of the answers. A warning is issued if the engine drafts from this corpus,
                but only in other scopes.
            lead: Prompt tokens stored in front of each answer.

        Raises:
            StoreError: The corpus was made with another tokenizer, or holds the outputs of another
                model: a corpus takes the outputs of one model only.
        """
        checked_scope(scope)
        self._check_open()
        prints = prints_of(engine.model, engine.tokenizer)
        check_prints(str(self.path), self._prints, prints)
        self._model = self._model or prints["model"]  # the store's may cover more dtypes
        every = () if engine.drafter is None else within(engine.drafter)
        read = {r.scope for r in every if isinstance(r, RestDrafter) and r.corpus is self}
        if read and scope != GLOBAL and scope not in read:
            warnings.warn(
                f"what {self.path} records in scope {scope!r} is not drafted from by this engine, "
                f"which reads {', '.join(map(repr, sorted(read)))}; use drafter({scope!r}).",
                RuntimeWarning,
                stacklevel=2,
            )

        def keep(generation: "Generation") -> None:
            before = generation.prompt_tokens[max(0, len(generation.prompt_tokens) - lead) :]
            self.append([*before, *generation.tokens], scope=scope)

        key = object()
        self._recording[key] = engine.on_finish(keep)
        # Popped, since the callback would keep the engine and its model alive.
        return lambda: self._recording.pop(key, lambda: None)()

    def fits(self, model: object = None, tokenizer: object = None) -> None:
        """Raise StoreError if the corpus was made with another model or tokenizer."""
        check_prints(str(self.path), self._prints, prints_of(model, tokenizer))

    @property
    def _prints(self) -> dict[str, str | None]:
        """The fingerprints of the tokenizer, and of the model that writes appended text."""
        return {**self._view.catalogue.fingerprints, "model": self._model}

    def flush(self) -> None:
        """Write the appended text to disk now."""
        with self._lock:
            self._check_open()
            if self._buffer.tokens:
                revise(self.path, self._add)
                self._buffer.clear()
                self._flush_at = self._flush_tokens
                self._adopt()

    def change(self, change: Callable[[Revision], None]) -> None:
        """Flush, change the corpus on disk, and adopt the new generation."""
        with self._lock:
            self.flush()
            revise(self.path, change)
            self._adopt()

    def forget(self, scope: str) -> None:
        """Delete all text of a scope, on disk too."""
        checked_scope(scope)

        def drop(revision: Revision) -> None:
            revision.drop([r for r in revision.catalogue.segments if r.scope == scope])

        with self._lock:
            self._check_open()
            self._buffer.forget(scope)
            self.change(drop)
            self.change(lambda revision: None)  # the store keeps the previous generation too

    def refresh(self) -> bool:
        """Adopt what other processes wrote meanwhile; return whether there was anything.

        Open requests keep their segments.
        """
        with self._lock:
            self._check_open()
            newer = pointer_bytes(self.path) != self._view.pointer
            if newer:
                self._adopt()
            return newer

    def info(self) -> dict[str, Any]:
        """Return the contents of the corpus as JSON types.

        `segments` has the oldest text first, `tokens` and `documents` are those on disk. `waiting`
        counts appended tokens that are in memory only, plus one for each document, and `dropped`
        those of text that was lost because it could not be written.
        """
        with self._lock:
            catalogue, store = self._view.catalogue, self._view.store
            scopes = Counter[str]()
            for record in catalogue.segments:
                scopes[record.scope] += record.tokens
            return {
                "path": str(self.path),
                "generation": store.path.name,
                "tokens": sum(record.tokens for record in catalogue.segments),
                "documents": sum(record.documents for record in catalogue.segments),
                "bytes": sum(record.size for record in store.manifest.files.values()),
                "vocab_size": catalogue.vocab_size,
                "depth": catalogue.depth,
                "segments": catalogue.parameters["segments"],
                "scopes": dict(scopes),
                "tokenizer": catalogue.fingerprints.get("tokenizer"),
                "model": self._model,
                "waiting": self._buffer.tokens,
                "dropped": self._buffer.dropped,
            }

    def close(self) -> None:
        """Stop recording, write the waiting text, and release the files.

        If the text cannot be written, the corpus stays open.
        """
        with self._lock:
            if self._closed:
                return
            while self._recording:
                self._recording.popitem()[1]()
            self.flush()
            self._closed = True
            self._view = replace(self._view, segments=())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path} was closed; open it again.")

    def _add(self, revision: Revision) -> None:
        """Add the waiting text to a generation, and evict beyond the limit."""
        catalogue = revision.catalogue
        self._check_same(catalogue)
        if self._model is not None:
            check_prints(str(self.path), catalogue.fingerprints, {"model": self._model})
            prints = {"model": self._model, **catalogue.fingerprints}
            revision.catalogue = replace(catalogue, fingerprints=prints)
        limit = sys.maxsize if self._max_tokens is None else self._max_tokens
        largest = min(MERGED, max(self._flush_tokens, limit // SHARE))
        for scope, documents in self._buffer.documents.items():
            ends = np.cumsum([len(document) for document in reversed(documents)])
            first = len(documents) - int(np.searchsorted(ends, limit, "right"))
            revision.append(documents[first:], scope, largest)  # the newest; evicted as a whole
        revision.evict(limit)

    def _adopt(self) -> None:
        """Open the newest generation for the requests to come."""
        view = open_view(self.path, self._verify, last=self._view)
        self._check_same(view.catalogue)
        self._view = view
        self._model = view.catalogue.fingerprints.get("model", self._model)

    def _check_same(self, catalogue: Catalogue) -> None:
        """Raise StoreError if another process built the corpus again with other parameters."""
        old = self._view.catalogue
        both = [(e.fingerprints.get("tokenizer"), e.vocab_size, e.depth) for e in (catalogue, old)]
        if both[0] != both[1]:
            raise StoreError(
                f"{self.path} was built again meanwhile, with another tokenizer, vocabulary or "
                f"depth (now {catalogue.vocab_size} ids sorted to {catalogue.depth} tokens, before "
                f"{old.vocab_size} to {old.depth}); open it again."
            )


def _check_open_options(
    verify: Verify = "full", flush_tokens: int = FLUSH_TOKENS, max_tokens: int | None = None
) -> None:
    """Raise InputError for an option of `CorpusIndex.open` that is out of range."""
    if verify not in ("full", "size"):
        raise InputError(f"verify is {verify!r}; expected 'full' or 'size'.")
    checked_count(flush_tokens, "flush_tokens")
    checked_count(1 if max_tokens is None else max_tokens, "max_tokens")


def _warn_lost(root: Path, buffer: AppendBuffer) -> None:
    if buffer.tokens:
        warnings.warn(
            f"{root} was never closed: {buffer.tokens} appended tokens are lost.",
            ResourceWarning,
            stacklevel=2,
        )
