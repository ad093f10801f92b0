"""`ragspec ask` and `ask-iterative`: answer a question from documents, with citations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import Setting, takes_records
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.answerer import Answerer
    from ragspec.pipelines.answering.docqa import DocQA

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class AskOptions:
    """A question over documents."""

    question: Annotated[str, typer.Argument(help="Question about the documents.")]
    documents: o.DocumentOptions
    text: o.TextOptions
    no_refusal: Annotated[
        bool,
        typer.Option("--no-refusal", help="Ask the model even if no document covers the question."),
    ] = False

    def __post_init__(self) -> None:
        checks.check_question(self.question)
        if not self.documents.docs:
            raise InputError(
                "Expected --docs, got none: --docs PATH reads documents, or opens what `ragspec "
                "index` built."
            )


@dataclass(frozen=True, slots=True)
class IterativeOptions(AskOptions):
    """A question over documents that are searched while the answer is written."""

    stride: Annotated[int, typer.Option(min=1, help="Tokens between two searches.")] = 4
    search: Annotated[
        Literal["dense", "sparse", "fused"] | None,
        Setting("Kind of search: dense, sparse or fused. Default: what the index was built for."),
    ] = None
    speculate: Annotated[
        str,
        Setting(
            "Strides written on guesses before the search checks them: auto, a number, or off. The "
            "text stays the same."
        ),
    ] = "auto"
    rounds: Annotated[
        int | None,
        Setting(
            "Write the whole answer this many times, each over what is found for the one before "
            "(Iter-RetGen), in place of a search every few tokens.",
            least=1,
        ),
    ] = None

    def __post_init__(self) -> None:
        AskOptions.__post_init__(self)
        checks.check_guesses(self.speculate)
        if self.documents.top_passages not in (None, 1):
            raise InputError(
                f"Expected one passage at a time, got --set top-passages="
                f"{self.documents.top_passages}. Leave it out."
            )


@takes_records
def ask(options: AskOptions) -> None:
    """Answer a question from documents, with citations."""
    from ragspec.pipelines.answering.docqa import DocQA

    def over(qa: DocQA, engine: Engine, plain: bool) -> DocQA:
        documents = options.documents
        return DocQA(
            qa.retriever,
            engine=engine,
            top_k=documents.top_passages,
            prompt=documents.prompt,
            system=documents.system,
        )

    answer(options, over)


@takes_records
def ask_iterative(options: IterativeOptions) -> None:
    """Answer a question and search again while the answer is written (RaLMSpec, Iter-RetGen)."""
    from ragspec.pipelines.answering.iterative import IterativeRag

    def over(qa: DocQA, engine: Engine, plain: bool) -> IterativeRag:
        return IterativeRag(
            engine,
            qa.retriever,
            stride=options.stride,
            search=options.search,
            speculate="off" if plain else o.number_or_name(options.speculate),
            rounds=options.rounds,
            prompt=options.documents.prompt,
            system=options.documents.system,
        )

    answer(options, over)


def answer(options: AskOptions, over: Callable[[DocQA, Engine, bool], Answerer]) -> None:
    """Answer a question and show the answer.

    Args:
        over: Returns an answerer, content the documents, an engine, and whether it is to search
            without speculation.
    """
    from ragspec.pipelines.answering.answerer import NEW_TOKENS
    from ragspec.pipelines.cli.show import OnRead, OnText, Result, answer_result, run_and_show

    text, question = options.text, options.question
    arguments: dict[str, Any] = {"refuse": not options.no_refusal, **text.read_prediction()}
    o.silence_transformers()
    terminal = Terminal(quiet=text.output.json)
    with terminal.working("reading the documents"):
        qa = options.documents.open(terminal)
    assert qa is not None
    with terminal.working("loading the model"):
        engine = text.engine.load_engine(text.stores)
    sampling = text.sampling.settings_for(engine)
    if text.output.compare:
        over(qa, engine, False).ask(question, max_new_tokens=WARM_UP_TOKENS, **arguments)
        engine.prefix_cache.clear()
    arguments["max_new_tokens"] = text.sampling.max_new_tokens or NEW_TOKENS

    def write(
        engine: Engine, sampling: Any, on_text: OnText, on_read: OnRead, plain: bool
    ) -> Result:
        every = arguments | {"stream": on_text, "on_read": on_read}
        outcome = answer_result(question, over(qa, engine, plain).ask(question, sampling, **every))
        outcome.fields["skipped"] = [asdict(skipped) for skipped in qa.skipped]
        return outcome

    run_and_show(write, engine, sampling, text.output, text.engine.model, terminal)
