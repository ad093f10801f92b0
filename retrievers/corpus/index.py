"""The corpus index: much text on disk, growing while it is in use, that drafts for any request.

Immutable segments are mapped into memory and published as one tuple; text that is appended waits in
a bounded log, visible at once, until a thread seals it into a segment and merges what has become
small. The caller that opened a request keeps what it saw. One process writes at a time, any number
read. Text has a scope: what a tenant's requests brought in is never offered to another tenant.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from ragspec.drafters.combined import within
from ragspec.drafters.method import GLOBAL
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.catalogue import (
    TOKENIZER,
    Catalogue,
    CorpusInfo,
    ProgressCallback,
    SegmentSource,
    Texts,
    chunks,
    open_view,
    tokenized,
)
from ragspec.retrievers.corpus.revision import LARGEST, Revision, create
from ragspec.retrievers.corpus.writer import SEAL_TOKENS, CorpusWriter, check_model
from ragspec.retrievers.fingerprints import (
    check_prints,
    model_fingerprint,
    prints_of,
    tokenizer_fingerprint,
)
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


class CorpusIndex:
    """Text on disk to draft from; made by `build` or `open`.

    Any number of threads may use it. Close it, or use it as a context manager: what was appended
    last is written then.
    """

    def __init__(self, writer: CorpusWriter) -> None:
        self._writer = writer
        self._recording: dict[object, Callable[[], None]] = {}
        # Not __del__: when the interpreter ends it would come too late to say anything.
        weakref.finalize(self, _warn_lost, writer)

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
        seal_tokens: int = SEAL_TOKENS,
        max_tokens: int | None = None,
    ) -> CorpusIndex:
        """Open a corpus to read and to append to.

        Args:
            tokenizer, model: Where given, the corpus must have been made with these (a corpus that
                is no model's output fits any model).
            verify: "full" hashes every file; "size" compares sizes, which misses changed bytes.
            seal_tokens: Appended tokens that are written together.
            max_tokens: Appended tokens to keep, the oldest go; None keeps all.

        Raises:
            StoreError: Where the corpus is missing, damaged, or made for something else.
        """
        expected = {} if tokenizer is None else {TOKENIZER: tokenizer_fingerprint(tokenizer)}
        root = Path(path)
        view = open_view(root, verify, expected=expected)
        selection = _print_of(model)
        if selection is not None:
            check_model(root, view.catalogue.model, selection)
        return cls(CorpusWriter(root, view, verify, seal_tokens, max_tokens))

    @property
    def path(self) -> Path:
        """The folder of the corpus."""
        return self._writer.root

    @property
    def vocab_size(self) -> int:
        """The number of token ids; a request must know all of them."""
        return self._writer.view.catalogue.vocab_size

    @property
    def depth(self) -> int:
        """The tokens to which the segments are sorted: longest match plus deepest draft."""
        return self._writer.view.catalogue.depth

    def segments(self, scope: str = GLOBAL) -> tuple[Segment, ...]:
        """Return what a request of this scope may see, as it is now: global text and its own."""
        return self._writer.segments(scope)

    def drafter(self, scope: str = GLOBAL, **options: Any) -> RestDrafter:
        """Return a drafter over what is visible in a scope; options: those of `RestDrafter`.

        Compiled look-ups are loaded now, not in the midst of the first text.

        Raises:
            InputError: What is wrong, and a remedy.
        """
        from ragspec.retrievers.corpus.rest import RestDrafter

        checked_scope(scope)
        self._writer.warm_up()
        return RestDrafter(self, scope, **options)

    def append(self, tokens: Sequence[int] | NDArray[Any], *, scope: str) -> None:
        """Add one document of token ids [T]; requests that open after this see it.

        It is on disk after `seal` or `close`, or when enough has come together; a process that is
        killed loses at most that.

        Raises:
            InputError, StoreError: Once closed.
        """
        self._writer.append(tokens, checked_scope(scope))

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
        known = self._writer.view.catalogue.tokenizer
        if known is not None and engine.tokenizer is not None:
            result = tokenizer_fingerprint(engine.tokenizer)
            if result != known:
                raise StoreError(
                    f"{self.path} was built with another tokenizer (fingerprint {known[:12]}) than "
                    f"the engine's ({result[:12]}); record into a store built with that one."
                )
        self._writer.set_model(model_fingerprint(engine.model))
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
        known = self._writer.view.catalogue
        record = {"tokenizer": known.tokenizer, "model": known.model or self._writer.model}
        check_prints(str(self.path), record, prints_of(model, tokenizer))

    def seal(self) -> None:
        """Write what was appended to disk now. Raises StoreError."""
        self._writer.seal()

    def merge(self) -> None:
        """Make one segment of all those of one scope and source. Raises StoreError."""
        self._writer.seal()
        self._writer.change(Revision.merge)

    def evict(self, max_tokens: int, *, scope: str | None = None) -> None:
        """Drop the oldest documents until at most `max_tokens` tokens are left.

        Args:
            scope: Of this scope only; None counts all. Merged text has the age of its newest part.

        Raises:
            InputError, StoreError: What is wrong, and a remedy.
        """
        if max_tokens < 0:
            raise InputError(f"max_tokens is {max_tokens}; expected 0 or more.")
        scope = None if scope is None else checked_scope(scope)

        def change(revision: Revision) -> None:
            among = [r for r in revision.catalogue.segments if scope in (None, r.scope)]
            revision.evict(max_tokens, among, whole=False)

        self._writer.seal()
        self._writer.change(change)

    def forget(self, scope: str) -> None:
        """Delete all text of a scope, from the disk as well. Raises StoreError."""
        self._writer.forget(checked_scope(scope))

    def refresh(self) -> bool:
        """See what other processes wrote meanwhile; say whether there was anything.

        Open requests keep what they see.

        Raises:
            StoreError: What is wrong, and a remedy.
        """
        return self._writer.refresh()

    def info(self) -> CorpusInfo:
        """Return what the corpus holds."""
        view, log = self._writer.view, self._writer.log
        known = view.catalogue
        return CorpusInfo(
            path=str(self.path),
            generation=view.store.path.name,
            tokens=known.tokens,
            documents=sum(record.documents for record in known.segments),
            bytes=sum(record.size for record in view.store.manifest.files.values()),
            vocab_size=known.vocab_size,
            depth=known.depth,
            tokenizer=known.tokenizer,
            model=known.model or self._writer.model,
            segments=known.segments,
            waiting=log.tokens,
            dropped=log.dropped,
        )

    def close(self) -> None:
        """Stop recording, write what waits, and release the files. Raises StoreError."""
        while self._recording:
            self._recording.popitem()[1]()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _warn_lost(writer: CorpusWriter) -> None:
    if writer.unsaved:
        warnings.warn(
            f"{writer.root} was never closed: {writer.unsaved} appended tokens are lost.",
            ResourceWarning,
            stacklevel=2,
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
