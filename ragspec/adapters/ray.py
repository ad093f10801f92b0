"""Which of several pools a prompt goes to: where most of its beginning was read before.

Affinity to prefixes with a bound on how unevenly work may lie, as in SGLang's router (Zheng et al.,
arXiv 2312.07104, and its cache-aware load balancing). The choice never changes a text.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ragspec.adapters.prefix_routes import PrefixRoutes
from ragspec.engine.engine import Engine
from ragspec.engine.options import refuse_unknown
from ragspec.engine.pool import Pool
from ragspec.errors import InputError, PoolError, QueueFullError, RagspecError
from ragspec.pipelines.docqa.docqa import Answer, DocQA
from ragspec.registry import for_extra
from ragspec.sampling.settings import Sampling

if TYPE_CHECKING:
    import ray.data
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

SLOTS, QUEUE = 8, 64


# --- Ray Data -----------------------------------------------------------------------------------


class AnswerBatch:
    """Answers the questions of a batch; Ray Data makes one in each of its actors.

    make: returns the DocQA, in the actor. column: of the questions. sampling, options: as for
    `DocQA.ask`.
    """

    def __init__(
        self,
        make: Callable[[], DocQA],
        column: str = "question",
        sampling: Sampling | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._docqa = make()
        self._column = column
        self._sampling = sampling
        self._options = dict(options or {})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the columns of `answer_questions`."""
        if self._column not in batch:
            raise InputError(
                f"got the columns {', '.join(sorted(batch))}; expected {self._column!r} among "
                "them. Name the one with the questions: column=."
            )
        body = [
            _columns(self._docqa.ask(str(each), self._sampling, **self._options))
            for each in batch[self._column]
        ]
        names = list(body[0]) if body else []
        return {**batch, **{name: np.array([row[name] for row in body], object) for name in names}}


