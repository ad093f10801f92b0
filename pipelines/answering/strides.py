"""The writers of an answer whose passage changes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragspec.engine.engine import Engine
from ragspec.engine.plain_text import encode_text, mark_special_tokens
from ragspec.engine.request import Options
from ragspec.pipelines.answering.prompt import Prompt
from ragspec.reports.generation import Generation
from ragspec.retrievers.speculation.passages import RetrievedPassage
from ragspec.sampling.settings import Sampling
from ragspec.sampling.text_output import TextOutput
from ragspec.types import Tokenizer

# Options of `Engine.generate` that a text in several calls sets itself.
IN_CALLS = ("stop_after", "resume_from")


@dataclass(slots=True)
class FinalText:
    """Streams the text of tokens that are final."""

    stream: Callable[[str], None] | None
    tokenizer: Any
    stops: Sequence[str]
    _output: TextOutput | None = None

    def push(self, prompt: Sequence[int], tokens: Sequence[int], *, ends: bool = False) -> None:
        """Add tokens after a prompt; the first prompt counts."""
        if self.stream is None:
            return
        if self._output is None:
            self._output = TextOutput(self.tokenizer, prompt, self.stops)
        self._output.push(tokens)
        if piece := self._output.piece(ends=ends):
            self.stream(piece)


@dataclass(frozen=True, slots=True)
class Stride:
    """Some tokens of an answer, and the generation that ends with them."""

    tokens: tuple[int, ...]
    generation: Generation

    @property
    def least(self) -> float:
        """The probability of its least probable token; 0 without log-probabilities."""
        return min((math.exp(each.logprob) for each in self.generation.logprobs or ()), default=0.0)


@dataclass(slots=True)
class PassageWriter:
    """Writes the strides of one answer; with `rounds` each is the whole answer.

    Attributes:
        engine: An engine without callbacks.
        options: Returns the options over a prompt, of the stride of a number.
    """

    engine: Engine
    prompt: Callable[[RetrievedPassage], Prompt]
    options: Callable[[Prompt, int], dict[str, Any]]
    sampling: Sampling
    stride: int
    rounds: int | None
    _answers: dict[RetrievedPassage, Stride] = field(default_factory=dict)

    def write(self, answer: RetrievedPassage, before: Sequence[Stride]) -> tuple[Stride, bool]:
        """Return the next stride over a passage, and whether the answer ends with it."""
        if self.rounds is None:
            more: Options = {"resume_from": tokens_of(before), "stop_after": self.stride}
            stride = self._text(answer, before, more)
            return stride, stride.generation.finish_reason != "paused"
        if answer not in self._answers:  # a round is drafted from the one before
            drafts = before and self.engine.drafter is not None
            more = {"prediction": before[-1].generation.tokens} if drafts else {}
            self._answers[answer] = self._text(answer, before, more)
        return self._answers[answer], len(before) + 1 >= self.rounds

    def _text(self, answer: RetrievedPassage, before: Sequence[Stride], more: Options) -> Stride:
        """Return the text over a passage, with more options."""
        prompt = self.prompt(answer)
        options: Any = {**more, **self.options(prompt, len(before))}
        text = self.engine.generate(list(prompt.token_ids), self.sampling, **options)
        return Stride(tuple(text.tokens[len(more.get("resume_from") or ()) :]), text)


def tokens_of(strides: Sequence[Stride]) -> list[int]:
    """Return the tokens of consecutive strides."""
    return [token for stride in strides for token in stride.tokens]


def query_of(tokenizer: Tokenizer, question: str, strides: Sequence[Stride], count: int) -> str:
    """Return the last `count` tokens of a question and its text, as text; never blank."""
    ids = encode_text(tokenizer, mark_special_tokens(question, tokenizer)).ids
    text = str(tokenizer.decode([*ids, *tokens_of(strides)][-count:], skip_special_tokens=True))
    return text if text.strip() else question
