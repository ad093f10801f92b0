"""Ray: answers to the questions of a Ray Data dataset, and a Ray Serve application of replicas."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ragspec.adapters.prefix_routes import PrefixRoutes
from ragspec.engine.engine import Engine
from ragspec.engine.request import refuse_unknown
from ragspec.errors import EngineError, InputError, QueueFullError, RagspecError
from ragspec.pipelines.answering.answer import Answer
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.registry import for_extra
from ragspec.sampling.settings import Sampling, seeded

if TYPE_CHECKING:
    import ray.data
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


# --- Ray Data -----------------------------------------------------------------------------------


class AnswerBatch:
    """Answers the questions of a batch; Ray Data makes one in each of its actors.

    Args:
        make: Returns the DocQA, in the actor.
        column: Column of the questions.
        sampling, options: See `DocQA.ask`.
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
    """Return the dataset with one answer to each question, even if actors are lost.

    New columns: answer, evidence, short_answer, refused, label, citations (JSON).

    Args:
        documents: Files and folders, which every actor reads, or a function that returns the DocQA
            with an engine.
        actors: Number of actors, each with a separate engine.
        batch_size: Questions of one batch; a lost actor's batch is answered again.
        model, drafter: See `Engine.from_pretrained`.
        sampling: Without a seed, one is chosen for all questions.
        ray_options: Further arguments of `Dataset.map_batches`, such as `num_gpus=1`.
        options: Further arguments of `DocQA.ask`.

    Raises:
        InputError: A number is below 1, or n is above 1.
        MissingExtraError: Ray Data is not installed.
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
        "sampling": None if sampling is None else seeded(sampling, "answer_questions()"),
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
    """Return a function that makes the DocQA in an actor, whatever its working directory."""
    paths = [documents] if isinstance(documents, str | os.PathLike) else list(documents)
    absolute = [os.path.abspath(path) for path in paths]

    def make() -> DocQA:
        engine = Engine.from_pretrained(model, drafter)
        return DocQA.from_documents(absolute, engine=engine)

    return make


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


class EngineActor:
    """An engine in an actor.

    Args:
        make: Returns the engine, in the actor.
        max_batch_size, max_queue_size: See `Engine`.
    """

    def __init__(
        self, make: Callable[[], Engine], max_batch_size: int, max_queue_size: int
    ) -> None:
        self._engine = make().with_limits(max_batch_size, max_queue_size)

    async def generate(
        self, prompt: Any, sampling: Mapping[str, Any], tenant: str, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a text with its figures; raise the errors of `Engine.submit`."""
        handle = self._engine.submit(prompt, Sampling(**sampling), tenant=tenant, **options)
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


class EngineRouter:
    """Routes each request to the replica that has read its beginning, if that has room.

    If a replica is lost or full, another one serves the request from its start.
    """

    def __init__(self, *replicas: DeploymentHandle, uneven: int) -> None:
        self._replicas = replicas
        self._routes = PrefixRoutes(len(replicas), uneven)

    async def generate(
        self,
        prompt: Any,
        sampling: Mapping[str, Any] | None = None,
        tenant: str = "",
        **options: Any,
    ) -> dict[str, Any]:
        """Return a text, its figures, seed and number of its replica; see `replicated_app`."""
        from ray.exceptions import RayActorError, RayTaskError

        # A request that is repeated in another replica needs the same seed.
        settings = asdict(seeded(Sampling(**(sampling or {})), "generate()"))
        tried: set[int] = set()
        last: Exception | None = None
        while len(tried) < len(self._replicas):
            replica = self._routes.choose(prompt, tenant, tried)
            tried.add(replica)
            try:
                generation = await self._replicas[replica].generate.remote(
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
                return {**generation, "replica": replica, "seed": settings["seed"]}
            finally:
                self._routes.done(replica)
        if isinstance(last, QueueFullError):
            raise last
        raise EngineError(
            f"{len(tried)} replicas were lost under one text; expected one that stays. Ray starts "
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
        except EngineError as error:
            return JSONResponse(_refusal(error), 503)
        except (RagspecError, TypeError, ValueError) as error:
            return JSONResponse(_refusal(error), 400)


def replicated_app(
    make: str | Callable[[], Engine] = "starter",
    *,
    replicas: int = 2,
    max_batch_size: int = 8,
    max_queue_size: int = 64,
    uneven: int | None = None,
    actor_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """Return a Serve application of several replicas, each in an actor, behind a router.

    The handle's `generate` and a POST of JSON take prompt, sampling (fields of `Sampling`), tenant
    and the options of `Engine.generate`.

    Args:
        make: A model, with `options` for `Engine.from_pretrained`; or a function that returns an
            engine.
        max_batch_size, max_queue_size: See `Engine`; they hold for each replica.
        uneven: See `PrefixRoutes`; None for `max_batch_size`.
        actor_options: Options of each replica's actor, such as {"num_gpus": 1}.

    Raises:
        InputError: A number is below 1, or options come with a function.
        MissingExtraError: Ray Serve is not installed.
    """
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise for_extra(error) from error
    if replicas < 1:
        raise InputError(f"got replicas={replicas}; expected 1 or more.")
    if callable(make):
        if options:
            refuse_unknown(options)
            raise InputError("got options of an engine beside what makes one; expected either.")
        build = make
    else:
        build = lambda: Engine.from_pretrained(make, **options)  # noqa: E731
    # One more than the replica takes, so that the replica itself refuses it.
    most = max_batch_size + max_queue_size + 1
    parts = [
        serve.deployment(EngineActor)
        .options(
            name=f"replica-{number}",
            max_ongoing_requests=most,
            ray_actor_options=dict(actor_options or {}),
        )
        .bind(build, max_batch_size, max_queue_size)
        for number in range(replicas)
    ]
    # The router computes nothing: two replicas fit on two processors.
    router = serve.deployment(EngineRouter).options(
        max_ongoing_requests=replicas * most, ray_actor_options={"num_cpus": 0}
    )
    app: Application = router.bind(*parts, uneven=max_batch_size if uneven is None else uneven)
    return app


def _refusal(error: Exception) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": str(error)}}
