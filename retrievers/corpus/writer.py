"""The writing side of an open corpus: the view of the disk, the log, and the thread that seals.

Threads of one process share a writer; between processes the lock of the store decides who writes,
and every change starts from what is on disk then, so that nobody's text is lost.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.drafters.method import GLOBAL
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.catalogue import (
    Catalogue,
    SegmentSource,
    View,
    open_view,
    read_pointer,
)
from ragspec.retrievers.corpus.log import AppendLog, segment_in_memory
from ragspec.retrievers.corpus.revision import LARGEST, Document, Revision, revise
from ragspec.retrievers.fingerprints import same_print
from ragspec.retrievers.indexes.continuations import DraftOptions
from ragspec.retrievers.indexes.segment import Segment
from ragspec.storage.manifest import Verify

SEAL_TOKENS = 1 << 16
# How many times `seal_tokens` may wait before whoever appends has to wait too.
BEHIND = 4
RETRY_SECONDS = 5.0
JOIN_SECONDS = 0.02
# With a limit, no merge makes a segment larger than this part of it: eviction drops whole ones.
SHARE = 8

Change = Callable[[Revision], None]


class CorpusWriter:
    """An open corpus of one process.

    view: the generation that readers see. log: what is in memory only. model: the fingerprint of
    the model whose outputs are being appended, None so far.
    """

    def __init__(
        self, root: Path, view: View, verify: Verify, seal_tokens: int, max_tokens: int | None
    ) -> None:
        if seal_tokens < 1 or (max_tokens is not None and max_tokens < 1):
            raise InputError(
                f"got seal_tokens {seal_tokens}, max_tokens {max_tokens}; expected at least 1."
            )
        self.root = root
        self.view = view
        self.log = AppendLog(view.catalogue.vocab_size, view.catalogue.depth)
        self.model = view.catalogue.model
        self.seal_tokens = seal_tokens
        self.max_tokens = max_tokens
        self._verify: Verify = verify
        self._writing = threading.RLock()  # one change at a time
        self._swap = threading.RLock()  # held for a moment: view and log fit together
        self._sealer: threading.Thread | None = None
        self._retry_at = 0.0
        self._closed = False

    def segments(self, scope: str) -> tuple[Segment, ...]:
        """Return what a scope sees: segments on disk, then what waits in memory."""
        with self._swap:
            self._check_open()
            results = [*self.view.visible(scope), *self.log.segments(GLOBAL)]
            return (*results, *(self.log.segments(scope) if scope != GLOBAL else ()))

    def warm_up(self) -> None:
        """Load (the first time ever: compile) the look-ups of segments like these."""
        known = self.view.catalogue
        one = [np.zeros(2, np.int32)]
        segment = segment_in_memory(one, known.vocab_size, known.depth)
        segment.longest_match([0], 1)
        segment.draft([0], 1, options=DraftOptions(max_match=1, max_depth=1))

    @property
    def unsaved(self) -> int:
        """Appended tokens that only this process holds; 0 once closed."""
        return self.log.tokens

    def append(self, tokens: Sequence[int] | NDArray[Any], scope: str) -> None:
        """Add a document; where the disk cannot keep up, wait for it."""
        with self._swap:  # or it would come in behind the last seal
            self._check_open()
            waiting = self.log.append(tokens, scope)
        if waiting >= self.seal_tokens:
            self._seal_soon()
        most = BEHIND * self.seal_tokens
        while self.log.tokens > most + len(tokens):
            sealer = self._seal_soon()
            if sealer is None:  # it cannot be written at the moment: stay bounded
                self.log.drop(most)
                return
            sealer.join(JOIN_SECONDS)

    def set_model(self, fingerprint: str) -> None:
        """Say whose outputs are appended from now on; raises StoreError for a second model."""
        self._check_open()
        check_model(self.root, self.model, fingerprint)
        self.model = self.model or fingerprint  # the one of the store knows more dtypes

    def seal(self) -> None:
        """Write what waits as segments, merge what that makes small, evict beyond the limit."""
        with self._writing:
            self._check_open()
            self._seal()

    def change(self, change: Change) -> None:
        """Make a change of what is on disk and look at the result."""
        with self._writing:
            self._check_open()
            revise(self.root, change)
            self._adopt()

    def forget(self, scope: str) -> None:
        """Delete a scope, in memory and on disk."""

        def drop(revision: Revision) -> None:
            revision.put([r for r in revision.catalogue.segments if r.scope == scope], None)

        with self._writing:
            self._check_open()
            self.log.forget(scope)
            self.change(drop)
            self.change(lambda revision: None)  # the generation before the newest is kept too

    def refresh(self) -> bool:
        """Look at the newest generation; say whether it is another one than before."""
        with self._writing:
            self._check_open()
            if read_pointer(self.root) == self.view.pointer:
                return False
            self._adopt()
            return True

    def close(self) -> None:
        """Refuse what comes from now on, write what waits, and release the files.

        Where it cannot be written it stays open, to be closed again.
        """
        with self._swap:
            if self._closed:
                return
            self._closed = True
        try:
            if self._sealer is not None:
                self._sealer.join()
            self._seal()
        except BaseException:
            self._closed = False
            raise
        with self._swap:
            self.view = replace(self.view, segments=())

    def _seal(self) -> None:
        with self._writing:
            batch = self.log.take()
            if not batch:
                return
            try:
                revise(self.root, lambda revision: self._add(revision, batch))
            except BaseException:
                self.log.give_back()
                raise
            self._adopt(sealed=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self.root} was closed; open it again.")

    def _adopt(self, sealed: bool = False) -> None:
        """Let readers see the newest generation, and forget the batch that it holds."""
        try:
            view = open_view(self.root, self._verify, last=self.view)
            self._check_same(view.catalogue)
        except BaseException:  # the batch is on disk all the same, once
            if sealed:
                self.log.done()
            raise
        with self._swap:
            self.view = view
            self.model = view.catalogue.model or self.model
            if sealed:
                self.log.done()

    def _check_same(self, result: Catalogue) -> None:
        """Raise StoreError where somebody built the corpus again for something else."""
        known = self.view.catalogue
        instance = (known.tokenizer, known.vocab_size, known.depth)
        if (result.tokenizer, result.vocab_size, result.depth) != instance:
            raise StoreError(
                f"{self.root} was built again meanwhile, with another tokenizer, vocabulary or "
                f"depth (now {result.vocab_size} ids sorted to {result.depth} tokens, before "
                f"{known.vocab_size} to {known.depth}); open it again."
            )

    def _add(self, revision: Revision, batch: Mapping[str, Sequence[Document]]) -> None:
        known = revision.catalogue
        self._check_same(known)
        if self.model is not None:
            check_model(self.root, known.model, self.model)
            revision.catalogue = replace(known, model=known.model or self.model)
        limit = self.max_tokens
        largest = LARGEST if limit is None else max(self.seal_tokens, limit // SHARE)
        for scope, documents in batch.items():
            revision.append(documents, scope, largest)
        if limit is not None:
            appended = [
                record
                for record in revision.catalogue.segments
                if record.source is SegmentSource.APPENDED
            ]
            revision.evict(limit, appended, whole=True)

    def _seal_soon(self) -> threading.Thread | None:
        """Return the thread that seals, started where none runs; None shortly after a failure."""
        with self._swap:
            if self._sealer is not None and self._sealer.is_alive():
                return self._sealer
            if time.monotonic() < self._retry_at:
                return None
            self._sealer = threading.Thread(
                target=self._seal_behind, name="ragspec-seal", daemon=True
            )
            self._sealer.start()
            return self._sealer

    def _seal_behind(self) -> None:
        """Seal until less than a segment waits; what goes wrong is told and tried again later."""
        try:
            while self.log.waiting >= self.seal_tokens:
                self._seal()
        except Exception as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            warnings.warn(
                f"{self.root} could not be written ({error}); what was appended stays in memory, "
                f"at most about {BEHIND * self.seal_tokens} tokens of it.",
                RuntimeWarning,
                stacklevel=1,
            )


def check_model(root: Path, result: str | None, expected: str) -> None:
    """Raise StoreError where a corpus holds the outputs of another model."""
    if result is not None and not same_print(result, expected):
        raise StoreError(
            f"{root} holds outputs of another model (fingerprint {result[:12]}, expected "
            f"{expected[:12]}): they draft badly for this one. Make a store of this model's own "
            "outputs, or use the model that it was made with."
        )
