"""`ragspec ask` and `ask-iterative`: answer a question from documents, with citations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import takes_records
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.answer import Answer
    from ragspec.pipelines.answering.docqa import DocQA

WARM_UP_TOKENS = 8
QuestionArgument = Annotated[str, typer.Argument(help="Question about the documents.")]
NoRefusalOption = Annotated[
    bool,
    typer.Option("--no-refusal", help="Ask the model even if no document covers the question."),
]


@dataclass(frozen=True, slots=True)
class IterativeOptions:
    """The search for passages while an answer is written; see `IterativeRag`."""

    stride: Annotated[int, typer.Option(min=1, help="Tokens between two searches.")] = 4
    search: Annotated[
        str | None,
        typer.Option(help="dense, sparse or fused. Default: what the index was built for."),
    ] = None
    speculate: Annotated[
        str,
        typer.Option(
            help="Strides written on guesses before the search checks them: auto, a number, or "
            "off. The text stays the same."
        ),
    ] = "auto"
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Write the whole answer this many times, each over what is found for the one "
            "before (Iter-RetGen), in place of a search every few tokens.",
        ),
    ] = None


@takes_records
def ask(
    question: QuestionArgument,
    documents: o.DocumentOptions,
    engine: o.EngineOptions,
    stores: o.StoreOptions,
    sampling: o.SamplingOptions,
    output: o.OutputOptions,
    predicted: o.PredictionOptions,
    no_refusal: NoRefusalOption = False,
) -> None:
    """Answer a question from documents, with citations."""
    from ragspec.pipelines.answering.docqa import DocQA

    def answer(qa: DocQA, engine: Engine, plain: bool, *args: Any, **options: Any) -> Answer:
        over = DocQA(
            qa.retriever,
            engine=engine,
            top_k=documents.top_passages,
            prompt=documents.prompt,
            system=documents.system,
        )
        return over.ask(*args, **options)

    _answer(answer, question, documents, engine, stores, sampling, output, predicted, no_refusal)


@takes_records
def ask_iterative(
    question: QuestionArgument,
    iterative: IterativeOptions,
    documents: o.DocumentOptions,
    engine: o.EngineOptions,
    stores: o.StoreOptions,
    sampling: o.SamplingOptions,
    output: o.OutputOptions,
    predicted: o.PredictionOptions,
    no_refusal: NoRefusalOption = False,
) -> None:
    """Answer a question and search again while the answer is written (RaLMSpec, Iter-RetGen)."""
    from ragspec.pipelines.answering.iterative import IterativeRag

    if documents.top_passages not in (None, 1):
        raise InputError(
            f"Expected one passage at a time, got --top-passages {documents.top_passages}. "
            "Leave --top-passages out."
        )

    def answer(qa: DocQA, engine: Engine, plain: bool, *args: Any, **options: Any) -> Answer:
        rag = IterativeRag(
            engine,
            qa.retriever,
            stride=iterative.stride,
            search=iterative.search,
            speculate="off" if plain else o.number_or_name(iterative.speculate),
            rounds=iterative.rounds,
            prompt=documents.prompt,
            system=documents.system,
        )
        return rag.ask(*args, **options)

    _answer(answer, question, documents, engine, stores, sampling, output, predicted, no_refusal)


def _answer(
    answer: Callable[..., Answer],
    question: str,
    documents: o.DocumentOptions,
    engine: o.EngineOptions,
    stores: o.StoreOptions,
    sampling: o.SamplingOptions,
    output: o.OutputOptions,
    predicted: o.PredictionOptions,
    no_refusal: bool,
) -> None:
    from ragspec.pipelines.answering.answerer import NEW_TOKENS
    from ragspec.pipelines.cli.show import OnRead, OnText, Result, answer_result, run_and_show

    documents.expect_any()
    question = o.checked_text(question)
    options: dict[str, Any] = {"refuse": not no_refusal, **predicted.read(engine)}
    o.silence_transformers()
    terminal = Terminal(quiet=output.json)
    with terminal.working("reading the documents"):
        qa = documents.open(terminal)
    assert qa is not None
    with terminal.working("loading the model"):
        loaded = engine.load_engine(stores)
    settings = sampling.settings_for(loaded)
    if output.compare:
        answer(qa, loaded, False, question, max_new_tokens=WARM_UP_TOKENS, **options)
        loaded.prefix_cache.clear()
    options["max_new_tokens"] = sampling.max_new_tokens or NEW_TOKENS

    def write(
        engine: Engine, sampling: Any, on_text: OnText, on_read: OnRead, plain: bool
    ) -> Result:
        every = options | {"stream": on_text, "on_read": on_read}
        outcome = answer_result(question, answer(qa, engine, plain, question, sampling, **every))
        outcome.fields["skipped"] = [asdict(skipped) for skipped in qa.skipped]
        return outcome

    run_and_show(write, loaded, settings, output, engine.model, terminal)
