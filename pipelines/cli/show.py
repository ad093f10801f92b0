"""Run one request of the command line, compare it with plain decoding, and show the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import typer

from ragspec.pipelines.console.options import OutputOptions, TextOptions
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.answer import Answer
    from ragspec.reports.generation import Generation
    from ragspec.retrievers.search.sentences import Sentence
    from ragspec.sampling.decoding import Decodes
    from ragspec.sampling.settings import Sampling

INTERRUPTED = 130
WARM_UP_TOKENS = 8
AROUND = 80  # characters of the document shown on each side of a sentence
SUPPORT = {
    "supported": "supported: one sentence speaks of the question and has what the answer says",
    "quoted": "quoted: check that the quotation answers the question",
    "unsupported": "unsupported: no one sentence surely speaks of the question and has all that "
    "this says; check it yourself",
}
OnRead = Callable[[int, int], None] | None
OnText = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """One finished request.

    Attributes:
        fields: Fields of the JSON object.
        documents: Names of the texts that drafts may come from, by number.
        extra: Fields of the header of a trace.
        answer: The answer if there are documents.
        comparison: The comparison with a plain run if there is one.
    """

    generation: Generation
    fields: dict[str, Any]
    documents: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    answer: Answer | None = None
    comparison: Comparison | None = None


# Writes the text of a request with an engine, also in part if it is interrupted. The last argument
# says whether to search without speculation too.
TextRunner = Callable[["Engine", "Sampling", OnText, OnRead, bool], Result]


def run_and_show(write: TextRunner, engine: Engine, text: TextOptions, terminal: Terminal) -> None:
    """Write a text and show it, compared on --compare; raise typer.Exit if it was interrupted."""
    output, sampling = text.output, text.sampling.settings_for(engine)
    with terminal.prefill_progress() as on_read:
        on_text = terminal.piece if output.streams else discard
        outcome = write(engine, sampling, on_text, on_read, False)
    interrupted = outcome.generation.finish_reason == "cancelled"
    if output.compare and outcome.generation.tokens and not interrupted:
        outcome.comparison = _compare(write, engine, sampling, outcome, terminal)
        interrupted = outcome.comparison is None
    show(outcome, text, terminal, engine.tokenizer)
    note_seed(sampling, outcome.generation, terminal)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def note_seed(sampling: Sampling, generation: Generation, terminal: Terminal) -> None:
    """Note the seed that was chosen for a sampled text."""
    if sampling.seed is None and not sampling.greedy and generation.tokens:
        terminal.note(f"seed {generation.report.seed}")


def discard(piece: str) -> None:
    """Ignore a piece of text; streaming keeps the text of an interrupted run."""


def _compare(
    write: TextRunner, engine: Engine, sampling: Sampling, outcome: Result, terminal: Terminal
) -> Comparison | None:
    """Return the comparison with a plain run, None if that was interrupted."""
    seeded = replace(sampling, seed=outcome.generation.report.seed, n=1)
    plainly = engine.with_drafter(None).with_limits(1)  # with another prefix cache
    try:
        with terminal.working("decoding plainly"):
            plain = write(plainly, seeded, discard, None, True).generation
    except KeyboardInterrupt:
        return None
    if plain.finish_reason == "cancelled":  # a partial text would count as different
        return None
    return compare(engine, outcome.generation, plain, seeded)


def answer_result(question: str, answer: Answer, **facts: object) -> Result:
    """Return an answer over documents as a `Result`, with further fields."""
    fields = answer.to_dict() | facts
    quotes = [
        record | {"text": answer.text[record["answer_start"] : record["answer_end"]]}
        for record in fields["citations"]
    ]
    # The origin of a draft is the number of its passage in the prompt.
    names = tuple(f"{hit.document.name}, passage {n}" for n, hit in enumerate(answer.passages, 1))
    extra = {name: fields[name] for name in ("answer", "refused", "sentences")}
    extra |= {"question": question, "citations": quotes}
    return Result(answer.generation, fields, names, extra, answer)


def show(outcome: Result, text: TextOptions, terminal: Terminal, tokenizer: Decodes = str) -> None:
    """Show a text, and write its trace on --trace; an extract has no tokens to decode for it."""
    report, comparison = outcome.generation.report, outcome.comparison
    compared = {} if comparison is None else {"compare": asdict(comparison)}
    terminal.json(outcome.fields | {"label": report.label, "report": report.to_dict()} | compared)
    _show_text(outcome, text.output, terminal)
    if text.output.trace is not None:  # last: a full disk must not cost the answer
        from ragspec.reports.trace import write_trace

        write_trace(
            text.output.trace,
            outcome.generation,
            tokenizer,
            model=text.engine.model,
            documents=outcome.documents,
            extra=outcome.extra | compared,
        )


def _show_text(outcome: Result, output: OutputOptions, terminal: Terminal) -> None:
    """Show a text, its sources, and its figures if a model wrote it."""
    report, answer, comparison = outcome.generation.report, outcome.answer, outcome.comparison
    if answer is not None and answer.refused is not None:
        terminal.line(answer.text)
        note_end(answer, terminal)
        nearest = "the nearest sentences are above; " if answer.sentences else ""
        terminal.note(f"{nearest}--no-refusal calls the model anyway")
        return
    terminal.line("" if output.streams else outcome.generation.text)
    if answer is not None:
        for number, citation in enumerate(answer.citations, 1):
            terminal.note(f"  quotation {number}: {citation.document}, {citation.place}")
        if left := len(answer.prompt.left_out):
            fit = f"{len(answer.passages)} of {len(answer.passages) + left} passages"
            terminal.note(f"{fit} fit the model's context; the last were left out")
        note_support(answer, terminal)
        note_end(answer, terminal)
    if outcome.generation.finish_reason == "cancelled":
        terminal.note("interrupted; the text so far is kept")
    elif output.compare and comparison is None and outcome.generation.tokens:
        terminal.note("interrupted while decoding plainly; there is no comparison")
    if report.finish_reason != "extracted":
        terminal.note(report.summary())
    elif output.compare:
        terminal.note("no model was called: there is nothing to compare")
    if comparison is not None:
        terminal.note(comparison.summary(), "bold")


def note_support(answer: Answer, terminal: Terminal) -> None:
    """Note how far the documents support an answer, and by which sentence."""
    by = answer.supporting
    where = f" ({by.hit.document.name}, {by.place})" if by else ""
    terminal.note(SUPPORT[answer.support] + where, "" if by else "bold")


def note_end(answer: Answer, terminal: Terminal) -> None:
    """Note why an answer has no text of the model, or no natural end."""
    if answer.refused is not None:
        terminal.note(f"the model was not called: {answer.refused}", "bold")
    if answer.repeats:
        terminal.note("ended: it began to repeat itself", "bold")
    if answer.cut:
        terminal.note("cut at the limit of tokens; --max-new-tokens sets it")


def note_sentences(sentences: Sequence[Sentence], terminal: Terminal) -> None:
    """Note the sentences that answer a question best, each marked in its document."""
    for number, each in enumerate(sentences, 1):
        before, after = each.hit.document.text[: each.start], each.hit.document.text[each.end :]
        if len(before) > AROUND:  # no part of a word
            before = before[-AROUND:].partition(" ")[2]
        if len(after) > AROUND:
            after = after[:AROUND].rpartition(" ")[0]
        terminal.note(f"{number}  {each.hit.names}, {each.place}", "bold")
        terminal.marked(before, each.text, after)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which two runs differ.

    A forward over several positions may round differently from one over a single position. So in
    bf16 and fp16 two tokens of almost equal score may change places. The margin says how close.

    Attributes:
        plain, speculative: Token ids at the index, None past the end.
        margin: Distance between the target's two best choices in logits, noise included.
    """

    index: int
    plain: int | None
    speculative: int | None
    margin: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs of one request.

    Attributes:
        ratio: seconds_plain / seconds; None for texts of different length.
        decode_ratio: The same for the seconds after search and prefill, which speculation does not
            change.
    """

    seconds_plain: float
    seconds: float
    ratio: float | None
    decode_ratio: float | None
    equal: bool
    first_divergence: Divergence | None

    def summary(self) -> str:
        """Return one line for people."""
        times = f"plain {self.seconds_plain:.2f} s, speculative {self.seconds:.2f} s"
        if self.ratio is None or self.decode_ratio is None:
            times += " for a text of another length"
        else:
            times += f": {self.ratio:.2f} times as fast ({self.decode_ratio:.2f} while decoding)"
        if self.first_divergence is None:
            return f"{times}, the same tokens"
        at = self.first_divergence
        margin = f"where the best two are {at.margin:.2g} apart"
        return f"{times}; the tokens part at number {at.index}, {margin}"


def compare(
    engine: Engine, speculative: Generation, plain: Generation, sampling: Sampling
) -> Comparison:
    """Compare two generations of one prompt and seed; run the model once if they differ."""
    one, other, divergence = plain.report, speculative.report, None
    for index, (token, ours) in enumerate(zip_longest(plain.tokens, speculative.tokens)):
        if token != ours:
            margin = margin_at(engine, plain, index, sampling)
            divergence = Divergence(index, token, ours, margin)
            break
    ratios: list[float | None] = [None, None]
    if len(plain.tokens) == len(speculative.tokens):
        pairs = (one.seconds, other.seconds), (one.decode_seconds, other.decode_seconds)
        ratios = [slow / fast if fast > 0 else 0.0 for slow, fast in pairs]
    ratio, decoding = ratios
    return Comparison(one.seconds, other.seconds, ratio, decoding, divergence is None, divergence)


def margin_at(engine: Engine, plain: Generation, index: int, sampling: Sampling) -> float:
    """Return the distance between the target's two best choices of generated token `index`.

    Runs one forward over prompt and common prefix. The distance is in logits, for a sampled token
    in logits over temperature plus noise.
    """
    import torch

    from ragspec.engine.sequence import open_distribution

    context = [*plain.prompt_tokens, *plain.tokens[:index]]
    ids = torch.tensor([context], device=engine.model.device)
    with torch.inference_mode():
        logits = engine.model(input_ids=ids, use_cache=False).logits[:, -1].double()
    limit = max(1, len(plain.tokens))
    (request,), _ = engine.prepare(plain.prompt_tokens, sampling, {"max_new_tokens": limit})
    request = replace(request, sample=plain.sample)
    distribution = open_distribution(request, engine.target, request.seed or 0)
    values = distribution.best(distribution.process(logits, context, [()]), [index], 2)[1][0]
    return float(values[0] - values[1])