def answer_questions(
    dataset: ray.data.Dataset,
    documents: Paths | Callable[[], DocQA],
    *,
    actors: int = 2,
    batch_size: int = 8,
    column: str = "question",
    model: str = "starter",
    drafter: Any = "auto",
    sampling: Sampling | None = None,
    ray_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ray.data.Dataset:
    """Return the dataset with an answer to each question, each once, whatever becomes of actors.

    documents: files and folders, which every actor reads, or a function that returns the DocQA and
    then brings its own engine. actors: how many, each with an engine of its own. batch_size:
    questions that an actor answers before it hands them on, and again where it is lost. model,
    drafter: as for `Engine.from_pretrained`. sampling: without a seed it is given one, the same for
    all. ray_options: further arguments of `Dataset.map_batches`, `num_gpus=1` say. options: of
    `DocQA.ask`. New columns: answer, evidence, short_answer, refused, label, citations (JSON).
    Raises InputError, MissingExtraError.
    """
    try:
        from ray.data import ActorPoolStrategy
    except ModuleNotFoundError as error:
        raise for_extra(error) from error
    if actors < 1 or batch_size < 1:
        raise InputError(
            f"got actors={actors}, batch_size={batch_size}; expected 1 or more of each."
        )
    make = documents if callable(documents) else _reader(documents, model, drafter)
    answerer: dict[str, Any] = {
        "make": make,
        "column": column,
        "sampling": _seeded(sampling),
        "options": options,
    }
    answered: ray.data.Dataset = dataset.map_batches(
        AnswerBatch,
        fn_constructor_kwargs=answerer,
        batch_size=batch_size,
        batch_format="numpy",
        compute=ActorPoolStrategy(size=actors),
        **(ray_options or {}),
    )
    return answered


def _reader(documents: Paths, model: str, drafter: Any) -> Callable[[], DocQA]:
    """Return what makes a DocQA in an actor, wherever that runs."""
    paths = [documents] if isinstance(documents, str | os.PathLike) else list(documents)
    absolute = [os.path.abspath(path) for path in paths]

    def make() -> DocQA:
        engine = Engine.from_pretrained(model, drafter)
        return DocQA.from_documents(absolute, engine=engine)

    return make


def _seeded(sampling: Sampling | None) -> Sampling | None:
    """Return the sampling with a seed, without which an answer given again would be another."""
    if sampling is None or sampling.seed is not None:
        return sampling
    return replace(sampling, seed=secrets.randbits(31))


def _columns(answer: Answer) -> dict[str, str]:
    cited = [asdict(citation) for citation in answer.citations]
    return {
        "answer": answer.text,
        "evidence": answer.evidence,
        "short_answer": answer.short,
        "refused": answer.refused or "",
        "label": answer.label,
        "citations": json.dumps(cited),
    }


# --- Ray Serve ----------------------------------------------------------------------------------


class PoolActor:
    """One pool, alone in its actor.

    make: returns the engine, in the actor. max_batch_size, max_queue_size, chunk: as for `Pool`.
    """

    def __init__(
        self, make: Callable[[], Engine], max_batch_size: int, max_queue_size: int
    ) -> None:
        self._pool = Pool(make(), max_batch_size, max_queue_size=max_queue_size)

    async def generate(
        self, prompt: Any, sampling: Mapping[str, Any], tenant: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a text and what is told of it; raises as `Pool.submit` does."""
        handle = self._pool.submit(prompt, Sampling(**sampling), tenant=tenant, **options)
        try:
            generation = await asyncio.wrap_future(handle.future)
        except asyncio.CancelledError:
            handle.cancel()
            raise
        return {
            "text": generation.text,
            "tokens": list(generation.tokens),
            "finish_reason": generation.finish_reason,
            "label": generation.label,
            "prompt_tokens": len(generation.prompt_tokens),
            "mean_accepted_length": generation.report.mean_accepted_length,
        }


class PoolRouter:
    """Takes requests and hands each to a pool: where its beginning was read, if that has room.

    Where a pool is lost or full, another one serves the request, from its start.
    """

    def __init__(self, *pools: DeploymentHandle, uneven: int) -> None:
        self._pools = pools
        self._routes = PrefixRoutes(len(pools), uneven)

    async def generate(
        self,
        prompt: Any,
        sampling: Mapping[str, Any] | None = None,
        tenant: str = "",
        **options: Any,
    ) -> dict[str, Any]:
        """Return a text with "pool", the number of the one that wrote it; see `pools_app`."""
        from ray.exceptions import RayActorError, RayTaskError

        settings = asdict(_seeded(Sampling(**(sampling or {}))) or Sampling())
        tried: set[int] = set()
        last: Exception | None = None
        while len(tried) < len(self._pools):
            pool = self._routes.choose(prompt, tenant, tried)
            tried.add(pool)
            try:
                generation = await self._pools[pool].generate.remote(
                    prompt, settings, tenant, options
                )
            except RayTaskError as error:
                cause = getattr(error, "cause", None)
                last = cause if isinstance(cause, RagspecError) else error  # raised in an actor
                if not isinstance(last, QueueFullError):
                    raise last from error
            except RayActorError as error:
                last = error
            else:
                return {**generation, "pool": pool, "seed": settings["seed"]}
            finally:
                self._routes.done(pool)
        if isinstance(last, QueueFullError):
            raise last
        raise PoolError(
            f"{len(tried)} pools were lost under one text; expected one that stays. Ray starts "
            "them again: try again later."
        ) from last

    async def __call__(self, request: Any) -> Any:
        """Answer a POST of JSON: prompt, sampling, tenant, and options of `Engine.generate`."""
        from starlette.responses import JSONResponse

        try:
            body = await request.json()
            if not isinstance(body, dict) or "prompt" not in body:
                raise InputError("got no prompt; expected JSON with one: {'prompt': 'Text'}.")
            return JSONResponse(await self.generate(**body))
        except QueueFullError as error:
            return JSONResponse(_refusal(error), 429, headers={"Retry-After": "1"})
        except PoolError as error:
            return JSONResponse(_refusal(error), 503)
        except (RagspecError, TypeError, ValueError) as error:
            return JSONResponse(_refusal(error), 400)


def pools_app(
    make: str | Callable[[], Engine] = "starter",
    *,
    pools: int = 2,
    max_batch_size: int = SLOTS,
    max_queue_size: int = QUEUE,
    uneven: int | None = None,
    actor_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """Return a Serve application: several pools, each in an actor, and a router before them.

    make: a model, then options go to `Engine.from_pretrained`; or a function that returns an
    engine. max_batch_size, max_queue_size: of each pool. uneven: texts that a pool may have more
    than the least busy one before prompts it knows go elsewhere, None for `max_batch_size`.
    actor_options: of each pool's actor, {"num_gpus": 1} say. The handle's `generate` and a POST of
    JSON take prompt, sampling (fields of `Sampling`), tenant and what `Engine.generate` takes.
    Raises InputError, MissingExtraError.
    """
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise for_extra(error) from error
    if pools < 1:
        raise InputError(f"got pools={pools}; expected 1 or more.")
    if callable(make):
        if options:
            refuse_unknown(options)
            raise InputError("got options of an engine beside what makes one; expected either.")
        build = make
    else:
        build = lambda: Engine.from_pretrained(make, **options)  # noqa: E731
    most = (
        max_batch_size + max_queue_size + 1
    )  # one more than may wait, so that the pool itself refuses it
    parts = [
        serve.deployment(PoolActor)
        .options(
            name=f"pool-{number}",
            max_ongoing_requests=most,
            ray_actor_options=dict(actor_options or {}),
        )
        .bind(build, max_batch_size, max_queue_size)
        for number in range(pools)
    ]
    router = serve.deployment(PoolRouter).options(max_ongoing_requests=pools * most)
    app: Application = router.bind(*parts, uneven=max_batch_size if uneven is None else uneven)
    return app


def _refusal(error: Exception) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": str(error)}}
