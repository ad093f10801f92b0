"""A conversation with a chat model, with or without documents; each turn is prefilled once.

Every turn fills the chat template with the whole conversation, and the engine reads only its new
tokens (`PrefixCache`). Over documents each question adds the passages that are not in the
conversation yet. A question that the documents do not cover, or of stop words alone, is searched
again together with the question before it. If that fails too, its prompt has no passages, as it
may be about an answer. When the context is full, the oldest turns are dropped until a quarter of it
is free, so that the rest is not read again at every turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Unpack

from ragspec.engine.engine import Engine
from ragspec.engine.plain_text import mark_special_tokens, render_chat
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.pipelines.answering.answer import Answer, SearchResult
from ragspec.pipelines.answering.answerer import Answerer, Question
from ragspec.pipelines.answering.docqa import DocQA, PromptSettings
from ragspec.pipelines.answering.prompt import Prompt, passages_of, placed
from ragspec.pipelines.answering.template import is_chat
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.text import words_of

FREED = 0.25  # share of the context that is free after the oldest turns are dropped


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer.

    Attributes:
        prompt_text: The user's turn as the model read it.
        hits: The passages in it, numbered from `first`.
    """

    question: str
    prompt_text: str
    answer: str
    hits: tuple[Hit, ...] = ()
    first: int = 1


class Conversation(Answerer):
    """A conversation with a chat model; citations number passages through all of it.

    Args:
        engine: Its model has a chat template.
        documents: Searched for every question; None for none.
        settings: Passages and template of a question over them, and the system message of the
            conversation, see `Answerer`; by default those of `documents`.

    Raises:
        UnsupportedModelError: The model has no chat template.
        InputError, UnknownNameError: An argument is out of range, or there is no such template.
    """

    def __init__(
        self, engine: Engine, documents: DocQA | None = None, **settings: Unpack[PromptSettings]
    ) -> None:
        if not isinstance(documents, DocQA | None):
            raise InputError(
                f"got {documents!r} as documents; expected a DocQA, such as "
                "DocQA.from_documents(FOLDER), or None."
            )
        if documents is not None:
            settings = {**documents.settings, **settings}
        super().__init__(engine, None if documents is None else documents.retriever, **settings)
        if not is_chat(self.engine.tokenizer):
            raise UnsupportedModelError(
                f"{type(self.engine.model).__name__} comes without a chat template; expected a "
                "chat model, such as smollm2 (`ragspec models`). Use `generate` or `ask` with this."
            )
        self.turns: list[Turn] = []

    def clear(self) -> None:
        """Drop all turns."""
        self.turns = []

    def search(self, question: str, *, refuse: bool = True) -> SearchResult:
        """Return the passages of a turn, known ones too, and why it is refused if it is."""
        search, earlier = partial(super().search, refuse=refuse), [t.question for t in self.turns]
        return search_turn(search, question, earlier, extracts=self.template.extracts)

    def unasked(self, question: str, result: SearchResult) -> Answer | None:
        """Return the answer without the model, see `Answerer`; add an extract to the turns."""
        answer = super().unasked(question, result)
        if answer is not None and answer.refused is None:
            self.turns = [*self.turns, Turn(question, question, answer.text)]
        return answer

    def _write(self, question: Question) -> Answer:
        """Answer one turn, and add it to the conversation unless it has no tokens."""
        text, options = question.text, question.options
        hits = self.read_hits(question.search)
        prompt, turn, dropped = self._fitted(text, hits, options["max_new_tokens"])
        # With a stream, an interrupt returns the text so far.
        stream = question.stream or (lambda piece: None)
        streamed = replace(question, stream=stream, options={"stop": (), **options})
        generation = self._generate(prompt, streamed)
        answer = replace(self.answer_of(question, prompt, generation), passages=turn.hits)
        if not generation.tokens:  # interrupted during prefill
            return answer
        self.turns = [*self.turns[dropped:], replace(turn, answer=generation.text)]
        return replace(answer, dropped_turns=dropped)

    def _fitted(self, text: str, hits: Sequence[Hit], new: int) -> tuple[Prompt, Turn, int]:
        """Return the prompt, the turn, and the number of oldest turns to drop for it.

        The turn has the passages that the turns before it do not have. If it does not fit alone,
        its last passages are left out.
        """
        limit, dropped = self.engine.target.max_length, 0
        while True:
            turns = self.turns[dropped:]
            known = {_place(hit) for turn in turns for hit in turn.hits}
            turn = self._turn(text, [hit for hit in hits if _place(hit) not in known])
            prompt = self._prompt([*turns, turn])
            room = len(prompt.token_ids) if limit is None else limit - new
            if 0 < dropped < len(self.turns):
                room = int(room * (1.0 - FREED))
            if len(prompt.token_ids) <= room or not (hits or turns):
                return prompt, turn, dropped  # the engine says by how much it is too long
            if turns:
                dropped += 1
            else:
                hits = hits[:-1]

    def _turn(self, text: str, hits: Sequence[Hit]) -> Turn:
        tokenizer = self.engine.tokenizer
        first = self.turns[-1].first + len(self.turns[-1].hits) if self.turns else 1
        display = mark_special_tokens(text.strip(), tokenizer)
        if hits:
            display = self.template.content(display, passages_of(hits, tokenizer), first=first)
        return Turn(text, display, "", tuple(hits), first)

    def _prompt(self, turns: Sequence[Turn]) -> Prompt:
        """Return the prompt of the whole conversation, its passages located."""
        messages = [{"role": "system", "content": self._system}] if self._system else []
        tokenizer = self.engine.tokenizer
        for turn in turns:
            messages.append({"role": "user", "content": turn.prompt_text})
            answer = mark_special_tokens(turn.answer, tokenizer)
            messages.append({"role": "assistant", "content": answer})
        hits = [hit for turn in turns for hit in turn.hits]
        prompt = placed(tokenizer, render_chat(tokenizer, messages[:-1]), hits)
        return replace(prompt, first=turns[0].first)


def search_turn(
    search: Callable[[str], SearchResult], question: str, earlier: Sequence[str], *, extracts: bool
) -> SearchResult:
    """Return the result of a question after others; empty if its prompt has no passages."""
    result = search(question)
    before = next((each for each in reversed(earlier) if words_of(each)), None)
    if before is not None and (result.refused is not None or not words_of(question)):
        result = search(f"{before}\n{question}")
        result = SearchResult() if result.refused and not extracts else result
    return result


def _place(hit: Hit) -> tuple[str, int, str]:
    """Return the key of a passage: document, start, and its text, as several may share a name."""
    return hit.document.name, hit.passage.start, hit.passage.text
