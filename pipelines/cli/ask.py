"""What `ragspec ask`, `generate` and `index` do once their options are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError, UnsupportedModelError
from ragspec.pipelines.console.options import EngineOptions, be_quiet
from ragspec.pipelines.console.terminal import Terminal
from ragspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.engine.output import Generation
    from ragspec.pipelines.cli.compare import Comparison
    from ragspec.pipelines.docqa.docqa import Answer, DocQA
    from ragspec.pipelines.iterative.rag import IterativeRag
    from ragspec.pipelines.knn.knn_lm import KnnLM
    from ragspec.reports.report import Report
    from ragspec.retrievers.knn.datastore import Datastore

WARM_UP_TOKENS = 8
OnRead = Callable[[int, int], None] | None


@dataclass(frozen=True, slots=True)
class Iterative:
    """How the passage is looked up anew while an answer is written; see `IterativeRag`."""

    every: int
    search: str | None
    speculate: str | int
    rounds: int | None = None

    def rag(self, qa: DocQA, engine: Engine, asking: Asking, *, plain: bool) -> IterativeRag:
        """Return the pipeline over the same documents; plain: every search is waited for."""
        from ragspec.pipelines.iterative.rag import IterativeRag as AnyRag

        return AnyRag(
            engine,
            qa.retriever,
            every=self.every,
            search=self.search,
            speculate="off" if plain else self.speculate,
            rounds=self.rounds,
            prompt=asking.prompt,
            system=asking.system,
        )


@dataclass(frozen=True, slots=True)
class Mixed:
    """A datastore that every token is chosen by, too; see `KnnLM`."""

    datastore: Path
    k: int
    weight: float
    speculate: str | int

    def opened(self) -> Datastore:
        """Open the datastore; raises StoreError."""
        from ragspec.retrievers.knn.datastore import Datastore as AnyDatastore

        return AnyDatastore.open(self.datastore)

    def lm(self, engine: Engine, store: Datastore, *, plain: bool) -> KnnLM:
        """Return the language model; plain: every search is waited for."""
        from ragspec.pipelines.knn.knn_lm import KnnLM as AnyLM

        speculate = "off" if plain else self.speculate
        return AnyLM(engine, store, k=self.k, weight=self.weight, speculate=speculate)


@dataclass(frozen=True, slots=True)
class Asking:
    """One request of the command line."""

    engine: EngineOptions
    sampling: Sampling
    max_new_tokens: int | None  # None: what `Engine.generate` takes by default
    json: bool = False
    compare: bool = False
    trace: Path | None = None
    stream: bool = True
    prediction: str | None = None
    prompt: str | None = None
    system: str | None = None
    refuse: bool = True
    use_generation_config: bool = False
    iterative: Iterative | None = None
    mixed: Mixed | None = None

    def chosen(self, engine: Engine) -> Sampling:
        """Return the sampling: that of the options, or of the model's own generation config."""
        if not self.use_generation_config:
            return self.sampling
        if replace(self.sampling, seed=None) != Sampling():
            raise InputError(
                "got --use-generation-config with --temperature, --top-p or --top-k; expected "
                "the model's "
                "own settings or yours. Leave one out."
            )
        return Sampling.from_generation_config(
            engine.target.generation_config, seed=self.sampling.seed, n=1
        )

    @property
    def streams(self) -> bool:
        """Whether the text is shown piece by piece; not when times are compared: showing costs."""
        return self.stream and not self.json and not self.compare

    @property
    def options(self) -> dict[str, Any]:
        """Further options of `Engine.generate`: what was given, and no more."""
        return {} if self.prediction is None else {"prediction": self.prediction}


@dataclass(slots=True)
class Result:
    """What is shown of a request: `fields` go into the JSON object as they are."""

    generation: Generation
    report: Report
    fields: dict[str, Any]
    documents: tuple[str, ...] = ()
    extra: dict[str, Any] | None = None


def continue_text(text: str, stop: Sequence[str], asking: Asking, *, as_chat: bool = False) -> bool:
    """Continue a text, or answer it as a chat model, and show the result.

    Returns whether it was interrupted. Raises UnsupportedModelError for a model without a chat
    template where it should answer.
    """
    terminal = Terminal(quiet=asking.json)
    mixed = asking.mixed
    store = mixed.opened() if mixed is not None else None  # before the model: it may be none
    with terminal.working("loading the model"):
        engine = asking.engine.engine()
        prompt = _turn(engine, text, asking.system) if as_chat else text
        if asking.compare:
            engine.generate(prompt, max_new_tokens=WARM_UP_TOKENS)
    asking = replace(asking, sampling=asking.chosen(engine))

    def run(
        engine: Engine,
        sampling: Sampling,
        show: bool,
        on_read: OnRead = None,
        *,
        plain: bool = False,
    ) -> Generation:
        options: Any = {"max_new_tokens": asking.max_new_tokens, "stop": stop, "on_read": on_read}
        if mixed is not None and store is not None:
            message = terminal.piece if show else unseen
            with terminal.working("opening the datastore"):
                lm = mixed.lm(engine, store, plain=plain)
            return lm.generate(prompt, sampling, stream=message, **options, **asking.options)
        stream = engine.stream(prompt, sampling, **options, **asking.options)
        try:
            for piece in stream:
                if show:
                    terminal.piece(piece)
        except KeyboardInterrupt:
            stream.close()
        return stream.result

    with terminal.prefill_progress() as on_progress:
        generation = run(engine, asking.sampling, asking.streams, on_progress)
    fields = {"text": generation.text, "finish_reason": generation.finish_reason}
    result = Result(generation, generation.report, fields, extra={"prompt": text})
    compared, interrupted = compared_with_plain(
        engine, result, asking, lambda e, s: run(e, s, False, plain=True), terminal
    )
    show_result(result, compared, engine, asking, terminal)
    return interrupted


