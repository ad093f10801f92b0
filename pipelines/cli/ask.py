"""`ragspec ask`, `ask-iterative` and `ask-long`: answer a question from documents."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ragspec.errors import InputError, StoreError
from ragspec.pipelines.answering.template import EXTRACT, expect_question, find_template, suited
from ragspec.pipelines.cli import show
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import argument, option, setting, split, takes_records
from ragspec.pipelines.console.terminal import Terminal
from ragspec.retrievers.search.documents import Document, load_document
from ragspec.storage.store import is_store

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.answerer import Answerer
    from ragspec.pipelines.answering.docqa import DocQA
    from ragspec.pipelines.answering.iterative import IterativeRag
    from ragspec.pipelines.answering.long_document import LongDocument
    from ragspec.sampling.settings import Sampling
    from ragspec.sampling.transform import Transform

RAPID, STRIDE = "rapid", 4


@dataclass(frozen=True, slots=True)
class AskOptions:
    """A question over documents."""

    documents: o.DocumentOptions
    text: o.TextOptions
    question: str = argument(..., "Question about the documents.")
    no_refusal: bool = option(
        False, "Ask the model even if no document covers the question.", "--no-refusal"
    )

    def __post_init__(self) -> None:
        expect_question(checks.checked_text(self.question), "-")
        if not self.documents.docs:
            raise InputError(
                "Expected --docs, got none. It reads documents or opens what `ragspec index` built."
            )


@dataclass(frozen=True, slots=True)
class IterativeOptions(AskOptions):
    """A question over documents that are searched while the answer is written."""

    stride: int = option(STRIDE, "Tokens between two searches.", min=1)
    search: Literal["dense", "sparse", "fused"] | None = setting(
        None, "Kind of search: dense, sparse or fused. Default: what the index was built for."
    )
    speculate: str = setting(
        "auto",
        "Strides written on guesses before the search checks them: auto, a number, or off. The "
        "text stays the same.",
    )
    rounds: int | None = setting(
        None,
        "Write the whole answer this many times, each over what is found for the one before "
        "(Iter-RetGen), in place of a search every few tokens.",
        least=1,
    )

    def __post_init__(self) -> None:
        AskOptions.__post_init__(self)
        checks.check_guesses(self.speculate)
        if self.rounds is not None and (self.stride, self.speculate) != (STRIDE, "auto"):
            raise InputError("got rounds beside --stride or speculate; expected one. Drop one.")
        if (most := self.documents.top_passages) not in (None, 1):
            raise InputError(f"Expected one passage, got --set top-passages={most}. Leave it out.")


@takes_records
def ask(options: AskOptions) -> None:
    """Answer a question from documents, with citations."""
    answer(options, lambda qa, engine, plain: qa.over(engine))


@takes_records
def ask_iterative(options: IterativeOptions) -> None:
    """Answer a question and search again while the answer is written (RaLMSpec, Iter-RetGen)."""

    def over(qa: DocQA, engine: Engine, plain: bool) -> IterativeRag:
        from ragspec.pipelines.answering.iterative import IterativeRag, IterativeSearch

        settings = IterativeSearch(
            stride=options.stride,
            search=options.search,
            speculate="off" if plain else o.number_or_name(options.speculate),
            rounds=options.rounds,
        )
        prompt, system = options.documents.prompt, options.documents.system
        return IterativeRag(engine, qa.retriever, settings, prompt=prompt, system=system)

    answer(options, over)


def answer(options: AskOptions, over: Callable[[DocQA, Engine, bool], Answerer]) -> None:
    """Answer a question and show it; `over` returns an answerer, without speculation if True."""
    text, question = options.text, options.question
    arguments: dict[str, Any] = {"refuse": not options.no_refusal, **text.read_prediction()}
    terminal = Terminal(quiet=text.output.json)
    qa = options.documents.open(terminal)
    skipped = [asdict(each) for each in qa.skipped]
    if options.documents.prompt == EXTRACT:
        stream = terminal.piece if text.output.streams else None
        extract = qa.ask(question, refuse=not options.no_refusal, stream=stream)
        if extract.refused:
            show.note_sentences(extract.sentences, terminal)
        return show.show(show.answer_result(question, extract, skipped=skipped), text, terminal)
    with terminal.working("loading the model"):
        engine = text.engine.load_engine(text.stores)
    if text.output.compare:
        over(qa, engine, False).ask(question, max_new_tokens=show.WARM_UP_TOKENS, **arguments)
        engine.prefix_cache.clear()
    ask_and_show(options, engine, partial(over, qa), arguments, terminal, skipped=skipped)


def ask_and_show(
    options: AskOptions | LongOptions,
    engine: Engine,
    over: Callable[[Engine, bool], Answerer],
    arguments: dict[str, object],
    terminal: Terminal,
    **facts: object,
) -> None:
    """Ask with an engine, and plainly on --compare, and show the answer with further facts."""
    from ragspec.pipelines.answering.answerer import NEW_TOKENS

    text, question = options.text, options.question
    arguments = {**arguments, "max_new_tokens": text.sampling.max_new_tokens or NEW_TOKENS}

    def write(
        engine: Engine, sampling: Sampling, on_text: show.OnText, on_read: show.OnRead, plain: bool
    ) -> show.Result:
        every: dict[str, Any] = {**arguments, "stream": on_text, "on_read": on_read}
        if not plain:
            every["on_search"] = lambda result: show.note_sentences(result.sentences, terminal)
        reply = over(engine, plain).ask(question, sampling, **every)
        return show.answer_result(question, reply, **facts)

    show.run_and_show(write, engine, text, terminal)


class LongTextOptions(o.TextOptions):
    """Text options with which the target itself may read for "rapid"."""

    supplied = (RAPID,)


def parse_range(text: str) -> tuple[int, int]:
    """Return the numbers of a range of tokens; raise InputError for other text."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise InputError(f"Expected token-range=FROM:TO, such as 0:7000, got {text!r}.")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, slots=True)
