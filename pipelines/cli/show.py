"""Run one request of the command line, compare it with plain decoding, and show the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import typer

from ragspec.pipelines.console.options import OutputOptions
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.answer import Answer
    from ragspec.pipelines.cli.compare import Comparison
    from ragspec.reports.generation import Generation
    from ragspec.sampling.settings import Sampling

INTERRUPTED = 130
OnRead = Callable[[int, int], None] | None
OnText = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """One finished request.

    Attributes:
        fields: Fields of the JSON object.
        documents: Names of the texts that drafts may come from, by number.
        extra: Fields of the header of a trace.
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
        """Return the result; with `plain`, search without speculation too."""


def run_and_show(
    write: RequestRunner,
    engine: Engine,
    sampling: Sampling,
    output: OutputOptions,
    model: str,
    terminal: Terminal,
) -> None:
    """Write a text, compare it with plain decoding on --compare, and show both.

    Raises:
        typer.Exit: The text was interrupted; the part that was written is shown.
    """
    with terminal.prefill_progress() as on_read:
        on_text = terminal.piece if output.streams else discard
        outcome = write(engine, sampling, on_text, on_read, False)
    interrupted = outcome.generation.finish_reason == "cancelled"
    comparison = None
    if output.compare and outcome.generation.tokens and not interrupted:
        comparison = _compare(write, engine, sampling, outcome, terminal)
        interrupted = comparison is None
    _show(outcome, comparison, engine, output, terminal)
    if output.trace is not None:  # last: a full disk must not cost the answer
        _write_trace(outcome, comparison, engine, output, model)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def discard(piece: str) -> None:
    """Ignore a piece of text; streaming keeps the text of an interrupted run."""


def _compare(
    write: RequestRunner, engine: Engine, sampling: Sampling, outcome: Result, terminal: Terminal
) -> Comparison | None:
    """Return the comparison with a plain run, None if that was interrupted."""
    from ragspec.pipelines.cli.compare import compare, plain_engine, same_seed

    seeded = same_seed(sampling, outcome.generation)
    try:
        with terminal.working("decoding plainly"):
            plain = write(plain_engine(engine), seeded, discard, None, True).generation
    except KeyboardInterrupt:
        return None
    if plain.finish_reason == "cancelled":  # a partial text would count as different
        return None
    return compare(engine, outcome.generation, plain, sampling)


def answer_result(question: str, answer: Answer) -> Result:
    """Return an answer over documents as a `Result`."""
    fields = answer.to_dict()
    for record, citation in zip(fields["citations"], answer.citations, strict=True):
        record["place"] = citation.place
    quotes = [
        record | {"text": answer.text[record["answer_start"] : record["answer_end"]]}
        for record in fields["citations"]
    ]
    # The origin of a draft is the number of its passage in the prompt.
    names = tuple(
        f"{hit.document.name}, passage {number}" for number, hit in enumerate(answer.passages, 1)
    )
    return Result(answer.generation, fields, names, {"question": question, "citations": quotes})


def _show(
    outcome: Result,
    comparison: Comparison | None,
    engine: Engine,
    output: OutputOptions,
    terminal: Terminal,
) -> None:
    report = outcome.generation.report
    if output.json:
        record = outcome.fields | {"label": report.label, "report": report.to_dict()}
        if comparison is not None:
            record["compare"] = asdict(comparison)
        terminal.json(record)
        return
    if outcome.fields.get("refused"):
        terminal.line(outcome.generation.text)
        terminal.note(f"the model was not called: {outcome.fields['refused']}", "bold")
        nearest = f"nearest: {outcome.documents[0]}; " if outcome.documents else ""
        terminal.note(f"{nearest}--no-refusal calls it anyway")
        return
    if output.streams:
        terminal.line()
    else:
        _show_coloured(outcome, engine, terminal)
    _note_sources(outcome, terminal)
    if outcome.generation.finish_reason == "cancelled":
        terminal.note("interrupted; the text so far is kept")
    elif output.compare and comparison is None and outcome.generation.tokens:
        terminal.note("interrupted while decoding plainly; there is no comparison")
    terminal.note(report.summary())
    if comparison is not None:
        terminal.note(comparison.summary(), "bold")


def _note_sources(outcome: Result, terminal: Terminal) -> None:
    """Note the quotations of an answer, warnings, and why it ended; other texts have none."""
    fields = outcome.fields
    for number, citation in enumerate(fields.get("citations", ()), 1):
        terminal.note(f"  quotation {number}: {citation['document']}, {citation['place']}")
    if fields.get("left_out"):
        used, left = len(fields["passages"]), fields["left_out"]
        terminal.note(f"{used} of {used + left} passages fit the model's context; the last left")
    if not fields.get("supported", True):
        terminal.note("nothing in your documents was quoted: check this answer yourself", "bold")
    if fields.get("repeats"):
        terminal.note("ended: it began to repeat itself", "bold")
    if outcome.generation.finish_reason == "length" and "citations" in fields:
        terminal.note("cut at the limit of tokens; --max-new-tokens sets it")


def _show_coloured(outcome: Result, engine: Engine, terminal: Terminal) -> None:
    from ragspec.pipelines.page.run_view import run_view
    from ragspec.reports.trace import Trace, TraceHeader, step_texts

    report, steps = outcome.generation.report, tuple(outcome.generation.steps)
    header = TraceHeader(
        model="",
        prompt_tokens=len(outcome.generation.prompt_tokens),
        label=report.label,
        seed=report.seed,
        documents=outcome.documents,
        extra=outcome.extra,
    )
    texts = step_texts(outcome.generation, engine.tokenizer)
    view = run_view(Trace(header, steps, texts, report, complete=True))
    terminal.spans(view.spans, view.legend)


def _write_trace(
    outcome: Result,
    comparison: Comparison | None,
    engine: Engine,
    output: OutputOptions,
    model: str,
) -> None:
    from ragspec.reports.trace import write_trace

    assert output.trace is not None
    write_trace(
        output.trace,
        outcome.generation,
        engine.tokenizer,
        model=model,
        documents=outcome.documents,
        extra=outcome.extra | ({"compare": asdict(comparison)} if comparison else {}),
    )
