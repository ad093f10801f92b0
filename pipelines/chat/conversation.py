"""A conversation with a chat model, over documents or without: what was read is not read again.

Every turn is written into the chat template whole, and the engine reads only what is new of it
(`PrefixCache`). Over documents each question brings the passages that are not in the conversation
yet; one that the documents do not speak of is searched for together with the question before it,
and else put as it is, since it may be about an answer. When the context is full the oldest turns
leave, as many as free a quarter of it, so that what is left is not read again at every turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.engine.output import Generation
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.pipelines.docqa.citations import Citation, cite
from ragspec.pipelines.docqa.docqa import NEW_TOKENS, AnswerBase, DocQA, drain, refusal
from ragspec.pipelines.docqa.prompt import (
    Prompt,
    escape_special_tokens,
    passages_of,
    placed,
    special_of,
)
from ragspec.pipelines.docqa.template import (
    PromptTemplate,
    find_template,
    is_chat,
    passages_for,
    suited,
    templated,
)
from ragspec.retrievers.search.fusion import Hit
from ragspec.sampling.stopping import EndRepetition

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.reports.report import Report
    from ragspec.sampling.settings import Sampling

FREED = 0.25  # of the context, when the oldest turns leave


@dataclass(frozen=True, slots=True)
class Turn:
    """What was asked and answered.

    question: the user's words. prompt_text: the user's turn as the model read it. hits: the
    passages in it, numbered from `first`.
    """

    question: str
    prompt_text: str
    answer: str
    hits: tuple[Hit, ...] = ()
    first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(AnswerBase):
    """The answer to one turn.

    citations: see `Answer.citations`; their passages are numbered through the conversation. hits:
    passages that came with this turn. left: how many of the oldest turns left before it. refused:
    why the model was not asked, None where it was.
    """

    hits: tuple[Hit, ...] = ()
    left: int = 0
    refused: str | None = None

    @property
    def text(self) -> str:
        """What was written."""
        return self.generation.text

    @property
    def report(self) -> Report:
        """What it cost; `cached_tokens` of its prompt were not read again."""
        return self.generation.report


class Conversation:
    """Turns with a chat model.

    engine: over a model with a chat template. documents: what is searched for every question, or
    None. system: what the model is told first. top_k: passages a question may bring. prompt: how a
    question with passages is put; both see `DocQA.ask`. Raises UnsupportedModelError for a model
    without a chat template, and the errors of `template`.
    """

    def __init__(
        self,
        engine: Engine,
        documents: DocQA | None = None,
        *,
        system: str | None = None,
        top_k: int | None = None,
        prompt: str | Path | PromptTemplate | None = None,
    ) -> None:
        if not isinstance(documents, DocQA | None):
            raise InputError(
                f"got {documents!r} as documents; expected a DocQA, such as "
                "DocQA.from_documents(FOLDER), or None."
            )
        if not is_chat(engine.tokenizer):
            raise UnsupportedModelError(
                f"{type(engine.model).__name__} comes without a chat template; expected a chat "
                "model, such as smollm2 (`ragspec models`). Use `generate` or `ask` with this one."
            )
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k is {top_k}, expected at least 1.")
        self.engine = engine
        self.documents = documents
        self.system = system
        self.top_k = passages_for(engine) if top_k is None else top_k
        self.template = find_template(suited(engine.tokenizer) if prompt is None else prompt)
        self.turns: list[Turn] = []
        self._selection = PrefixCache()

    def clear(self) -> None:
        """Begin again."""
        self.turns = []
        self._selection.clear()

    def ask(
        self,
        text: str,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = NEW_TOKENS,
        stream: Callable[[str], None] | None = None,
        on_read: Callable[[int, int], None] | None = None,
    ) -> Reply:
        """Answer one turn and keep it, also where an interrupt ended the answer, if it had begun.

        stream: called with each piece of text as it is verified. on_read: see `Options`. Raises
        InputError for an empty turn, PromptTooLongError where this turn alone does not fit the
        context.
        """
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"The turn is empty or no text ({text!r}); say something.")
        began = time.perf_counter()
        hits, why = self._search(text)
        milliseconds = 1000 * (time.perf_counter() - began)
        if why is not None:
            return Reply(generation=refusal(milliseconds), hits=tuple(hits), refused=why)
        prompt, turn, left = self._fitted(text, hits, max_new_tokens)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "spans": prompt.spans,
            "prefix_cache": self._selection,
            "on_read": on_read,
            "stopping_criteria": [EndRepetition(len(prompt.token_ids))],
        }
        chunks = self.engine.stream(list(prompt.token_ids), sampling, **options)
        result: Generation = drain(chunks, stream or (lambda piece: None))
        result.report = result.report.with_retrieval(milliseconds)
        if not result.tokens:  # interrupted while it was read: as if it had not been asked
            return Reply(generation=result, hits=turn.hits)
        self.turns = [*self.turns[left:], replace(turn, answer=result.text)]
        citations = tuple(self._cited(result, prompt))
        return Reply(generation=result, citations=citations, hits=turn.hits, left=left)

    def _search(self, text: str) -> tuple[list[Hit], str | None]:
        """Return the passages that a turn brings, and why it is refused, if it is."""
        if self.documents is None:
            return [], None
        hits, why = self.documents.search(text, self.top_k)
        if why is not None and self.turns:
            hits, why = self.documents.search(f"{self.turns[-1].question}\n{text}", self.top_k)
            hits, why = [] if why else hits, None
        known = {_place(hit) for turn in self.turns for hit in turn.hits}
        return (hits if why else [hit for hit in hits if _place(hit) not in known]), why

    def _fitted(self, text: str, hits: list[Hit], new: int) -> tuple[Prompt, Turn, int]:
        """Return the prompt, the turn, and how many of the oldest turns have to leave for it.

        Where the turn does not fit alone, its last passages are left out.
        """
        limit = self.engine.target.max_length
        left = 0
        while True:
            turn = self._turn(text, hits)
            prompt = self._prompt([*self.turns[left:], turn])
            room = len(prompt.token_ids) if limit is None else limit - new
            if 0 < left < len(self.turns):
                room = int(room * (1.0 - FREED))
            if len(prompt.token_ids) <= room:
                return prompt, turn, left
            if left < len(self.turns):
                left += 1
            elif hits:
                hits = hits[:-1]
            else:
                return prompt, turn, left  # the engine says by how much it is too long

    def _turn(self, text: str, hits: Sequence[Hit]) -> Turn:
        special = special_of(self.engine.tokenizer)
        first = max((turn.first + len(turn.hits) for turn in self.turns), default=1)
        display = escape_special_tokens(text.strip(), special)
        if hits:
            question = " ".join(display.split())
            display = self.template.content(question, passages_of(hits, special), first=first)
        return Turn(text, display, "", tuple(hits), first)

    def _prompt(self, turns: Sequence[Turn]) -> Prompt:
        """Return the whole conversation as the model reads it, with its passages found."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        special = special_of(self.engine.tokenizer)
        for turn in turns[:-1]:
            messages.append({"role": "user", "content": turn.prompt_text})
            messages.append(
                {"role": "assistant", "content": escape_special_tokens(turn.answer, special)}
            )
        messages.append({"role": "user", "content": turns[-1].prompt_text})
        hits = [hit for turn in turns for hit in turn.hits]
        return placed(self.engine.tokenizer, templated(self.engine.tokenizer, messages), hits)

    def _cited(self, result: Generation, prompt: Prompt) -> Iterator[Citation]:
        """Yield the citations, their passages numbered as the model was shown them."""
        numbers = [turn.first + i for turn in self.turns for i in range(len(turn.hits))]

        def decode(tokens: Sequence[int]) -> str:
            return str(self.engine.tokenizer.decode(tokens, skip_special_tokens=True))

        for citation in cite(result.text, prompt, result.steps, decode):
            yield replace(citation, passage=numbers[citation.passage - 1])


def _place(hit: Hit) -> tuple[str, int]:
    """Return what tells passages apart."""
    return hit.document.name, hit.passage.start
