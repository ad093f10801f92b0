"""Prompts of one question over one passage each, and the writers of its answer.

The part before the question depends on the passage alone and is tokenized separately, so that
every question over the passage can reuse its keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ragspec.drafters.base import SourceText
from ragspec.engine.output import Generation
from ragspec.pipelines.docqa.prompt import Span, laid_out, led_by, placed, plain_ids
from ragspec.pipelines.docqa.template import PromptTemplate
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.speculation.passages import RetrievedPassage
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import EndRepetition

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class StridePrompt:
    """A question over a passage: token ids [T], the passage's first, whatever the question."""

    text: str
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    layout: tuple[SourceText, ...]


@dataclass(slots=True)
class StridePrompts:
    """Writes the prompt of each passage once for a question, and keeps them by passage."""

    tokenizer: Any
    question: str
    template: PromptTemplate
    prompts: dict[RetrievedPassage, StridePrompt] = field(default_factory=dict)

    def of(self, passage: RetrievedPassage) -> StridePrompt:
        """Return the prompt over a passage."""
        if passage not in self.prompts:
            self.prompts[passage] = self._write(passage.hit)
        return self.prompts[passage]

    def words(self, written: Sequence[int], count: int) -> str:
        """Return the last `count` tokens of question and text, as text; never blank."""
        ids = [*plain_ids(self.tokenizer, self.question), *written][-count:]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return text if text.strip() else self.question

    def _write(self, hit: Hit) -> StridePrompt:
        text, end = led_by(self.tokenizer, self.question, hit, self.template)
        # At end 0 the template changed the passage, and no part can be shared.
        prefix = placed(self.tokenizer, text[: end or len(text)], [hit])
        rest = plain_ids(self.tokenizer, text[end:]) if end else []
        prompt = replace(prefix, text=text, token_ids=(*prefix.token_ids, *rest))
        layout = laid_out(self.tokenizer, prompt, self.template).layout
        return StridePrompt(text, prompt.token_ids, prompt.spans, layout)


@dataclass(slots=True)
class AnswerStream:
    """Streams final text, and holds back what may be the beginning of a stop string."""

    stream: Callable[[str], None] | None
    stops: Sequence[str] | str = ()
    text: str = ""
    sent: int = 0

    def push(self, text: str, *, ends: bool) -> None:
        """Take the final part of the text and stream what is new of it.

        Args:
            text: The text from its beginning.
            ends: Whether the text is complete.
        """
        self.text = text
        stops = (self.stops,) if isinstance(self.stops, str) else self.stops
        held = 0 if ends else max((len(stop) for stop in stops), default=1) - 1
        self._give(len(text) if ends else len(text.rstrip("\ufffd")) - held)

    def end(self) -> None:
        """Stream the text that was held back."""
        self._give(len(self.text))

    def _give(self, end: int) -> None:
        if self.stream is not None and end > self.sent:
            self.stream(self.text[self.sent : end])
            self.sent = end


@dataclass(frozen=True, slots=True)
class Stride:
    """Some tokens of an answer, and the generation that ends with them."""

    tokens: tuple[int, ...]
    generation: Generation

    @property
    def least(self) -> float:
        """The probability of its least probable token; 0 without log-probabilities."""
        logprobs = self.generation.logprobs or ()
        return min((math.exp(token.logprob) for token in logprobs), default=0.0)

    def cancelled(self) -> Stride:
        """Return the stride as the last one of an interrupted text."""
        report = replace(self.generation.report, finish_reason="cancelled")
        return Stride(
            self.tokens, replace(self.generation, report=report, finish_reason="cancelled")
        )


@dataclass(slots=True)
class PassageWriter:
    """Writes the strides of one answer.

    Attributes:
        engine: An engine without callbacks.
        stride: Tokens of a stride.
        scored: Whether to return the log-probabilities of its tokens.
    """

    engine: Engine
    prompts: StridePrompts
    sampling: Sampling
    options: dict[str, Any]
    stride: int
    scored: bool = False

    def write(self, answer: RetrievedPassage, before: Sequence[Stride]) -> tuple[Stride, bool]:
        """Return the next stride over a passage, and whether the answer ends with it."""
        written = tokens_of(before)
        options = self.options_over(answer, len(before))
        options |= {"resume_from": written, "stop_after": self.stride}
        if self.scored:
            options["logprobs"] = self.options.get("logprobs") or 0
        prompt = list(self.prompts.of(answer).ids)
        generation = self.engine.generate(prompt, self.sampling, **options)
        stride = Stride(tuple(generation.tokens[len(written) :]), generation)
        return stride, generation.finish_reason != "paused"

    def options_over(self, answer: RetrievedPassage, number: int) -> dict[str, Any]:
        """Return the options of stride `number` over a passage."""
        prompt = self.prompts.of(answer)
        return {
            "stopping_criteria": [EndRepetition(len(prompt.ids))],
            **self.options,
            # The origin of a draft is the number of its passage in `Answer.passages`.
            "spans": [(start, end, number, at) for start, end, _, at in prompt.spans],
            "texts": (*prompt.layout, *self.options.get("texts", ())),
        }


@dataclass(slots=True)
class RoundWriter:
    """Writes the whole answer in each of `rounds` rounds; a stride is a whole answer.

    The previous answer is the prediction of the next one. A passage that returns brings back the
    answer that was written over it.
    """

    strides: PassageWriter
    rounds: int
    _answers: dict[RetrievedPassage, Stride] = field(default_factory=dict)

    def write(self, answer: RetrievedPassage, before: Sequence[Stride]) -> tuple[Stride, bool]:
        """Return the answer over a passage, and whether it is the last one."""
        if answer not in self._answers:
            strides = self.strides
            options = strides.options_over(answer, len(before))
            if before and strides.engine.drafter is not None:
                options.setdefault("prediction", before[-1].generation.tokens)
            prompt = list(strides.prompts.of(answer).ids)
            generation = strides.engine.generate(prompt, strides.sampling, **options)
            self._answers[answer] = Stride(tuple(generation.tokens), generation)
        return self._answers[answer], len(before) + 1 >= self.rounds


def tokens_of(strides: Sequence[Stride]) -> list[int]:
    """Return the tokens of consecutive strides."""
    return [token for stride in strides for token in stride.tokens]
