"""`ragspec chat`: a conversation in the terminal, over documents or without."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragspec.errors import RagspecError, pluralize
from ragspec.pipelines.answering.template import expect_question
from ragspec.pipelines.cli.show import note_end, note_seed, note_sentences, note_support
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.records import argument, takes_records
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from ragspec.pipelines.answering.conversation import Conversation
    from ragspec.sampling.settings import Sampling

NEW_TOKENS = 256
COMMANDS = {
    "/clear": "begin a new conversation",
    "/help": "this list",
    "/exit": "leave (so does Ctrl-D)",
}


@dataclass(frozen=True, slots=True)
class ChatEngineOptions(o.EngineOptions):
    """Engine options whose model is a chat model."""

    model: o.ModelOption = "smollm2"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """A conversation."""

    documents: o.DocumentOptions
    engine: ChatEngineOptions
    sampling: o.SamplingOptions
    question: str | None = argument(None, "First question; further ones are typed.")

    def __post_init__(self) -> None:
        if self.question is not None:
            expect_question(checks.checked_text(self.question), "-")
        checks.check_chat_model(self.engine.model)
        self.engine.check_needs()


@takes_records
def chat(options: ChatOptions) -> None:
    """Talk with a chat model, over documents or without; each turn is read once."""
    terminal = Terminal()
    qa = options.documents.open(terminal) if options.documents.docs else None

    from ragspec.pipelines.answering.conversation import Conversation

    with terminal.working("loading the model"):
        engine = options.engine.load_engine()
        conversation = Conversation(engine, qa, **options.documents.settings)
    sampling, limit = options.sampling.settings_for(engine), options.sampling.max_new_tokens
    session = ChatSession(conversation, sampling, limit or NEW_TOKENS, terminal)
    if options.question is not None:
        session.answer(options.question)
    session.run(read_lines())


@dataclass(slots=True)
class ChatSession:
    """A conversation at a terminal."""

    conversation: "Conversation"
    sampling: "Sampling"
    max_new_tokens: int
    terminal: Terminal

    def run(self, lines: Iterator[str]) -> None:
        """Answer lines until they end or a line is /exit; errors are shown."""
        if sys.stdin.isatty():
            self.terminal.note(f"commands: {', '.join(COMMANDS)}; Ctrl-C stops an answer")
        for line in lines:
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text.startswith("/"):
                self.execute(text)
            elif text:
                try:
                    self.answer(checks.checked_text(text))
                except RagspecError as error:  # the conversation goes on
                    self.terminal.error(str(error))

    def answer(self, text: str) -> None:
        """Answer one turn, and show its text as it is written and then its sources."""
        terminal = self.terminal
        with terminal.prefill_progress() as on_read:
            reply = self.conversation.ask(
                text,
                self.sampling,
                max_new_tokens=self.max_new_tokens,
                stream=terminal.piece,
                on_read=on_read,
                on_search=lambda result: note_sentences(result.sentences, terminal),
            )
        terminal.line(reply.text if reply.refused else "")
        if dropped := reply.dropped_turns:
            terminal.note(f"context full: {pluralize(dropped, 'oldest turn')} left out", "bold")
        for citation in reply.citations:
            terminal.note(f"  [{citation.passage}] {citation.document}, {citation.place}")
        if self.conversation.retriever is not None and reply.refused is None:
            if reply.sentences or reply.citations:
                note_support(reply, terminal)
            else:
                terminal.note("no passage was found: the model had the conversation alone")
        note_end(reply, terminal)
        note_seed(self.sampling, reply.generation, terminal)
        if reply.generation.finish_reason == "cancelled":
            terminal.note("interrupted; the text so far is kept")

    def execute(self, command: str) -> None:
        """Execute one of COMMANDS."""
        terminal = self.terminal
        if command == "/clear":
            self.conversation.clear()
            terminal.note("a new conversation")
        else:
            if command not in COMMANDS:
                terminal.note(f"no command {command}; the commands are:")
            for name, effect in COMMANDS.items():
                terminal.note(f"  {name:8} {effect}")


def read_lines() -> Iterator[str]:
    """Yield the lines that the user types; without a terminal those of standard input."""
    if not sys.stdin.isatty():
        yield from (line.removeprefix("\ufeff") for line in sys.stdin)
        return
    import readline  # noqa: F401 - gives `input` a history and editing

    while True:
        try:
            yield input("> ")
        except EOFError:
            return
