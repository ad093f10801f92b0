"""What a server serves: one model through a pool, documents, stores and image models."""

from __future__ import annotations

import hashlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.engine.handle import RequestHandle
from ragspec.engine.pool import Pool
from ragspec.errors import InputError, ModelError, QueueFullError, RagspecError, StoreError
from ragspec.pipelines.server.drafting import TenantDrafting
from ragspec.pipelines.server.errors import ApiError
from ragspec.pipelines.server.metrics import Metrics
from ragspec.pipelines.server.prompting import EngineRequest

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.engine.output import Generation
    from ragspec.pipelines.docqa.docqa import DocQA


class Serving:
    """One model and what goes with it, ready to be asked.

    name: as callers name the model. drafting: which engines draft, None for that of `engine` and
    the methods by name. documents: searched for chat requests that bring none. images: pipelines by
    name. Raises ModelError where there is no tokenizer.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        drafting: TenantDrafting | None = None,
        documents: DocQA | None = None,
        images: Mapping[str, Any] | None = None,
        max_batch_size: int = 8,
        max_queue_size: int | None = 32,
    ) -> None:
        if engine.tokenizer is None:
            raise ModelError(
                f"{name} holds no tokenizer; expected one, as callers send text. Save it beside "
                "the weights with tokenizer.save_pretrained(folder)."
            )
        self.engine = engine
        self.name = name
        self.created = int(time.time())
        self.documents = documents
        self.images = dict(images or {})
        self._image_executor = ThreadPoolExecutor(1, "ragspec-pictures")  # one request at a time
        self._drawings = max_queue_size
        self._samples = 0  # requests for pictures that have not ended
        self._image_lock = threading.Lock()
        self.drafting = TenantDrafting(engine) if drafting is None else drafting
        self.pool = Pool(engine, max_batch_size, max_queue_size=max_queue_size)
        self.metrics = Metrics(self.pool)

    def submit(self, request: Sequence[EngineRequest], tenant: str) -> list[RequestHandle]:
        """Ask the pool for all samples of some texts; all are taken, or none.

        Raises QueueFullError and what `Pool.submit` does.
        """
        handles: list[RequestHandle] = []
        samples = sum(each.samples for each in request)
        if samples > self.most:
            raise InputError(
                f"got {samples} texts in one request; expected {self.most} at most, which is all "
                "that this server holds. Ask in several requests."
            )
        try:
            for each in request:
                engine = self.drafting.engine(tenant, each.drafter, each.budget, each.store)
                for sample in range(each.samples):
                    handle = self.pool.submit(
                        each.prompt,
                        each.sampling,
                        sample=sample,
                        tenant=tenant,
                        engine=engine,
                        **each.options,
                    )
                    handles.append(handle)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        for handle in handles:
            handle.future.add_done_callback(partial(self._ended, weakref.ref(handle)))
        return handles

    def _ended(self, message: weakref.ref[RequestHandle], future: Future[Generation]) -> None:
        # A future keeps its callbacks: a handle in one would be a cycle until it is collected.
        handle = message()
        if handle is not None:
            self.metrics.ended(handle)

    @property
    def most(self) -> float:
        """Texts that one request may ask for: no more would ever fit."""
        max_queue_size = self.pool.max_queue_size
        return math.inf if max_queue_size is None else self.pool.max_batch_size + max_queue_size

    def submit_images(self, work: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        """Draw pictures, one request after the other; raises QueueFullError for too many."""
        with self._image_lock:
            if self._drawings is not None and self._samples > self._drawings:
                raise QueueFullError(
                    f"{self._samples} requests for pictures wait; try again later."
                )
            result = self._image_executor.submit(work)
            self._samples += 1
        result.add_done_callback(self._left)
        return result

    def _left(self, done: Future[dict[str, Any]]) -> None:
        with self._image_lock:
            self._samples -= 1

    def expect(self, model: str) -> None:
        """Raise ApiError for another model's name."""
        if model != self.name:
            raise ApiError(
                404,
                f"got the model {model!r}; expected {self.name!r}, which is served here.",
                "model_not_found",
                "model",
            )

    def add_store(self, name: str, path: str) -> dict[str, Any]:
        """Open a corpus to draft from; raises StoreError, InputError."""
        from ragspec.retrievers.corpus.index import CorpusIndex

        tokenizer, model = self.engine.tokenizer, self.engine.model
        try:
            store = CorpusIndex.open(Path(path), tokenizer=tokenizer, model=model)
        except RagspecError:
            raise
        except (OSError, ValueError) as error:  # no path at all: too long, or with a null byte
            raise StoreError(f"got the path {path!r} ({error}); expected a folder.") from error
        try:
            self.drafting.add(name, store)
        except BaseException:
            store.close()
            raise
        return self.store(name)

    def store(self, name: str) -> dict[str, Any]:
        """Return what is told of a store."""
        tokens = sum(len(segment.tokens) for segment in self.drafting.stores[name].segments())
        return {"id": name, "object": "store", "tokens": tokens}

    def close(self, drain: float) -> None:
        """Let texts running end within `drain` seconds, then end them; let the stores go."""
        self._image_executor.shutdown(wait=False, cancel_futures=True)
        self.pool.close(timeout=drain)
        self.drafting.close()


def tenant_of(key: str | None, user: str | None) -> str:
    """Return whose a request is: texts of one tenant never serve another.

    A caller is known by its key, and tells its own users apart by `user`. "" is everybody who gives
    neither.
    """
    if key is None and user is None:
        return ""
    identity = "\0".join((key or "", user or ""))
    return "tenant-" + hashlib.sha256(identity.encode()).hexdigest()[:32]
