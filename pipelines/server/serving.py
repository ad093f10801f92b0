"""The state of a server: one engine, documents, stores and image models."""

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
from ragspec.engine.request import Options
from ragspec.errors import InputError, ModelError, QueueFullError, RagspecError, StoreError
from ragspec.pipelines.server.drafting import TenantDrafting
from ragspec.pipelines.server.errors import ApiError
from ragspec.pipelines.server.metrics import Metrics
from ragspec.pipelines.server.prompting import EngineRequest

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.docqa import DocQA
    from ragspec.reports.generation import Generation


class Serving:
    """One engine, with documents, stores and image models.

    Args:
        name: Name of the model in the API.
        drafting: The engines of requests; None for `engine` and the methods by name.
        documents: Searched for chat requests without documents.
        images: Image pipelines by name.

    Raises:
        ModelError: The engine has no tokenizer.
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
        self.drafting = TenantDrafting(engine) if drafting is None else drafting
        self.engine = self.drafting.base.with_limits(max_batch_size, max_queue_size)
        self.drafting.base, self.scheduler = self.engine, self.engine.scheduler
        self.name = name
        self.created = int(time.time())
        self.documents = documents
        self.images = dict(images or {})
        self._image_executor = ThreadPoolExecutor(1, "ragspec-pictures")  # one request at a time
        self._image_requests = 0  # that have not ended
        self._image_lock = threading.Lock()
        self.metrics = Metrics(self.scheduler)

    def submit(self, request: Sequence[EngineRequest], tenant: str) -> list[RequestHandle]:
        """Submit all samples of some requests, all of them or none.

        Raises:
            InputError: The server cannot hold so many texts.
            QueueFullError: The queue is full; also the errors of `Engine.submit`.
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
                    options: Options = {**each.options, "tenant": tenant}
                    handle = engine.submit(each.prompt, each.sampling, sample=sample, **options)
                    handles.append(handle)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        for handle in handles:
            handle.future.add_done_callback(partial(self._ended, weakref.ref(handle)))
        return handles

    def _ended(self, message: weakref.ref[RequestHandle], future: Future[Generation]) -> None:
        # A future keeps its callbacks, so a handle in one would be a reference cycle.
        handle = message()
        if handle is not None:
            self.metrics.ended(handle)

    @property
    def most(self) -> float:
        """The most texts of one request: all that the batch and the queue hold."""
        queue = self.scheduler.max_queue_size
        return math.inf if queue is None else self.scheduler.max_batch_size + queue

    def submit_images(self, work: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        """Submit a request for images; one request is drawn at a time.

        Raises:
            QueueFullError: Too many requests wait.
        """
        with self._image_lock:
            waiting = self._image_requests
            if (
                self.scheduler.max_queue_size is not None
                and waiting > self.scheduler.max_queue_size
            ):
                raise QueueFullError(f"{waiting} requests for pictures wait; try again later.")
            future = self._image_executor.submit(work)
            self._image_requests += 1
        future.add_done_callback(self._left)
        return future

    def _left(self, done: Future[dict[str, Any]]) -> None:
        with self._image_lock:
            self._image_requests -= 1

    def expect(self, model: str) -> None:
        """Raise ApiError unless `model` is the name of this model."""
        if model != self.name:
            raise ApiError(
                404,
                f"got the model {model!r}; expected {self.name!r}, which is served here.",
                "model_not_found",
                "model",
            )

    def add_store(self, name: str, path: str) -> dict[str, Any]:
        """Open a store to draft from, and return its record.

        Raises:
            StoreError: It cannot be opened, or is of another model or tokenizer.
            InputError: The name is taken.
        """
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
        """Return the record of a store."""
        tokens = sum(len(segment.tokens) for segment in self.drafting.stores[name].segments())
        return {"id": name, "object": "store", "tokens": tokens}

    def close(self, drain: float) -> None:
        """Let running texts end within `drain` seconds, cancel the rest, and close the stores."""
        self._image_executor.shutdown(wait=False, cancel_futures=True)
        self.engine.close(timeout=drain)
        self.drafting.close()


def tenant_of(key: str | None, user: str | None) -> str:
    """Return the tenant of a request; texts of one tenant never serve another.

    The key identifies a client, and `user` its users. Requests with neither share the tenant "".
    """
    if key is None and user is None:
        return ""
    identity = "\0".join((key or "", user or ""))
    return "tenant-" + hashlib.sha256(identity.encode()).hexdigest()[:32]
