"""The prompts of one question over one passage each, whose beginning is the passage's alone.

What stands before the question depends on the passage and on no question, and is tokenised apart:
so its keys and values serve every question that meets the passage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ragspec.drafters.base import SourceText
from ragspec.pipelines.docqa.prompt import (
    Prompt,
    Span,
    laid_out,
    led_by,
    placed,
    plain_ids,
)
from ragspec.pipelines.docqa.template import PromptTemplate
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.speculation.passages import RetrievedPassage


@dataclass(frozen=True, slots=True)
class StridePrompt:
    """A question over a passage: ids [T], of which the first `prefix` are the passage's alone."""

    text: str
    ids: tuple[int, ...]
    prefix: int
    spans: tuple[Span, ...]
    layout: tuple[SourceText, ...]


@dataclass(slots=True)
class StridePrompts:
    """Writes each passage's prompt once for a question. seen: the prompts by passage."""

    tokenizer: Any
    question: str
    template: PromptTemplate
    prompts: dict[RetrievedPassage, StridePrompt] = field(default_factory=dict)

    def of(self, result: RetrievedPassage) -> StridePrompt:
        """Return the prompt over a passage."""
        if result not in self.prompts:
            self.prompts[result] = self._write(result.hit)
        return self.prompts[result]

    def words(self, written: Sequence[int], count: int) -> str:
        """Return the last `count` tokens of question and text, as text; never blank."""
        ids = [*plain_ids(self.tokenizer, self.question), *written][-count:]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return text if text.strip() else self.question

    def _write(self, hit: Hit) -> StridePrompt:
        text, end = led_by(self.tokenizer, self.question, hit, self.template)
        if not end:  # a template that changed the passage: all of it is read as one
            whole = placed(self.tokenizer, text, [hit])
            return StridePrompt(text, whole.token_ids, 0, whole.spans, self._layout(whole))
        prefix = placed(self.tokenizer, text[:end], [hit])
        ids = (*prefix.token_ids, *plain_ids(self.tokenizer, text[end:]))
        layout = self._layout(Prompt(text, ids, (hit,), (), ()))
        return StridePrompt(text, ids, len(prefix.token_ids), prefix.spans, layout)

    def _layout(self, prompt: Prompt) -> tuple[SourceText, ...]:
        return laid_out(self.tokenizer, prompt, self.template).layout
