"""A conversation with a chat model, with or without documents; each turn is prefilled once.

Every turn fills the chat template with the whole conversation, and the engine reads only its new
tokens (`PrefixCache`). Over documents each question adds the passages that are not in the
conversation yet. A question that the documents do not cover is searched again together with the
question before it. If that fails too, it is asked without passages, as it may be about an answer.
When the context is full, the oldest turns are dropped until a quarter of it is free, so that the
rest is not read again at every turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.engine.plain_text import mark_special_tokens
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.pipelines.answering.citations import cite
from ragspec.pipelines.answering.docqa import NEW_TOKENS, AnswerBase, DocQA, drain, refusal
from ragspec.pipelines.answering.prompt import Prompt, decoder, passages_of, placed
from ragspec.pipelines.answering.template import (
    PromptTemplate,
    find_template,
    is_chat,
    passages_for,
    suited,
    templated,
)
from ragspec.reports.generation import Generation
from ragspec.retrievers.search.fusion import Hit
from ragspec.sampling.stopping import EndRepetition

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.reports.report import Report
    from ragspec.sampling.settings import Sampling

FREED = 0.25  # share of the context that is free after the oldest turns are dropped


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: The user's words.
        prompt_text: The user's turn as the model read it.
        hits: The passages in it, numbered from `first`.
    """

    question: str
    prompt_text: str
    answer: str
    hits: tuple[Hit, ...] = ()
    first: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(AnswerBase):
    """The answer to one turn; its citations number passages through the conversation.

    Attributes:
        hits: Passages that this turn added.
        left: Number of the oldest turns that were dropped before it.
        refused: Why the model was not called, None if it was.
    """

    hits: tuple[Hit, ...] = ()
    left: int = 0
    refused: str | None = None

    @property
    def text(self) -> str:
        """The text of the answer."""
        return self.generation.text

    @property
    def report(self) -> Report:
        """The figures of the generation; `cached_tokens` of its prompt were not read again."""
        return self.generation.report


class Conversation:
    """A conversation with a chat model.

    Args:
        engine: Its model has a chat template.
        documents: Searched for every question; None for none.
        system: System message.
        top_k: Most passages of a question; see `DocQA.ask`.
        prompt: Template of questions with passages; see `DocQA.ask`.

    Raises:
        UnsupportedModelError: The model has no chat template.
        InputError, UnknownNameError: An argument is out of range, or there is no such template.
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

    def clear(self) -> None:
        """Drop all turns."""
        self.turns = []

    def ask(
        self,
        text: str,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = NEW_TOKENS,
        stream: Callable[[str], None] | None = None,
        on_read: Callable[[int, int], None] | None = None,
    ) -> Reply:
        """Answer one turn and add it to the conversation.

        An interrupted answer is added too, if it has any tokens.

        Args:
            stream: Called with each piece of text as it is verified.
            on_read: See `Options`.

        Raises:
            InputError: The turn is empty.
            PromptTooLongError: This turn alone does not fit the context.
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
            "on_read": on_read,
            "stopping_criteria": [EndRepetition(len(prompt.token_ids))],
        }
        chunks = self.engine.stream(list(prompt.token_ids), sampling, **options)
        generation: Generation = drain(chunks, stream or (lambda piece: None))
        generation.report = generation.report.with_retrieval(milliseconds)
        if not generation.tokens:  # interrupted during prefill: the turn is not added
            return Reply(generation=generation, hits=turn.hits)
        self.turns = [*self.turns[left:], replace(turn, answer=generation.text)]
        decode = decoder(self.engine.tokenizer)
        citations = cite(generation.text, prompt, generation.steps, decode)
        numbers = [turn.first + i for turn in self.turns for i in range(len(turn.hits))]
        cited = tuple(replace(each, passage=numbers[each.passage - 1]) for each in citations)
        return Reply(generation=generation, citations=cited, hits=turn.hits, left=left)

    def _search(self, text: str) -> tuple[list[Hit], str | None]:
        """Return the passages that a turn adds, and why it is refused or None."""
        if self.documents is None:
            return [], None
        hits, why = self.documents.search(text, self.top_k)
        if why is not None and self.turns:
            hits, why = self.documents.search(f"{self.turns[-1].question}\n{text}", self.top_k)
            hits, why = [] if why else hits, None
        before = {_place(hit) for turn in self.turns for hit in turn.hits}
        return (hits if why else [hit for hit in hits if _place(hit) not in before]), why

    def _fitted(self, text: str, hits: list[Hit], new: int) -> tuple[Prompt, Turn, int]:
        """Return the prompt, the turn, and the number of oldest turns to drop for it.

        If the turn does not fit alone, its last passages are left out.
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
        tokenizer = self.engine.tokenizer
        first = max((turn.first + len(turn.hits) for turn in self.turns), default=1)
        display = mark_special_tokens(text.strip(), tokenizer)
        if hits:
            question = " ".join(display.split())
            display = self.template.content(question, passages_of(hits, tokenizer), first=first)
        return Turn(text, display, "", tuple(hits), first)

    def _prompt(self, turns: Sequence[Turn]) -> Prompt:
        """Return the prompt of the whole conversation, its passages located."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns[:-1]:
            answer = mark_special_tokens(turn.answer, self.engine.tokenizer)
            messages.append({"role": "user", "content": turn.prompt_text})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turns[-1].prompt_text})
        hits = [hit for turn in turns for hit in turn.hits]
        return placed(self.engine.tokenizer, templated(self.engine.tokenizer, messages), hits)


def _place(hit: Hit) -> tuple[str, int]:
    """Return the key of a passage: document and start."""
    return hit.document.name, hit.passage.start
