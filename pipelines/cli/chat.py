"""`ragspec chat`: a conversation in the terminal, over documents or without."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragspec.errors import InputError, RagspecError
from ragspec.pipelines.cli.ask import Asking
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from ragspec.pipelines.chat.conversation import Conversation, Reply
    from ragspec.pipelines.docqa.docqa import DocQA
    from ragspec.sampling.settings import Sampling

NEW_TOKENS = 256
COMMANDS = {
    "/stats": "what the last answer cost, and how full the context is",
    "/clear": "begin a new conversation",
    "/help": "this list",
    "/exit": "leave (so does Ctrl-D)",
}
PROMPT = "> "


def chat(
    docs: Annotated[
        list[Path] | None, typer.Option("--docs", "-d", help="A folder or a file; repeatable.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="An index that `ragspec index` built.")
    ] = None,
    embedder: o.EmbedderOption = None,
    top_passages: o.PassagesOption = None,
    system: o.SystemOption = None,
    model: o.ModelOption = "smollm2",
    draft_model: o.DraftModelOption = None,
    drafter: o.DrafterOption = None,
    budget: o.BudgetOption = "auto",
    temperature: o.TemperatureOption = 0.0,
    top_p: o.TopPOption = 1.0,
    top_k: o.TopKOption = 0,
    use_generation_config: o.GenerationConfigOption = False,
    seed: o.SeedOption = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer.")
    ] = NEW_TOKENS,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    device_map: o.DeviceMapOption = None,
    adapter: o.AdapterOption = None,
    quantize: o.QuantizeOption = None,
    static: o.StaticOption = "auto",
) -> None:
    """Talk with a chat model; what was read of the conversation is not read again."""
    asking = Asking(
        engine=o.EngineOptions(
            *(model, draft_model, drafter, budget, device, dtype),
            device_map=device_map,
            adapter=adapter,
            quantize=quantize,
            static=static,
        ),
        sampling=o.sampling_of(temperature, top_p, top_k, seed),
        max_new_tokens=max_new_tokens,
        system=system,
        use_generation_config=use_generation_config,
    )
    converse(None, docs or [], index, top_passages, asking, embedder)


def converse(
    question: str | None,
    docs: Sequence[Path],
    index: Path | None,
    passages: int | None,
    asking: Asking,
    embedder: str | None = None,
) -> None:
    """Answer a question, if there is one, and then what is typed.

    Raises InputError for --docs beside --index, and for what is meant for a single answer.
    """
    from ragspec.pipelines.chat.conversation import Conversation

    if docs and index:
        raise InputError("got both of --docs and --index; expected one of them, or neither.")
    if asking.json or asking.compare or asking.trace or asking.prediction is not None:
        raise InputError(
            "got --follow-up with --json, --compare, --trace or --prediction, which are for one "
            "answer; expected it without them."
        )
    terminal = Terminal()
    with terminal.working("loading the model and reading the documents"):
        qa = read(docs, index, embedder, terminal)
        engine = asking.engine.engine()
        sampling = asking.chosen(engine)
        conversation = Conversation(
            engine, qa, system=asking.system, top_k=passages, prompt=asking.prompt
        )
    begun = Talk(conversation, sampling, asking.max_new_tokens or NEW_TOKENS, terminal)
    if question is not None:
        answer(question, begun)
    talk(begun, typed())


def read(
    docs: Sequence[Path], index: Path | None, embedder: str | None, terminal: Terminal
) -> DocQA | None:
    """Return what is searched, None for nothing; says what was not read."""
    if not docs and index is None:
        return None
    from ragspec.pipelines.docqa.docqa import DocQA
    from ragspec.retrievers.search.dense import DEFAULT_EMBEDDER

    if index is not None:
        return DocQA.from_index(index, embedder=embedder)
    qa = DocQA.from_documents(docs, embedder=embedder or DEFAULT_EMBEDDER)
    for skipped in qa.skipped:
        terminal.note(f"not read: {skipped.path} {skipped.reason}")
    return qa


@dataclass(slots=True)
class Talk:
    """A conversation at a terminal. last: the reply before."""

    conversation: Conversation
    sampling: Sampling
    max_new_tokens: int
    terminal: Terminal
    last: Reply | None = None


def typed() -> Iterator[str]:
    """Yield what is typed, line by line; without a terminal the lines of standard input."""
    if not sys.stdin.isatty():
        try:
            for line in sys.stdin:
                yield line.rstrip("\n")
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 ({error}); expected text.") from error
        return
    import readline  # noqa: F401 - gives `input` a history and editing

    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            return


def talk(talk: Talk, lines: Iterator[str]) -> None:
    """Answer line by line until they end; Ctrl-C ends an answer, at the prompt it leaves."""
    terminal = talk.terminal
    if sys.stdin.isatty():
        terminal.note(f"commands: {', '.join(COMMANDS)}; Ctrl-C stops an answer")
    for line in lines:
        said = line.strip()
        if said in ("/exit", "/quit"):
            return
        if said.startswith("/"):
            command(said, talk)
        elif said:
            try:
                answer(o.checked_text(said), talk)
            except RagspecError as error:  # the conversation goes on
                terminal.error(str(error))


def answer(said: str, talk: Talk) -> None:
    """Answer one turn as it is written, and say what it rests on."""
    from ragspec.pipelines.docqa.docqa import REFUSED

    terminal = talk.terminal
    show: Callable[[str], None] = terminal.piece
    with terminal.prefill_progress() as on_progress:
        talk.last = reply = talk.conversation.ask(
            said,
            talk.sampling,
            max_new_tokens=talk.max_new_tokens,
            stream=show,
            on_read=on_progress,
        )
    terminal.line(reply.text if reply.generation.finish_reason == REFUSED else "")
    if reply.left:
        turns = "turn" if reply.left == 1 else "turns"
        terminal.note(f"the context was full: the oldest {reply.left} {turns} left", "bold")
    for citation in reply.citations:
        terminal.note(f"  [{citation.passage}] {citation.document}, {citation.place}")
    if reply.refused is not None:
        terminal.note(f"the model was not asked: {reply.refused}", "bold")
    elif talk.conversation.documents is not None and not (reply.hits or reply.supported):
        terminal.note("no passage was found for this turn: the model had the conversation alone")
    elif talk.conversation.documents is not None and not reply.supported:
        terminal.note("nothing in your documents was quoted: check this answer yourself", "bold")
    if reply.repeats:
        terminal.note("ended: it began to repeat itself", "bold")
    if reply.cut:
        terminal.note("cut at the limit of tokens; --max-new-tokens sets it")
    if reply.generation.finish_reason == "cancelled":
        terminal.note("interrupted; this is what was written")


def command(said: str, talk: Talk) -> None:
    """Do what a command says."""
    terminal = talk.terminal
    if said == "/clear":
        talk.conversation.clear()
        talk.last = None
        terminal.note("a new conversation")
    elif said == "/stats" and talk.last is not None:
        for line in stats(talk.conversation, talk.last):
            terminal.note(line, "")
    elif said == "/stats":
        terminal.note("nothing was asked yet")
    else:
        if said not in COMMANDS:
            terminal.note(f"no command {said}; these are known:")
        for name, what in COMMANDS.items():
            terminal.note(f"  {name:8} {what}")


def stats(conversation: Conversation, last: Reply) -> Iterator[str]:
    """Yield the figures of a conversation and of its last answer."""
    report, limit = last.report, conversation.engine.target.max_length
    used = report.prompt_tokens + report.tokens
    of = "" if limit is None else f" of {limit}"
    turns = len(conversation.turns)
    yield f"{turns} turn{'s' * (turns != 1)}, {used}{of} tokens of context"
    read_now = report.prompt_tokens - report.cached_tokens
    yield f"of the last prompt {report.cached_tokens} tokens were known and {read_now} read"
    yield report.summary()
