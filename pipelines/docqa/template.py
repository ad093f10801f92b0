"""How a question over passages is put to a model: three ways by name, or a template of your own.

"evidence" asks for two lines, the sentence that holds the answer and the answer itself: what is
quoted can be checked, and copied. "quote" asks for the sentence alone, "answer" for an answer in
the model's own words and then the sentence that supports it. A template is Jinja and is given
`question` and `passages`, each with `number`, `title` and `text`; of a chat model it writes the
user's turn, of any other the whole prompt. A passage that it puts on lines of its own is drafted
and cited from. Where none is named, `suited` chooses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ragspec.errors import InputError, UnknownNameError
from ragspec.registry import unknown

Span = tuple[int, int]
PARTS = re.compile(
    r"\s*(?:Evidence:)?\s*(?:\[(?P<passage>\d+)\])?\s*(?P<evidence>\S.*?)?\s*"
    r"(?:^|\n)[ \t]*Answer:[ \t]*(?P<answer>\S.*?)?\s*$",
    re.S,
)
QUOTED = re.compile(r"\s*(?:Evidence:)?\s*(?:\[\d+\])?\s*(?P<quote>\S.*?)?\s*$", re.S)
TWO_LINES = (
    "Answer the question from the numbered passages alone, in two lines. Line one: 'Evidence: "
    "[k] ' and the sentence of passage k that holds the answer, copied word for word. Line two: "
    "'Answer: ' and the answer, as short as it can be."
)
ONE_SENTENCE = (
    "Copy the sentence of the numbered passages that answers the question, word for word, with the "
    "number of its passage in brackets before it. Write nothing else."
)
# A request after the question; of seven wordings that were tried on training questions, the one
# whose answers hold most gold answers and quotations (benchmarks/RESULTS.md).
READ, FIRST_THE_ANSWER = (
    "Read the passages and answer the question below.",
    "Give the answer first, then quote the sentence that supports it in double quotes.",
)


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A way of putting questions.

    instruction, closing: before the passages and after the question, for chat models. opening: with
    which the answer of any other model begins. two_lines: whether evidence and answer are asked
    for, which is drafted too; one_sentence: whether evidence alone. stop: strings that end an
    answer. template: Jinja source in their place. system: what a chat model is told first.
    """

    name: str
    instruction: str = ""
    closing: str = ""
    opening: str = ""
    two_lines: bool = False
    one_sentence: bool = False
    stop: tuple[str, ...] = ("\nQuestion:", "\nContext:")
    template: str | None = None
    system: str | None = None

    def write(self, tokenizer: Any, question: str, passages: Sequence[tuple[str, str]]) -> str:
        """Return the text of a prompt, in the tokenizer's chat template where it has one.

        passages: titles and texts. Raises InputError for a template that cannot be filled, and for
        a system text without a chat template that has a place for it.
        """
        if not is_chat(tokenizer):
            if self.system:
                raise InputError(
                    "got a system text for a model without a chat template; expected none. Put it "
                    "into a template of your own (--prompt FILE)."
                )
            return self.content(question, passages, chat=False)
        turns = [{"role": "system", "content": self.system}] if self.system else []
        turns.append({"role": "user", "content": self.content(question, passages)})
        return templated(tokenizer, turns)

    def content(
        self,
        question: str,
        passages: Sequence[tuple[str, str]],
        *,
        chat: bool = True,
        first: int = 1,
    ) -> str:
        """Return the user's turn, or the whole prompt of a model that does not chat.

        first: the number of the first passage. Raises InputError for a template that cannot be
        filled.
        """
        if self.template is not None:
            return self._filled(question, passages, first)
        listing = "\n\n".join(
            f"[{number}] {title}\n{text}" for number, (title, text) in enumerate(passages, first)
        )
        template = f"{listing}\n\nQuestion: {question}"
        if not chat:
            return f"Context:\n{template}\n{self.opening}"
        closing = f"\n{self.closing}" if self.closing else ""
        return f"{self.instruction}\n\n{template}{closing}"

    def _filled(self, question: str, passages: Sequence[tuple[str, str]], first: int) -> str:
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import SandboxedEnvironment

        turns = [
            {"number": number, "title": title, "text": text}
            for number, (title, text) in enumerate(passages, first)
        ]
        environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
        try:
            template = environment.from_string(self.template or "")
            return template.render(question=question, passages=turns)
        except TemplateError as error:
            raise InputError(
                f"the prompt template {self.name} cannot be filled: {error}. Expected Jinja over "
                "`question` and `passages` (each with number, title and text)."
            ) from error

    def parts(self, text: str) -> tuple[Span | None, Span | None]:
        """Return the characters of evidence and of answer proper, None where one is missing."""
        if self.two_lines:
            match = PARTS.match(text)
            evidence = match.span("evidence") if match and match["evidence"] else None
            return evidence, match.span("answer") if match and match["answer"] else None
        if self.one_sentence:
            match = QUOTED.match(text)
            return (match.span("quote") if match and match["quote"] else None), None
        return None, None


