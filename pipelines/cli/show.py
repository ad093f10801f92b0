"""Run one request of the command line, compare it with plain decoding, and show the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import typer

from ragspec.pipelines.console.options import OutputOptions
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.engine.output import Generation
    from ragspec.pipelines.cli.compare import Comparison
    from ragspec.pipelines.docqa.docqa import Answer
    from ragspec.sampling.settings import Sampling

INTERRUPTED = 130
OnRead = Callable[[int, int], None] | None
OnText = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """One finished request.

    Attributes:
        fields: Goes into the JSON object as it is.
        documents: Names of the texts that drafts may come from, by number.
        extra: Goes into the header of a trace.
    """

    generation: Generation
    fields: dict[str, Any]
    documents: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


class RequestRunner(Protocol):
    """Writes the text of a request with an engine; an interrupt keeps what was written."""

    def __call__(
        self, engine: Engine, sampling: Sampling, on_text: OnText, on_read: OnRead, plain: bool
    ) -> Result:
        """Return the result; plain: also search without speculation."""


def run_and_show(
    write: RequestRunner,
    engine: Engine,
    sampling: Sampling,
    output: OutputOptions,
    model: str,
    terminal: Terminal,
) -> None:
    """Write a text, compare it with plain decoding where wanted, and show both.

    Raises:
        typer.Exit: The text was interrupted; what was written is shown.
    """
    with terminal.prefill_progress() as on_read:
        on_text = terminal.piece if output.streams else discard
        result = write(engine, sampling, on_text, on_read, False)
    interrupted = result.generation.finish_reason == "cancelled"
    comparison = None
    if output.compare and result.generation.tokens and not interrupted:
        comparison = _compare(write, engine, sampling, result, terminal)
        interrupted = comparison is None
    _show(result, comparison, engine, output, terminal)
    if output.trace is not None:  # last: a full disk must not cost the answer
        _write_trace(result, comparison, engine, output, model)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def discard(piece: str) -> None:
    """Take a piece that is not shown; a streamed text survives an interrupt."""


def _compare(
    write: RequestRunner, engine: Engine, sampling: Sampling, result: Result, terminal: Terminal
) -> Comparison | None:
    """Return the comparison with a plain run, None where that was interrupted."""
    from ragspec.pipelines.cli.compare import compare, plain_engine, same_seed

    seeded = same_seed(sampling, result.generation)
    try:
        with terminal.working("decoding plainly"):
            plain = write(plain_engine(engine), seeded, discard, None, True).generation
    except KeyboardInterrupt:
        return None
    if plain.finish_reason == "cancelled":  # half a run would look like another text
        return None
    return compare(engine, result.generation, plain, sampling)


def answer_result(question: str, answer: Answer) -> Result:
    """Return what is shown of an answer over documents."""
    fields = answer.to_dict()
    for record, citation in zip(fields["citations"], answer.citations, strict=True):
        record["place"] = citation.place
    quotes = [
        record | {"text": answer.text[record["answer_start"] : record["answer_end"]]}
        for record in fields["citations"]
    ]
    # A draft's origin counts the passages of the prompt.
    names = tuple(
        f"{hit.document.name}, passage {number}" for number, hit in enumerate(answer.passages, 1)
    )
    # The report of an answer has the search in it, that of the generation has not.
    generation = replace(answer.generation, report=answer.report)
    return Result(generation, fields, names, {"question": question, "citations": quotes})


def _show(
    result: Result,
    comparison: Comparison | None,
    engine: Engine,
    output: OutputOptions,
    terminal: Terminal,
) -> None:
    report = result.generation.report
    if output.json:
        record = result.fields | {"label": report.label, "report": report.to_dict()}
        if comparison is not None:
            record["compare"] = comparison.to_dict()
        terminal.json(record)
        return
    if result.fields.get("refused"):
        terminal.line(result.generation.text)
        terminal.note(f"the model was not asked: {result.fields['refused']}", "bold")
        nearest = f"nearest: {result.documents[0]}; " if result.documents else ""
        terminal.note(f"{nearest}--no-refusal asks it all the same")
        return
    if output.streams:
        terminal.line()
    else:
        _show_coloured(result, engine, terminal)
    _note_sources(result, terminal)
    if result.generation.finish_reason == "cancelled":
        terminal.note("interrupted; this is what was written")
    elif output.compare and comparison is None and result.generation.tokens:
        terminal.note("interrupted while decoding plainly; there is no comparison")
    terminal.note(report.summary())
    if comparison is not None:
        terminal.note(comparison.summary(), "bold")


def _note_sources(result: Result, terminal: Terminal) -> None:
    """Name an answer's quotations, what it lacks, and why it ended; of other texts nothing."""
    fields = result.fields
    for number, citation in enumerate(fields.get("citations", ()), 1):
        terminal.note(f"  quotation {number}: {citation['document']}, {citation['place']}")
    if fields.get("left_out"):
        used, left = len(fields["passages"]), fields["left_out"]
        terminal.note(f"{used} of {used + left} passages fit the model's context; the last left")
    if not fields.get("supported", True):
        terminal.note("nothing in your documents was quoted: check this answer yourself", "bold")
    if fields.get("repeats"):
        terminal.note("ended: it began to repeat itself", "bold")
    if result.generation.finish_reason == "length" and "citations" in fields:
        terminal.note("cut at the limit of tokens; --max-new-tokens sets it")


def _show_coloured(result: Result, engine: Engine, terminal: Terminal) -> None:
    from ragspec.pipelines.page.run_view import run_view
    from ragspec.reports.trace import Trace, TraceHeader, step_texts

    report, steps = result.generation.report, tuple(result.generation.steps)
    header = TraceHeader(
        model="",
        prompt_tokens=len(result.generation.prompt_tokens),
        label=report.label,
        seed=report.seed,
        documents=result.documents,
        extra=result.extra,
    )
    texts = step_texts(steps, decoder(engine))
    view = run_view(Trace(header, steps, texts, report, complete=True))
    terminal.spans(view.spans, view.legend)


def _write_trace(
    result: Result, comparison: Comparison | None, engine: Engine, output: OutputOptions, model: str
) -> None:
    from ragspec.reports.trace import write_trace

    assert output.trace is not None
    write_trace(
        output.trace,
        result.generation,
        decoder(engine),
        model=model,
        documents=result.documents,
        extra=result.extra | ({"compare": comparison.to_dict()} if comparison else {}),
    )


def decoder(engine: Engine) -> Callable[[list[int]], str]:
    """Return a function from token ids to text, special tokens left out."""
    tokenizer = engine.tokenizer

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode
