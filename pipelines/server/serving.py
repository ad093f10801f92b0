"""The state of a server: one engine, documents, stores and image models."""

import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

from ragspec.drafters.fuse import within
from ragspec.drafters.method import Sources, listed
from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.request import Options
from ragspec.errors import InputError, ModelError, QueueFullError, StoreError
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.console.checks import NEEDS, OTHER, check_need
from ragspec.pipelines.methods import compose
from ragspec.pipelines.server import errors, metrics, prompting, streams
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.registry import expect_known

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.server.schema import TextRequest
    from ragspec.retrievers.corpus.index import CorpusIndex
    from ragspec.visual.pipeline import ImagePipeline

# The methods whose source joins the drafts of every request, and what else they draft from.
JOINED: Mapping[str, Sequence[str]] = {"model": (), "fused": ("context",), "rest": ()}
MOST = 64  # engines in memory; the least recently used one is dropped with its statistics
Names = str | Sequence[str] | None
T = TypeVar("T")


class Serving:
    """One engine, with documents, stores and image models.

    Drafters and budgets learn from the texts that they serve. Each tenant and choice of drafters
    has an engine, which keeps the texts of one tenant out of the drafts of another. The cost of
    forwards is measured here, so that no request waits for it.

    Args:
        engine: Not changed. Its draft model, if any, joins every drafter but "none".
        name: Name of the model in the API.
        default: Drafter and budget of requests that name none.
        documents: Searched for chat requests without documents. Its template writes the prompts
            over passages, whichever engine it has.
        settings: The limits of the engine, None for the default ones.
    """

    def __init__(
        self,
        engine: "Engine",
        name: str,
        *,
        default: tuple[Names, str | int] = ("auto", "auto"),
        documents: DocQA | None = None,
        images: "Mapping[str, ImagePipeline] | None" = None,
        settings: ServerSettings | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise ModelError(
                f"{name} holds no tokenizer; expected one, as callers send text. Save it beside "
                "the weights with tokenizer.save_pretrained(folder)."
            )
        if name in (images or ()):
            raise InputError(f"got two models {name}; expected two names. Use --set name=NAME.")
        limits = self.settings = settings or ServerSettings()
        self.engine = engine.with_limits(
            limits.max_batch_size,
            limits.max_queue_size,
            max_model_len=limits.max_model_len,
            kv_memory=limits.kv_memory,
        )
        if self.engine.cost is None:
            self.engine.measure()
        self.scheduler = self.engine.scheduler
        self.name = name
        self.created = int(time.time())
        self.documents = (documents or DocQA(lambda query: ())).over(self.engine)
        self.images = dict(images or {})
        self.stores: dict[str, CorpusIndex] = {}
        self.default = (_as_names(default[0]), default[1])
        drafters = () if engine.drafter is None else within(engine.drafter)
        self._draft_models = [each for each in drafters if isinstance(each, ModelDrafter)][:1]
        self._engines = lru_cache(MOST)(self._create)
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(1, "ragspec-alone")
        self.running_alone: set[Future[Any]] = set()
        self.stopped = threading.Event()
        self.metrics = metrics.Metrics(self.scheduler)

    def engine_of(
        self,
        tenant: str,
        drafter: Names = None,
        budget: str | int | None = None,
        store: str | bool | None = True,
    ) -> "Engine":
        """Return the engine that serves a request.

        Args:
            tenant: Owner of the request, see `tenant_of`.
            drafter: Method names, "none" for plain decoding, None for the server's default.
            budget: Draft nodes per step or "auto"; None for the server's default.
            store: Name of a store, None for none, a boolean for all of them.
        """
        names = self.default[0] if drafter is None else _as_names(drafter)
        if drafter is None and store is None:
            names = tuple(name for name in names if name not in NEEDS["store"])
        stores = () if store is None else (store,) if isinstance(store, str) else (*self.stores,)
        expect_known("store", stores, self.stores)
        return self._engines(tenant, names, self.default[1] if budget is None else budget, stores)

    def _create(
        self, tenant: str, names: Sequence[str], budget: str | int, stores: tuple[str, ...]
    ) -> "Engine":
        if not names:
            return self.engine.with_drafter(None, budget)
        methods = {name for name, method in listed().items() if not method.needs} | JOINED.keys()
        if "none" in names:
            raise InputError(f"got the drafter {names}; expected none by itself. Leave it out.")
        others = [name for name in names if name not in self.default[0]]  # which may be a folder
        expect_known("drafter", others, {"none", *methods})
        check_need("draft model", names, self._draft_models)
        remedy = "Leave `store` out, or name another drafter." if self.stores else OTHER
        check_need("store", names, stores, remedy)
        chosen = dict.fromkeys(part for name in names for part in JOINED.get(name, (name,)))
        drafters = compose([*chosen], Sources(), self.engine.target)
        if any(inner.name == "context" for each in drafters for inner in each.drafters):
            drafters = [each for each in drafters if each.name != "context"]
        drafters += [self.stores[name].drafter(tenant or "global", name=name) for name in stores]
        return self.engine.with_drafter([*drafters, *self._draft_models], budget)

    def expect(self, model: str, prompts: int = 0, samples: int = 1) -> None:
        """Raise an error unless a request for some texts of a model can be served now."""
        texts, field = prompts * samples, "n" if samples > 1 else "prompt"
        if model != self.name:
            message = f"got the model {model!r}; expected {self.name!r}, which is served here."
            raise errors.ApiError(404, message, "model_not_found", "model")
        if texts > (most := self.settings.max_batch_size + self.settings.max_queue_size):
            raise InputError(
                f"got {texts} texts by {field} in one request; expected {most} at most, which is "
                "all that this server holds. Ask in several requests."
            )
        self.scheduler.expect_room(texts)

    def submit(
        self, body: "TextRequest", requests: Sequence[prompting.EngineRequest], tenant: str
    ) -> streams.RunningTexts:
        """Submit all texts of a request, or raise QueueFullError; some have none."""
        samples = range(body.n or 1)
        running = streams.RunningTexts([each for each in requests for _ in samples], [])
        engine = self.engine_of(tenant, body.drafter, body.budget, body.store)
        if requests[0].unasked is not None:
            return running
        try:
            for each, sample in product(requests, samples):
                options: Options = {**each.options, "tenant": tenant}
                handle = engine.submit(each.prompt, each.sampling, sample=sample, **options)
                running.handles.append(handle)
        except BaseException:
            running.cancel()
            raise
        for handle in running.handles:
            # A future keeps its callbacks, so a handle in one would be a reference cycle.
            handle.future.add_done_callback(partial(self.metrics.ended, weakref.ref(handle)))
        return running

    def submit_alone(self, work: Callable[[], T]) -> Future[T]:
        """Submit long work, one at a time; raise QueueFullError if too many requests wait."""
        self.scheduler.expect_room(0)  # none once the server stops
        if (waiting := len(self.running_alone)) > self.settings.max_queue_size:
            raise QueueFullError(f"requests for pictures that wait: {waiting}; try again later.")
        future = self._executor.submit(work)
        self.running_alone.add(future)
        future.add_done_callback(self.running_alone.discard)
        return future

    def add_store(self, name: str, path: str) -> dict[str, object]:
        """Open a store to draft from, and return its record; raise InputError for a taken name."""
        from ragspec.retrievers.corpus.index import CorpusIndex

        if not os.path.isdir(path):
            raise StoreError(f"got the path {path!r}; expected a folder of `ragspec store build`.")
        store = CorpusIndex.open(path, tokenizer=self.engine.tokenizer, model=self.engine)
        with self._lock:
            if name not in self.stores:
                self.stores = {**self.stores, name: store}  # running requests do not use it
                return self.store(name)
        store.close()
        raise InputError(f"got the name {name!r} of a store in use; expected another one.")

    def store(self, name: str) -> dict[str, object]:
        """Return the record of a store."""
        tokens = sum(len(segment.tokens) for segment in self.stores[name].segments())
        return {"id": name, "object": "store", "tokens": tokens}

    def close(self, drain: float) -> None:
        """Let running work end within `drain` seconds, cancel the rest, and close the stores."""
        end = time.monotonic() + min(drain, threading.TIMEOUT_MAX)
        self.engine.close(timeout=drain)
        wait([*self.running_alone], max(0.0, end - time.monotonic()))
        self.stopped.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        for store in self.stores.values():
            store.close()


def tenant_of(key: str | None, user: str | None) -> str:
    """Return the tenant of a request; texts of one tenant never serve another.

    The key identifies a client, and `user` its users. Requests with neither share the tenant "".
    """
    if key is None and user is None:
        return ""
    identity = "\0".join((key or "", user or ""))
    return "tenant-" + hashlib.sha256(identity.encode()).hexdigest()[:32]


def _as_names(drafter: Names) -> tuple[str, ...]:
    """Return the names of drafters, none for plain decoding."""
    names = (drafter,) if isinstance(drafter, str) else tuple(drafter or ())
    return () if names == ("none",) else names