def _turn(engine: Engine, text: str, system: str | None) -> list[dict[str, str]]:
    """Return the messages of one turn."""
    if not getattr(engine.tokenizer, "chat_template", None):
        raise UnsupportedModelError(
            f"{type(engine.model).__name__} comes without a chat template; expected a chat model, "
            "such as smollm2 (`ragspec models`). Leave --chat out to continue the text."
        )
    said = [{"role": "system", "content": system}] if system else []
    return [*said, {"role": "user", "content": text}]


def answer_question(
    question: str,
    docs: Sequence[Path],
    index: Path | None,
    passages: int | None,
    asking: Asking,
    embedder: str | None = None,
) -> bool:
    """Answer a question and show the result; return whether it was interrupted.

    embedder: None is the bundled one for documents, and the recorded one for an index.
    """
    from ragspec.pipelines.docqa.docqa import NEW_TOKENS, DocQA
    from ragspec.pipelines.docqa.template import find_template

    be_quiet()
    terminal = Terminal(quiet=asking.json)
    if asking.prompt is not None:
        find_template(asking.prompt)  # refused before anything is read
    with terminal.working("reading the documents"):
        if index is None:
            qa = DocQA.from_documents(docs, embedder=_named(embedder))
        else:
            qa = DocQA.from_index(index, embedder=embedder)
    for skipped in qa.skipped:
        terminal.note(f"not read: {skipped.path} {skipped.reason}")
    with terminal.working("loading the model"):
        engine = asking.engine.engine()
    asking = replace(asking, sampling=asking.chosen(engine))

    def run(
        engine: Engine,
        sampling: Sampling,
        stream: Callable[[str], None] | None,
        on_read: OnRead = None,
        *,
        plain: bool = False,
    ) -> Answer:
        options: dict[str, Any] = {
            "max_new_tokens": asking.max_new_tokens or NEW_TOKENS,
            "refuse": asking.refuse,
            "stream": stream,
            "on_read": on_read,
            **asking.options,
        }
        if asking.iterative is not None:
            rag = asking.iterative.rag(qa, engine, asking, plain=plain)
            return rag.ask(question, sampling, **options)
        options |= {"prompt": asking.prompt, "system": asking.system, "top_k": passages}
        return over(qa, engine).ask(question, sampling, **options)

    if asking.compare:
        over(qa, engine).ask(
            question,
            max_new_tokens=WARM_UP_TOKENS,
            top_k=passages,
            prompt=asking.prompt,
            system=asking.system,
            refuse=asking.refuse,
        )
    with terminal.prefill_progress() as on_progress:
        answer = run(
            engine, asking.sampling, terminal.piece if asking.streams else unseen, on_progress
        )
    result = answered(question, answer)
    result.fields["skipped"] = [asdict(skipped) for skipped in qa.skipped]
    compared, interrupted = compared_with_plain(
        engine, result, asking, lambda e, s: run(e, s, unseen, plain=True).generation, terminal
    )
    show_result(result, compared, engine, asking, terminal)
    return interrupted


def unseen(piece: str) -> None:
    """Take a piece that is not shown: a streamed text survives an interrupt."""


def _named(embedder: str | None) -> str:
    from ragspec.retrievers.search.dense import DEFAULT_EMBEDDER

    return DEFAULT_EMBEDDER if embedder is None else embedder


def over(qa: DocQA, engine: Engine) -> DocQA:
    """Return the same documents asked through another engine."""
    from ragspec.pipelines.docqa.docqa import DocQA as AnyDocQA

    return AnyDocQA(qa.retriever, engine=engine, skipped=qa.skipped)


def answered(question: str, answer: Answer) -> Result:
    """Return what is shown of an answer."""
    fields = answer.to_dict()
    for text, cited in zip(fields["citations"], answer.citations, strict=True):
        text["place"] = cited.place
    quotes = [
        c | {"text": answer.text[c["answer_start"] : c["answer_end"]]} for c in fields["citations"]
    ]
    # The origin of a draft counts the passages of the prompt.
    names = tuple(
        f"{hit.document.name}, passage {number}" for number, hit in enumerate(answer.passages, 1)
    )
    extra = {"question": question, "citations": quotes}
    return Result(answer.generation, answer.report, fields, names, extra)


