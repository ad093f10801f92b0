"""What writes the strides of an answer: some tokens after the others, or the whole anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ragspec.engine.output import Generation
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.pipelines.iterative.prompts import StridePrompts
from ragspec.retrievers.speculation.passages import RetrievedPassage
from ragspec.sampling.repetition import EndRepetition
from ragspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Stride:
    """Some tokens of an answer, and the generation that ends with them."""

    tokens: tuple[int, ...]
    generation: Generation

    @property
    def least(self) -> float:
        """The probability of its least probable token, where log-probabilities were kept."""
        selected = self.generation.logprobs or ()
        return min((math.exp(token.logprob) for token in selected), default=0.0)

    def cancelled(self) -> Stride:
        """Return the stride as the last of a text that was interrupted."""
        report = replace(self.generation.report, finish_reason="cancelled")
        return Stride(
            self.tokens, replace(self.generation, report=report, finish_reason="cancelled")
        )


@dataclass(slots=True)
class Writer:
    """Writes the strides of one answer over one cache.

    engine: nobody listens to its texts. every: tokens of a stride. scored: whether the
    probabilities of its tokens are wanted.
    """

    engine: Engine
    prompts: StridePrompts
    sampling: Sampling
    options: dict[str, Any]
    prefix_cache: PrefixCache
    every: int
    scored: bool = False

    def write(self, answer: RetrievedPassage, before: Sequence[Stride]) -> tuple[Stride, bool]:
        """Return the next stride over a passage, and whether the answer ends with it."""
        written = tokens_of(before)
        options = self.options_over(answer, len(before))
        options |= {"written": written, "pause": self.every}
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
            # So drafts name the passage of their stride, as `Answer.passages` has them.
            "spans": [(start, end, number, at) for start, end, _, at in prompt.spans],
            "texts": (*prompt.layout, *self.options.get("texts", ())),
            "prefix_cache": self.prefix_cache,
            "prefix": prompt.prefix,
        }


@dataclass(slots=True)
class RoundWriter:
    """Writes an answer as a whole, round after round; a stride is a whole answer.

    The answer before is the draft of the next one, and over a passage that was had before the
    answer is the one that was written over it. rounds: how many there are.
    """

    strides: Writer
    rounds: int
    _known: dict[RetrievedPassage, Stride] = field(default_factory=dict)

    def write(self, answer: RetrievedPassage, before: Sequence[Stride]) -> tuple[Stride, bool]:
        """Return the answer over a passage, and whether it is the last one."""
        if answer not in self._known:
            current = self.strides
            options = current.options_over(answer, len(before))
            if before and current.engine.drafter is not None:
                options.setdefault("prediction", before[-1].generation.tokens)
            prompt = list(current.prompts.of(answer).ids)
            generation = current.engine.generate(prompt, current.sampling, **options)
            self._known[answer] = Stride(tuple(generation.tokens), generation)
        return self._known[answer], len(before) + 1 >= self.rounds


def tokens_of(strides: Sequence[Stride]) -> list[int]:
    """Return the tokens of strides that go on after each other."""
    return [token for stride in strides for token in stride.tokens]