class LongOptions:
    """A question over one long document."""

    text: LongTextOptions
    question: str = argument(..., "Question about the document.")
    doc: Path | None = option(None, "The document: one file.", "--doc", "-d", dir_okay=False)
    token_range: tuple[int, int] | None = setting(
        None, "FROM:TO, the tokens of the document to read.", parse=parse_range
    )
    save_cache: Path | None = option(
        None, "Folder for the document's KV cache: written first, then opened."
    )
    steer: float | None = option(
        None,
        "Move the answer's distribution towards what the question finds, so strongly; "
        "RAPID's value is 10. The answer is then not exact.",
    )
    prompt: str | None = setting(None, o.PROMPT)
    system: str | None = setting(None, o.SYSTEM)

    def __post_init__(self) -> None:
        expect_question(checks.checked_text(self.question), "-")
        if self.steer is not None and not 0.0 <= self.steer < math.inf:
            raise InputError(f"Expected --steer of 0 or more, got {self.steer:g}.")
        if self.prompt is not None:
            find_template(self.prompt, self.system)
        if self.save_cache is not None:  # before the document is read, which takes long
            check = checks.check_store if self.saved else checks.check_new_store
            check(self.save_cache, "saved document")
        if self.saved and (self.doc or self.token_range or self.prompt or self.system):
            raise InputError(
                f"{self.save_cache} holds a saved document; expected it without --doc, "
                "token-range, prompt and system, or another folder to save this one in."
            )
        if self.doc is not None:
            checks.check_paths(self.doc)
        elif not self.saved:
            folder = "none" if self.save_cache is None else f"{self.save_cache}, which holds none"
            raise InputError(
                f"Expected --doc FILE, or --save-cache FOLDER with a saved document; got {folder}."
            )

    @property
    def saved(self) -> bool:
        """Whether --save-cache holds a saved document."""
        return self.save_cache is not None and is_store(self.save_cache)


@takes_records
def ask_long(options: LongOptions) -> None:
    """Answer a question over one long document; it is read once."""
    text, question = options.text, options.question
    arguments: dict[str, Any] = text.read_prediction()
    source = None if options.doc is None else load_document(options.doc)
    terminal = Terminal(quiet=text.output.json)
    with terminal.working("loading the model"):
        engine, transform = _load(options)
    if transform is not None:
        arguments["transform"] = transform
    document, failure = _open_document(engine, options, source, terminal)
    if text.output.compare:  # warm up: the first question copies the keys
        document.ask(question, stream=show.discard, max_new_tokens=1, **arguments)

    def over(engine: Engine, plain: bool) -> LongDocument:
        return document.over(engine) if plain else document

    ask_and_show(options, engine, over, arguments, terminal)
    if failure is not None:
        raise failure


def _load(long: LongOptions) -> tuple[Engine, Transform | None]:
    """Return the engine, and the transform that steers its answers or None.

    A draft model reads the chunks with --steer or drafter "rapid", else the whole prompt.
    """
    from ragspec.drafters.build import model_drafter
    from ragspec.retrievers.methods.rapid import Rapid

    options, stores = long.text.engine, long.text.stores
    names = split(options.drafter)
    if long.steer is None and RAPID not in names:
        return options.load_engine(stores), None
    others = ",".join(name for name in names if name != RAPID) or "none"
    engine = replace(options, draft_model=None, drafter=others).load_engine(stores)
    reader: Any = engine.target
    if options.draft_model is not None:
        reader = model_drafter(options.draft_model, engine.tokenizer, engine.target).model
    rapid = Rapid(reader, eta=long.steer or 0.0)
    if RAPID in names or options.draft_model is not None:
        drafters = [rapid] if engine.drafter is None else [engine.drafter, rapid]
        engine = engine.with_drafter(drafters, engine.budget)
    return engine, rapid.transform


def _open_document(
    engine: Engine, long: LongOptions, source: Document | None, terminal: Terminal
) -> tuple[LongDocument, StoreError | None]:
    """Open a saved document, or read one and save it; also return why that failed."""
    from ragspec.pipelines.answering.long_document import LongDocument

    if source is None:
        assert long.save_cache is not None
        with terminal.working("opening the saved document"):
            return LongDocument.open(long.save_cache, engine), None
    with terminal.prefill_progress() as on_read:
        document = LongDocument.open(
            source,
            engine,
            token_range=long.token_range,
            prompt=find_template(long.prompt or suited(engine.tokenizer), long.system),
            on_read=on_read,
        )
    if long.save_cache is not None:
        try:
            with terminal.working("saving it"):
                document.save(long.save_cache)
        except StoreError as error:  # which must not cost the answer
            return document, error
        size = f"{document.tokens:,} tokens, {document.bytes / 1e6:,.0f} MB"
        terminal.note(f"saved in {long.save_cache}: {size}")
    return document, None