def is_chat(tokenizer: Any) -> bool:
    """Tell whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def templated(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], template: str | None = None
) -> str:
    """Return turns in the chat template, the answer's beginning last.

    template: Jinja source in place of the tokenizer's own. Raises InputError where it refuses them.
    """
    options = {} if template is None else {"chat_template": template}
    try:
        text = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **options
        )
        return str(text)
    except Exception as error:  # a template raises whatever its author wrote
        roles = dict.fromkeys(turn["role"] for turn in turns)
        raise InputError(
            f"the model's chat template refuses the prompt ({error}); expected turns of "
            f"{' and '.join(roles)}. Leave the system text out, or put it into a template of your "
            "own (--prompt FILE)."
        ) from error


SMALL = 500_000_000  # parameters of a chat model
WORDINGS = MappingProxyType(
    {
        "evidence": PromptTemplate("evidence", TWO_LINES, opening="Evidence:", two_lines=True),
        "quote": PromptTemplate(
            "quote",
            ONE_SENTENCE,
            opening="Evidence:",
            one_sentence=True,
            stop=("\nAnswer:", "\nQuestion:", "\nContext:"),
        ),
        "answer": PromptTemplate("answer", READ, FIRST_THE_ANSWER, opening="Answer:"),
    }
)


def suited(tokenizer: Any) -> str:
    """Return the name of the wording that suits a model where the user names none.

    The bundled models were trained on the two lines of "evidence"; of a chat model more answers to
    "answer" hold a gold answer, quote a passage and come to an end (benchmarks/RESULTS.md).
    """
    return "answer" if is_chat(tokenizer) else "evidence"


def passages_for(engine: Any) -> int:
    """Return how many passages suit an engine's model where the user does not say.

    A small chat model answers better from the best passage than from three, though three hold the
    answer more often (SmolLM2-135M: 37 % of gold answers against 20 %, benchmarks/RESULTS.md).
    """
    return 1 if is_chat(engine.tokenizer) and engine.model.num_parameters() < SMALL else 3


def find_template(prompt: str | Path | PromptTemplate, system: str | None = None) -> PromptTemplate:
    """Return the wording of a name, of a Jinja file, or one that is given.

    system: what a chat model is told first. Raises UnknownNameError for a name that is neither,
    InputError for a file that cannot be read.
    """
    result = prompt
    if isinstance(prompt, str) and prompt in WORDINGS:
        result = WORDINGS[prompt]
    elif not isinstance(prompt, PromptTemplate):
        path = Path(prompt)
        if not path.exists() and isinstance(prompt, str) and not path.suffix:
            raise UnknownNameError(unknown("prompt", prompt, WORDINGS))
        try:
            result = PromptTemplate(str(path), template=path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"the prompt template {path} cannot be read ({error}); expected a Jinja file in "
                f"UTF-8, or one of {', '.join(WORDINGS)}."
            ) from error
    assert isinstance(result, PromptTemplate)
    return result if system is None else replace(result, system=system)
