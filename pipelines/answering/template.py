"""Prompt templates for questions over passages: four by name, or a Jinja template of your own.

"evidence" asks for two lines, the sentence that holds the answer and the answer itself: the
quotation can be checked, and drafted. "quote" asks for the sentence alone. "answer" asks for an
answer in the model's own words. "extract" asks no model: the documents' own sentences are the
answer. A Jinja template receives `question` and `passages`, each with `number`, `title` and `text`.
It writes the user's turn of a chat model, or the whole prompt of another model. Passages on lines
of their own are drafted from and cited. By default `suited` chooses the template.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ragspec.engine.plain_text import render_chat
from ragspec.errors import InputError
from ragspec.registry import expect_known
from ragspec.storage.filesystem import expect_path, read_input
from ragspec.types import Tokenizer

LABELS = re.compile(r"\A\s*(?:Evidence:)?\s*(?:\[\d+\])?")
ANSWER = re.compile(r"^[ \t]*Answer:", re.M)
TWO_LINES = (
    "Answer the question from the numbered passages alone, in two lines. Line one: 'Evidence: "
    "[k] ' and the sentence of passage k that holds the answer, copied word for word. Line two: "
    "'Answer: ' and the answer, as short as it can be."
)
ONE_SENTENCE = (
    "Copy the sentence of the numbered passages that answers the question, word for word, with the "
    "number of its passage in brackets before it. Write nothing else."
)
JINJA = "Expected Jinja over `question` and `passages` (each with number, title and text)."
# Of 24 prompts, this one had the most right answers that do not mention the prompt
# (benchmarks/RESULTS.md).
READ, FULLY = "Read the text and answer the question below.", "Answer in a full sentence."
Passages = Sequence[tuple[str, str]]  # titles and texts


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A prompt template for questions over passages.

    Attributes:
        instruction, closing: Text before the passages and after the question, for chat models.
        opening: Beginning of the answer, for other models.
        two_lines: Whether to ask for evidence and answer; their labels are drafted too.
        one_sentence: Whether to ask for evidence alone.
        extracts: Answer by the documents' sentences, without the model.
        stop: Strings that end an answer.
        template: Jinja source in place of instruction, closing and opening.
        system: System message of a chat model.
    """

    name: str
    instruction: str = ""
    closing: str = ""
    opening: str = ""
    two_lines: bool = False
    one_sentence: bool = False
    extracts: bool = False
    stop: tuple[str, ...] = ("\nQuestion:", "\nContext:")
    template: str | None = None
    system: str | None = None

    def write(self, tokenizer: Tokenizer, question: str, passages: Passages) -> str:
        """Return the prompt over (title, text) passages, as a chat if it can be.

        Raises:
            InputError: A template cannot be filled, or none takes the system message.
        """
        if not is_chat(tokenizer):
            if self.system:
                raise InputError(
                    "got a system text for a model without a chat template; expected none. Put it "
                    "into a template of your own (--set prompt=FILE)."
                )
            return self.content(question, passages, chat=False)
        turns = [{"role": "system", "content": self.system}] if self.system else []
        turns.append({"role": "user", "content": self.content(question, passages)})
        return render_chat(tokenizer, turns)

    def content(self, question: str, passages: Passages, chat: bool = True, first: int = 1) -> str:
        """Return the user's turn, or without `chat` the prompt; passages count from `first`."""
        question = " ".join(question.split())
        if self.template is not None:
            return self._filled(question, passages, first)
        # A number that the answer need not name is copied into it.
        numbered = not chat or self.two_lines or self.one_sentence or len(passages) > 1
        listing = "\n\n".join(
            (f"[{number}] " if numbered else "") + f"{title}\n{text}"
            for number, (title, text) in enumerate(passages, first)
        )
        template = f"{listing}\n\nQuestion: {question}"
        if not chat:
            return f"Context:\n{template}\n{self.opening}"
        closing = f"\n{self.closing}" if self.closing else ""
        return f"{self.instruction}\n\n{template}{closing}"

    def _filled(self, question: str, passages: Passages, first: int) -> str:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import SandboxedEnvironment

        turns = [
            {"number": number, "title": title, "text": text}
            for number, (title, text) in enumerate(passages, first)
        ]
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
        try:
            template = environment.from_string(self.template or "")
            return template.render(question=question, passages=turns)
        except Exception as error:  # the template is a program: it raises what its calls raise
            reason = str(error).rstrip(".") or type(error).__name__
            message = f"the prompt template {self.name} cannot be filled: {reason}. {JINJA}"
            raise InputError(message) from error

    def parts(self, text: str) -> tuple[str, str]:
        """Return the evidence and the answer proper of a text, "" for what it lacks."""
        evidence, *answer = ANSWER.split(text, 1) if self.two_lines else [text]
        if not (answer or self.one_sentence):
            return "", ""
        return LABELS.sub("", evidence).strip(), "".join(answer).strip()


def is_chat(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def expect_question(question: object, *refused: str) -> None:
    """Raise InputError unless a question is a text, not blank, and none of the refused ones."""
    if not isinstance(question, str) or question.strip() in ("", *refused):
        raise InputError(f"The question is empty or no text ({question!r}); ask something.")


EXTRACT = "extract"
TEMPLATES = MappingProxyType(
    {
        "evidence": PromptTemplate("evidence", TWO_LINES, opening="Evidence:", two_lines=True),
        "quote": PromptTemplate(
            "quote",
            ONE_SENTENCE,
            opening="Evidence:",
            one_sentence=True,
            stop=("\nAnswer:", "\nQuestion:", "\nContext:"),
        ),
        "answer": PromptTemplate("answer", READ, FULLY, opening="Answer:"),
        EXTRACT: PromptTemplate(EXTRACT, extracts=True),
    }
)


def suited(tokenizer: Tokenizer) -> str:
    """Return the name of the default template of a model.

    The bundled models were trained on the two lines of "evidence". Chat models give more complete
    answers, gold answers and quotations with "answer" (benchmarks/RESULTS.md).
    """
    return "answer" if is_chat(tokenizer) else "evidence"


def find_template(prompt: str | Path | PromptTemplate, system: str | None = None) -> PromptTemplate:
    """Return the template of a name or Jinja file, or a `PromptTemplate`; else raise InputError."""
    if isinstance(prompt, PromptTemplate):
        template = prompt
    elif isinstance(prompt, str) and prompt in TEMPLATES:
        template = TEMPLATES[prompt]
    else:
        from jinja2 import Environment, TemplateSyntaxError

        path = expect_path(prompt, "prompt", "a name, a Jinja file or a PromptTemplate")
        if not path.exists() and isinstance(prompt, str) and not path.suffix:
            expect_known("prompt", [prompt], TEMPLATES)
        try:
            template = PromptTemplate(str(path), template=read_input(path, "the prompt template"))
            if not Environment().parse(template.template or "").body:
                raise InputError(f"the prompt template {path} is empty; expected text in Jinja.")
        except TemplateSyntaxError as error:
            reason = str(error.message).rstrip(".")
            where = f"the prompt template {path} is no Jinja, line {error.lineno}"
            raise InputError(f"{where}: {reason}. {JINJA}") from error
    return template if system is None else replace(template, system=system)
