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
from ragspec.engine.plain_text import encode_text, mark_special_tokens, without_marks
from ragspec.pipelines.answering.prompt import Span, laid_out, led_by, placed
from ragspec.pipelines.answering.template import PromptTemplate
from ragspec.reports.generation import Generation
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.speculation.passages import RetrievedPassage
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import EndRepetition
from ragspec.sampling.text_output import TextOutput

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
        question = mark_special_tokens(self.question, self.tokenizer)
        ids = [*encode_text(self.tokenizer, question).ids, *written][-count:]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return text if text.strip() else self.question

    def _write(self, hit: Hit) -> StridePrompt:
        text, end = led_by(self.tokenizer, self.question, hit, self.template)
        # At end 0 the template changed the passage, and no part can be shared.
        prefix = placed(self.tokenizer, text[: end or len(text)], [hit])
        rest = encode_text(self.tokenizer, text[end:]).ids if end else ()
        text = without_marks(text)
        prompt = replace(prefix, text=text, token_ids=(*prefix.token_ids, *rest))
        layout = laid_out(self.tokenizer, prompt, self.template).layout
        return StridePrompt(text, prompt.token_ids, prompt.spans, layout)


@dataclass(slots=True)
class FinalText:
    """Streams the text of tokens that are final.

    Attributes:
        stops: Stop strings of the text.
    """

    stream: Callable[[str], None] | None
    tokenizer: Any
    stops: Sequence[str]
    _output: TextOutput | None = None

    def push(self, prompt: Sequence[int], tokens: Sequence[int], *, ends: bool) -> None:
        """Add tokens after a prompt; the first prompt counts."""
        if self.stream is None:
            return
        if self._output is None:
            self._output = TextOutput(self.tokenizer, prompt, self.stops)
        self._output.push(tokens)
        self._give(self._output, ends)

    def end(self) -> None:
        """Stream the text that was held back."""
        if self._output is not None:
            self._give(self._output, True)

    def _give(self, output: TextOutput, ends: bool) -> None:
        if self.stream is not None and (piece := output.piece(ends=ends)):
            self.stream(piece)


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
