"""Ray: answers to the questions of a Ray Data dataset."""

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.registry import optional_packages
from ragspec.retrievers.search.documents import Paths
from ragspec.sampling.settings import Sampling, checked_count, seeded

if TYPE_CHECKING:
    import ray.data

COLUMNS = ("answer", "evidence", "short_answer", "refused", "label", "citations")


class AnswerBatch:
    """Answers the questions of a batch; Ray Data makes one in each of its actors.

    Args:
        make: Returns the DocQA, in the actor.
        sampling, options: See `DocQA.ask`.
    """

    def __init__(
        self,
        make: Callable[[], DocQA],
        column: str = "question",
        sampling: Sampling | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._docqa, self._column = make(), column
        self._sampling, self._options = sampling, dict(options or {})

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the batch with the columns of `answer_questions`."""
        if self._column not in batch:
            raise InputError(
                f"got the columns {', '.join(sorted(batch))}; expected {self._column!r} among "
                "them. Name the one with the questions: column=."
            )
        ask, questions = self._docqa.ask, map(str, batch[self._column])
        answers = [ask(each, self._sampling, **self._options).to_dict() for each in questions]
        for each in answers:
            each |= {"refused": each["refused"] or "", "citations": json.dumps(each["citations"])}
        names = COLUMNS if answers else ()
        return batch | {name: np.array([each[name] for each in answers], object) for name in names}


def answer_questions(
    dataset: "ray.data.Dataset",
    documents: Paths | Callable[[], DocQA],
    *,
    actors: int = 2,
    batch_size: int = 8,
    column: str = "question",
    model: str = "starter",
    sampling: Sampling | None = None,
    ray_options: Mapping[str, object] | None = None,
    **options: Any,
) -> "ray.data.Dataset":
    """Return the dataset with one answer to each question, even if actors are lost.

    New columns: answer, evidence, short_answer, refused, label, citations (JSON).

    Args:
        documents: Files and folders, which every actor reads, or a function that returns the DocQA
            with any engine.
        actors: Number of actors, each with a separate engine.
        batch_size: Questions of one batch; a lost actor's batch is answered again.
        model: Name or path, for files and folders.
        sampling: Without a seed, one is chosen for all questions.
        ray_options: Further arguments of `Dataset.map_batches`, such as `num_gpus=1`.
        options: Further arguments of `DocQA.ask`.

    Raises:
        InputError: A number is below 1, or n is above 1.
        MissingExtraError: Ray Data is not installed.
    """
    with optional_packages():
        from ray.data import ActorPoolStrategy
    actors = checked_count(actors, "actors")
    return dataset.map_batches(
        AnswerBatch,
        fn_constructor_kwargs={
            "make": documents if callable(documents) else _opener(documents, model),
            "column": column,
            "sampling": None if sampling is None else seeded(sampling, "answer_questions()"),
            "options": options,
        },
        batch_size=checked_count(batch_size, "batch_size"),
        batch_format="numpy",
        compute=ActorPoolStrategy(size=actors),
        **(ray_options or {}),
    )


def _opener(documents: Paths, model: str) -> Callable[[], DocQA]:
    """Return a function that opens documents in an actor, whatever its working directory."""
    paths = [documents] if isinstance(documents, str | os.PathLike) else documents
    absolute = [os.path.abspath(path) for path in paths]
    return lambda: DocQA.from_documents(absolute, engine=Engine.from_pretrained(model))