def compared_with_plain(
    engine: Engine,
    result: Result,
    asking: Asking,
    run: Callable[[Engine, Sampling], Generation],
    terminal: Terminal,
) -> tuple[Comparison | None, bool]:
    """Return the comparison where one is wanted, and whether either run was interrupted."""
    cancelled = result.generation.finish_reason == "cancelled"
    if not asking.compare or cancelled or not result.generation.tokens:
        return None, cancelled
    from ragspec.pipelines.cli.compare import compare, plain_engine, same_seed

    try:
        with terminal.working("decoding plainly"):
            plain = run(plain_engine(engine), same_seed(asking.sampling, result.generation))
    except KeyboardInterrupt:
        return None, True
    if plain.finish_reason == "cancelled":  # half a run would look like another text
        return None, True
    return compare(engine, result.generation, plain, asking.sampling), False


def show_result(
    result: Result,
    compared: Comparison | None,
    engine: Engine,
    asking: Asking,
    terminal: Terminal,
) -> None:
    """Show the result, or print it as JSON, and write the trace where one is wanted."""
    extra = dict(result.extra or {})
    if compared is not None:
        extra["compare"] = compared.to_dict()
    if asking.json:
        match = result.fields | {"label": result.report.label, "report": result.report.to_dict()}
        terminal.json(match | ({"compare": compared.to_dict()} if compared else {}))
    else:
        _show_to_people(result, compared, engine, asking, terminal)
    if asking.trace is not None:  # last: a full disk must not cost the answer
        _write_trace(asking.trace, result, engine, asking.engine.model, extra)


def _show_to_people(
    result: Result,
    compared: Comparison | None,
    engine: Engine,
    asking: Asking,
    terminal: Terminal,
) -> None:
    if result.fields.get("refused"):
        terminal.line(result.generation.text)
        terminal.note(f"the model was not asked: {result.fields['refused']}", "bold")
        nearest = f"nearest: {result.documents[0]}; " if result.documents else ""
        terminal.note(f"{nearest}--no-refusal asks it all the same")
        return
    if asking.streams:
        terminal.line()
    else:
        _show_coloured(result, engine, terminal)
    _say_what_it_rests_on(result, terminal)
    if result.generation.finish_reason == "cancelled":
        terminal.note("interrupted; this is what was written")
    elif asking.compare and compared is None and result.generation.tokens:
        terminal.note("interrupted while decoding plainly; there is no comparison")
    terminal.note(result.report.summary())
    if compared is not None:
        terminal.note(compared.summary(), "bold")


def _say_what_it_rests_on(result: Result, terminal: Terminal) -> None:
    """Name the quotations of an answer, what it lacks, and why it ended; of other texts nothing."""
    for number, citation in enumerate(result.fields.get("citations", ()), 1):
        terminal.note(f"  quotation {number}: {citation['document']}, {citation['place']}")
    if result.fields.get("left_out"):
        text, left = len(result.fields["passages"]), result.fields["left_out"]
        terminal.note(f"{text} of {text + left} passages fit the model's context; the last left")
    if not result.fields.get("supported", True):
        terminal.note("nothing in your documents was quoted: check this answer yourself", "bold")
    if result.fields.get("repeats"):
        terminal.note("ended: it began to repeat itself", "bold")
    if result.generation.finish_reason == "length" and "citations" in result.fields:
        terminal.note("cut at the limit of tokens; --max-new-tokens sets it")


def _show_coloured(result: Result, engine: Engine, terminal: Terminal) -> None:
    from ragspec.pipelines.page.run_view import run_view

    view = run_view(trace_of(result, engine))
    terminal.spans(view.spans, view.legend)


def trace_of(result: Result, engine: Engine, model: str = "") -> Any:
    """Return the result as the trace that would be written for it."""
    from ragspec.reports.trace import Trace, TraceHeader, step_texts

    header = TraceHeader(
        model=model,
        prompt_tokens=len(result.generation.prompt_tokens),
        label=result.report.label,
        seed=result.report.seed,
        documents=result.documents,
        extra=dict(result.extra or {}),
    )
    steps = tuple(result.generation.steps)
    return Trace(header, steps, step_texts(steps, decoder(engine)), result.report, complete=True)


def _write_trace(
    path: Path, result: Result, engine: Engine, model: str, extra: dict[str, Any]
) -> None:
    from ragspec.reports.trace import write_trace

    generation = replace(result.generation, report=result.report)
    names = result.documents
    write_trace(path, generation, decoder(engine), model=model, documents=names, extra=extra)


def decoder(engine: Engine) -> Callable[[list[int]], str]:
    """Return what turns token ids into text, special tokens left out."""
    tokenizer = engine.tokenizer

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode
