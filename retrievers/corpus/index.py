"""The corpus index: much text on disk, growing while it is in use, that drafts for any request.

Immutable segments are mapped into memory; appended text waits in memory, visible at once, until
there is enough for a segment. A request keeps the segments that it saw when it opened. One process
writes at a time, any number read, and every change starts from what is on disk then. Text has a
scope: what a tenant's requests brought in is never offered to another tenant.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from ragspec.drafters.combined import within
from ragspec.drafters.method import GLOBAL
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.buffer import AppendBuffer, segment_in_memory
from ragspec.retrievers.corpus.catalogue import (
    TOKENIZER,
    Catalogue,
    CorpusInfo,
    ProgressCallback,
    SegmentSource,
    Texts,
    View,
    chunks,
    open_view,
    read_pointer,
    tokenized,
)
from ragspec.retrievers.corpus.revision import LARGEST, MERGED, Revision, create, revise
from ragspec.retrievers.fingerprints import (
    check_prints,
    model_fingerprint,
    prints_of,
    same_print,
    tokenizer_fingerprint,
)
from ragspec.retrievers.indexes.continuations import DraftOptions
from ragspec.retrievers.indexes.segment import DEPTH, Segment
from ragspec.retrievers.indexes.suffix_array import checked
from ragspec.storage.manifest import Verify

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.engine.output import Generation
    from ragspec.retrievers.corpus.rest import RestDrafter

REQUEST = "request"
# Tokens of the prompt that are kept in front of a recorded answer, so that its start is found too.
LEAD = 16
FLUSH_TOKENS = 1 << 16
BEHIND = 4  # times `flush_tokens` that wait at most, where the disk refuses them
SHARE = 8  # with a limit, segments have at most this part of it: eviction drops whole ones


class CorpusIndex:
    """Text on disk to draft from; made by `build` or `open`.

    Any number of threads may use it. Close it, or use it as a context manager: what was appended
    last is written then.
    """

    def __init__(
        self, root: Path, view: View, verify: Verify, flush_tokens: int, max_tokens: int | None
    ) -> None:
        if flush_tokens < 1 or (max_tokens is not None and max_tokens < 1):
            raise InputError(
                f"got flush_tokens {flush_tokens}, max_tokens {max_tokens}; expected at least 1."
            )
        self.path = root
        self._view = view
        self._verify: Verify = verify
        self._model = view.catalogue.model  # the fingerprint of whose outputs are appended
        self._buffer = AppendBuffer(view.catalogue.vocab_size, view.catalogue.depth)
        self._flush_tokens = self._flush_at = flush_tokens
        self._max_tokens = max_tokens
        self._closed = False
        self._lock = threading.RLock()
        self._recording: dict[object, Callable[[], None]] = {}
        # Not __del__: when the interpreter ends it would come too late to say anything.
        weakref.finalize(self, _warn_lost, root, self._buffer)

    @classmethod
    def build(
        cls,
        texts_or_tokens: Texts,
        tokenizer: Any,
        out: str | os.PathLike[str],
        *,
        scope: str = GLOBAL,
        model: Any = None,
        vocab_size: int | None = None,
        depth: int = DEPTH,
        segment_tokens: int = LARGEST,
        progress: ProgressCallback = lambda documents, tokens: None,
        **options: Any,
    ) -> CorpusIndex:
        """Write a new corpus, in the place of an older one, and open it.

        Args:
            texts_or_tokens: Texts, or token ids [T] each; streamed, one document after the other.
                None at all makes an empty corpus to append to.
            tokenizer: May be None for token ids, with `vocab_size`, which else is the tokenizer's.
            model: The model (or engine, or fingerprint) that wrote the texts, None where they are
                nobody's outputs.
            depth: See `build_segment`.
            segment_tokens: Most tokens of a segment; building takes up to 24 bytes for each.
            progress: Called with the documents and tokens read so far.
            options: As in `open`.

        Raises:
            InputError, StoreError: What is wrong, and a remedy.
        """
        size = max(vocab_size or 0, 0 if tokenizer is None else len(tokenizer))
        if size < 1:
            raise InputError("got no tokenizer and no vocab_size; expected one of them.")
        checked_scope(scope)
        known = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        documents = checked(tokenized(texts_or_tokens, tokenizer, progress), size)

        def fill(revision: Revision) -> None:
            for piece in chunks(documents, segment_tokens):
                revision.put((), revision.build(piece, scope, SegmentSource.BUILT))

        create(Path(out), Catalogue(size, depth, known, _print_of(model)), fill)
        return cls.open(out, **options)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        model: Any = None,
        verify: Verify = "full",
        flush_tokens: int = FLUSH_TOKENS,
        max_tokens: int | None = None,
    ) -> CorpusIndex:
        """Open a corpus to read and to append to.

        Args:
            tokenizer, model: Where given, the corpus must have been made with these (a corpus that
                is no model's output fits any model).
            verify: "full" hashes every file; "size" compares sizes, which misses changed bytes.
            flush_tokens: Appended tokens that are written together.
            max_tokens: Appended tokens to keep, the oldest go; None keeps all.

        Raises:
            StoreError: Where the corpus is missing, damaged, or made for something else.
        """
        expected = {} if tokenizer is None else {TOKENIZER: tokenizer_fingerprint(tokenizer)}
        root = Path(path)
        view = open_view(root, verify, expected=expected)
        fingerprint = _print_of(model)
        if fingerprint is not None:
            check_model(root, view.catalogue.model, fingerprint)
        return cls(root, view, verify, flush_tokens, max_tokens)

    @property
    def vocab_size(self) -> int:
        """The number of token ids; a request must know all of them."""
        return self._view.catalogue.vocab_size

    @property
    def depth(self) -> int:
        """The tokens to which the segments are sorted: longest match plus deepest draft."""
        return self._view.catalogue.depth

    def segments(self, scope: str = GLOBAL) -> tuple[Segment, ...]:
        """Return what a request of this scope may see, as it is now: global text and its own."""
        with self._lock:
            self._check_open()
            names = dict.fromkeys((GLOBAL, scope))
            waiting = [segment for name in names for segment in self._buffer.segments(name)]
            return (*self._view.visible(scope), *waiting)

    def drafter(self, scope: str = GLOBAL, **options: Any) -> RestDrafter:
        """Return a drafter over what is visible in a scope; options: those of `RestDrafter`.

        Compiled look-ups are loaded now, not in the midst of the first text.

        Raises:
            InputError: The scope or an option is out of range.
        """
        from ragspec.retrievers.corpus.rest import RestDrafter

        checked_scope(scope)
        segment = segment_in_memory([np.zeros(2, np.int32)], self.vocab_size, self.depth)
        segment.longest_match([0], 1)
        segment.draft([0], 1, options=DraftOptions(max_match=1, max_depth=1))
        return RestDrafter(self, scope, **options)

    def append(self, tokens: Sequence[int] | NDArray[Any], *, scope: str) -> None:
        """Add one document of token ids [T]; requests that open after this see it.

        It is on disk after `flush` or `close`, or when enough has come together; a process that is
        killed loses at most that. Where the disk refuses it, a warning says so and a bounded part
        stays in memory.

        Raises:
            InputError, StoreError: Once closed.
        """
        with self._lock:
            self._check_open()
            self._buffer.append(tokens, checked_scope(scope))
            if self._buffer.tokens < self._flush_at:
                return
            try:
                self._flush()
            except Exception as error:
                most = BEHIND * self._flush_tokens
                self._buffer.drop(most - self._flush_tokens)
                self._flush_at = self._buffer.tokens + self._flush_tokens  # then tried again
                warnings.warn(
                    f"{self.path} could not be written ({error}); what was appended stays in "
                    f"memory, at most about {most} tokens of it.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def record(self, engine: Engine, *, scope: str, lead: int = LEAD) -> Callable[[], None]:
        """Append every answer that the engine finishes from now on; returns what ends that.

        Args:
            scope: Who may see the answers; warns where the engine drafts from this corpus, but in
                other scopes alone.
            lead: Tokens of the prompt kept in front of each.

        Raises:
            StoreError: Where the corpus was made with another tokenizer or holds another model's
                outputs: a corpus takes the outputs of one model only.
        """
        checked_scope(scope)
        known = self._view.catalogue.tokenizer
        if known is not None and engine.tokenizer is not None:
            mark = tokenizer_fingerprint(engine.tokenizer)
            if mark != known:
                raise StoreError(
                    f"{self.path} was built with another tokenizer (fingerprint {known[:12]}) than "
                    f"the engine's ({mark[:12]}); record into a store built with that one."
                )
        self._check_open()
        mark = model_fingerprint(engine.model)
        check_model(self.path, self._model, mark)
        self._model = self._model or mark  # the one of the store knows more dtypes
        self._check_read(engine, scope)

        def keep(generation: Generation) -> None:
            before = generation.prompt_tokens[max(0, len(generation.prompt_tokens) - lead) :]
            self.append([*before, *generation.tokens], scope=scope)

        key = object()
        self._recording[key] = engine.on_finish(keep)

        def end() -> None:
            # Not kept: it would keep the engine and its model alive.
            stop = self._recording.pop(key, None)
            if stop is not None:
                stop()

        return end

    def _check_read(self, engine: Engine, scope: str) -> None:
        """Warn where the engine's drafters read this corpus, but never what it records."""
        from ragspec.retrievers.corpus.rest import RestDrafter

        every = () if engine.drafter is None else within(engine.drafter)
        rests = [each for each in every if isinstance(each, RestDrafter)]
        read = {each.scope for each in rests if each.corpus is self}
        if read and scope != GLOBAL and scope not in read:
            warnings.warn(
                f"what {self.path} records in scope {scope!r} is not drafted from by this engine, "
                f"which reads {', '.join(map(repr, sorted(read)))}; use drafter({scope!r}).",
                RuntimeWarning,
                stacklevel=3,
            )

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        """Raise StoreError where the corpus was made with another model or tokenizer."""
        prints = {"tokenizer": self._view.catalogue.tokenizer, "model": self._model}
        check_prints(str(self.path), prints, prints_of(model, tokenizer))

    def flush(self) -> None:
        """Write what was appended to disk now. Raises StoreError."""
        with self._lock:
            self._check_open()
            self._flush()

    def change(self, change: Callable[[Revision], None]) -> None:
        """Flush, make a change of what is on disk, and look at it. Raises StoreError."""
        with self._lock:
            self.flush()
            revise(self.path, change)
            self._adopt()

    def merge(self) -> None:
        """Make one segment of all those of one scope and source. Raises StoreError."""
        self.change(Revision.merge)

    def evict(self, max_tokens: int, *, scope: str | None = None) -> None:
        """Drop the oldest documents until at most `max_tokens` tokens are left.

        Args:
            scope: Of this scope only; None counts all. Merged text has the age of its newest part.

        Raises:
            InputError, StoreError: The number is negative, or the disk cannot be written.
        """
        if max_tokens < 0:
            raise InputError(f"max_tokens is {max_tokens}; expected 0 or more.")
        scope = None if scope is None else checked_scope(scope)

        def evict(revision: Revision) -> None:
            among = [r for r in revision.catalogue.segments if scope in (None, r.scope)]
            revision.evict(max_tokens, among, whole=False)

        self.change(evict)

    def forget(self, scope: str) -> None:
        """Delete all text of a scope, from the disk as well. Raises StoreError."""
        checked_scope(scope)

        def drop(revision: Revision) -> None:
            revision.put([r for r in revision.catalogue.segments if r.scope == scope], None)

        with self._lock:
            self._check_open()
            self._buffer.forget(scope)
            self.change(drop)
            self.change(lambda revision: None)  # the generation before the newest is kept too

    def refresh(self) -> bool:
        """See what other processes wrote meanwhile; return whether there was anything.

        Open requests keep what they see. Raises StoreError.
        """
        with self._lock:
            self._check_open()
            if read_pointer(self.path) == self._view.pointer:
                return False
            self._adopt()
            return True

    def info(self) -> CorpusInfo:
        """Return what the corpus holds."""
        with self._lock:
            known, store = self._view.catalogue, self._view.store
            return CorpusInfo(
                path=str(self.path),
                generation=store.path.name,
                tokens=known.tokens,
                documents=sum(record.documents for record in known.segments),
                bytes=sum(record.size for record in store.manifest.files.values()),
                vocab_size=known.vocab_size,
                depth=known.depth,
                tokenizer=known.tokenizer,
                model=self._model,
                segments=known.segments,
                waiting=self._buffer.tokens,
                dropped=self._buffer.dropped,
            )

    def close(self) -> None:
        """Stop recording, write what waits, and release the files.

        Where it cannot be written, StoreError is raised and the corpus stays open.
        """
        with self._lock:
            if self._closed:
                return
            while self._recording:
                self._recording.popitem()[1]()
            self._flush()
            self._closed = True
            self._view = replace(self._view, segments=())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.path} was closed; open it again.")

    def _flush(self) -> None:
        if self._buffer.tokens:
            revise(self.path, self._add)
            self._buffer.clear()
            self._flush_at = self._flush_tokens
            self._adopt()

    def _add(self, revision: Revision) -> None:
        """Add what waits to a generation, and evict beyond the limit."""
        known = revision.catalogue
        self._check_same(known)
        if self._model is not None:
            check_model(self.path, known.model, self._model)
            revision.catalogue = replace(known, model=known.model or self._model)
        limit, largest = self._max_tokens, MERGED
        if limit is not None:
            largest = min(MERGED, max(self._flush_tokens, limit // SHARE))
        for scope, documents in self._buffer.documents().items():
            revision.append(documents, scope, largest)
        if limit is not None:
            source = SegmentSource.APPENDED
            among = [r for r in revision.catalogue.segments if r.source is source]
            revision.evict(limit, among, whole=True)

    def _adopt(self) -> None:
        """Let readers see the newest generation."""
        view = open_view(self.path, self._verify, last=self._view)
        self._check_same(view.catalogue)
        self._view = view
        self._model = view.catalogue.model or self._model

    def _check_same(self, catalogue: Catalogue) -> None:
        """Raise StoreError where another process built the corpus again for something else."""
        known = self._view.catalogue
        before = (known.tokenizer, known.vocab_size, known.depth)
        if (catalogue.tokenizer, catalogue.vocab_size, catalogue.depth) != before:
            raise StoreError(
                f"{self.path} was built again meanwhile, with another tokenizer, vocabulary or "
                f"depth (now {catalogue.vocab_size} ids sorted to {catalogue.depth} tokens, before "
                f"{known.vocab_size} to {known.depth}); open it again."
            )


def _warn_lost(root: Path, buffer: AppendBuffer) -> None:
    if buffer.tokens:
        warnings.warn(
            f"{root} was never closed: {buffer.tokens} appended tokens are lost.",
            ResourceWarning,
            stacklevel=2,
        )


def check_model(root: Path, mark: str | None, expected: str) -> None:
    """Raise StoreError where a corpus holds the outputs of another model."""
    if mark is not None and not same_print(mark, expected):
        raise StoreError(
            f"{root} holds outputs of another model (fingerprint {mark[:12]}, expected "
            f"{expected[:12]}): they draft badly for this one. Make a store of this model's own "
            "outputs, or use the model that it was made with."
        )


def checked_scope(scope: str) -> str:
    """Return the scope; raises InputError for one that no store keeps."""
    if not isinstance(scope, str) or not scope.strip():
        raise InputError(f"scope is {scope!r}; expected 'global' or the name of a tenant.")
    if scope == REQUEST:
        raise InputError(
            "scope 'request' is text that stays with its request: it is drafted from by the "
            "context drafter and never stored; name a tenant, or 'global'."
        )
    return scope


def _print_of(model: Any) -> str | None:
    """Return the fingerprint of a model, of an engine's model, or the one that was given."""
    if model is None or isinstance(model, str):
        return model
    return model_fingerprint(model if hasattr(model, "named_parameters") else model.model)
