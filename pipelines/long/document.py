"""One long document, read once: every question starts where the document ends.

The document stands first in the prompt and the question behind it, tokenised apart, so that its
keys and values serve every question (RAGCache, arXiv 2404.12457). They can be saved, and then serve
after a restart.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragspec.drafters.base import KnownStates, needs_hidden, wants_draft_prompt
from ragspec.engine.options import refuse_unknown
from ragspec.engine.prefix_cache import PrefixCache, SharedPrefixes
from ragspec.errors import InputError, PromptTooLongError
from ragspec.pipelines.docqa.docqa import NEW_TOKENS, Answer, answer_of, drain
from ragspec.pipelines.docqa.prompt import Prompt, laid_out, led_by, placed, plain_ids
from ragspec.pipelines.docqa.template import PromptTemplate, find_template, suited
from ragspec.pipelines.long.chunks import ChunkHits, Chunks, ChunkSearch
from ragspec.pipelines.long.modes import AnswerWriter, writer_of
from ragspec.pipelines.long.saved import (
    OnRead,
    SavedDocument,
    open_document,
    read_document,
    save_document,
)
from ragspec.retrievers.search.documents import Document, load_document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passages import Passage
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import EndRepetition
from ragspec.storage.store import is_store
from ragspec.verification.kv_cache import slot_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from ragspec.drafters.base import Drafter
    from ragspec.engine.engine import Engine

QUESTION_ROOM = 256  # tokens of the context that a document leaves to question and answer
COPIES = 2  # of keys and values: those that are kept, and those of the question at work
MOST_SHARE = 0.9  # of the free memory

Part = tuple[int, int]


class LongDocument:
    """Answers questions over one document, which is read when it is opened.

    Any number of threads may ask; each question at work has a copy of the keys and values. Use
    `open`.

    Args:
        prefix: The prompt up to the end of the document.
    """

    def __init__(
        self,
        writer: AnswerWriter,
        saved: SavedDocument,
        hit: Hit,
        prefix: Prompt,
        chunks: ChunkSearch,
    ) -> None:
        self.engine = writer.engine
        self._writer = writer
        self._search = chunks
        self.document = saved.document
        self.token_range = saved.part
        self.template = saved.template
        self._about = replace(saved, beginning=())
        self.hit = hit
        self.prefix = prefix
        self._beginnings = SharedPrefixes(most_bytes=1 << 62)
        if saved.beginning:
            self._beginnings.keep(self.engine.target, prefix.token_ids, saved.beginning)
        self._idle: list[PrefixCache] = []
        self._chunks: Chunks | None = None
        self._using = threading.Lock()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | Document,
        engine: Engine,
        *,
        token_range: Part | None = None,
        prompt: str | Path | PromptTemplate | None = None,
        system: str | None = None,
        drafter: str | Drafter | Sequence[str | Drafter] | None = None,
        draft_model: Any = None,
        mode: str = "exact",
        eta: float | None = None,
        chunks: ChunkSearch | None = None,
        on_read: OnRead | None = None,
    ) -> Self:
        """Read a document, or open one that `save` wrote.

        Args:
            path: A file, a `Document`, or the folder of a saved one, which brings its own prompt
                and token range.
            engine: Reads the document and writes the answers.
            token_range: Tokens of the document to read, from and to; None for all.
            prompt, system: See `DocQA.ask`.
            drafter: In place of the engine's; "rapid" reads the chunks that the question finds.
            draft_model: What reads these chunks, as the engine takes it; None for the target.
            mode, eta: See `Rapid`. In mode "steered" that model moves the answers' distribution.
            chunks: How chunks are found.
            on_read: Called with the tokens read and their total.

        Raises:
            DocumentError: The file holds no text.
            PromptTooLongError: The document does not fit the context; the message says what does.
            InputError: Its keys do not fit the memory, or options exclude each other.
            StoreError: The saved document is damaged, or of another model.
            UnsupportedModelError: The model's cache cannot be saved.
        """
        if engine.tokenizer is None:
            raise InputError("The engine has no tokenizer; questions over documents need one.")
        writer = writer_of(engine, drafter, draft_model, mode, eta)
        chunks = chunks or ChunkSearch()
        if not isinstance(path, Document) and Path(path).is_dir() and is_store(Path(path)):
            if token_range is not None or prompt is not None or system is not None:
                raise InputError(
                    f"got token_range, prompt or system with {path}, which was saved with its own; "
                    "expected none of them, or the document itself."
                )
            saved = open_document(Path(path), engine)
            hit, prefix = _laid(engine, saved.document, saved.characters, saved.template)
            if prefix.token_ids != saved.tokens:
                raise InputError(
                    f"{path} was saved over {len(saved.tokens)} tokens that its text does not give "
                    "now; the tokenizer or chat template has changed. Save the document again."
                )
            return cls(writer, saved, hit, prefix, chunks)
        document = path if isinstance(path, Document) else load_document(path)
        template = find_template(suited(engine.tokenizer) if prompt is None else prompt, system)
        token_range = _checked_range(token_range)
        characters = _characters(engine.tokenizer, document, token_range)
        hit, prefix = _laid(engine, document, characters, template)
        _check_room(writer.engine, prefix, token_range)
        saved = SavedDocument(document, template, prefix.token_ids, token_range, characters, ())
        result = cls(writer, saved, hit, prefix, chunks)
        result._read(on_read)
        return result

    @property
    def tokens(self) -> int:
        """The tokens of the prompt up to the end of the document, which are read once."""
        return len(self.prefix.token_ids)

    @property
    def text(self) -> str:
        """The part of the document's text that is read."""
        return self.hit.passage.text

    @property
    def bytes(self) -> int:
        """The bytes kept: of keys and values and, where a drafter wants them, of states."""
        states = self._about.states
        return self._beginnings.bytes + (0 if states is None else states.nbytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was read to a folder, as a whole or not at all; raises StoreError."""
        save_document(Path(path), self._selection(), self.engine)

    def over(self, engine: Engine) -> LongDocument:
        """Return the same document asked through another engine over the same target.

        Where the distribution is steered it stays so.
        """
        if engine.target is not self.engine.target:
            raise InputError("got an engine over another model; expected one over the same target.")
        writer = AnswerWriter(engine, self._writer.transform)
        return LongDocument(writer, self._selection(), self.hit, self.prefix, self._search)

    def _selection(self) -> SavedDocument:
        result = self._beginnings.find(self.engine.target, self.prefix.token_ids)
        return replace(self._about, beginning=result or ())

    def ask(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = NEW_TOKENS,
        stream: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question over the document, which is not read again.

        Args:
            stream: Called with each piece of text as it is verified; an interrupt then ends the
                text and keeps what was written.
            options: Further arguments of `Engine.generate`.

        Raises:
            InputError: For an empty question or n > 1.
            PromptTooLongError: Where question and answer do not fit behind the document.
        """
        refuse_unknown(options)
        if not isinstance(question, str) or not question.strip():
            raise InputError(f"The question is empty or no text ({question!r}); ask something.")
        if sampling is not None and sampling.n != 1:
            raise InputError(f"ask() gives one answer, got n={sampling.n}; use Engine.generate.")
        prompt = self.prompt(question)
        options = {
            "stop": self.template.stop,
            "stopping_criteria": [EndRepetition(len(prompt.token_ids))],
            **options,
            "max_new_tokens": max_new_tokens,
            "spans": prompt.spans,
            "texts": (*prompt.layout, *options.get("texts", ())),
            "prefix": self.tokens,
        }
        result = self._matches(question)
        if result is not None:
            options.setdefault("draft_prompt", result.prompt)
        if self._writer.transform is not None:
            options.setdefault("transform", self._writer.transform)
        if self._about.states is not None and needs_hidden([self.engine.drafter]):
            options.setdefault("known_states", self._known_states(question, self._about.states))
        ids = list(prompt.token_ids)
        with self._context() as selected:
            if stream is None:
                generation = self.engine.generate(ids, sampling, **options, prefix_cache=selected)
            else:
                chunks = self.engine.stream(ids, sampling, **options, prefix_cache=selected)
                generation = drain(chunks, stream)
        answer = answer_of(question, prompt, self.template, generation, 0.0, self._decode)
        return self._measured(answer, () if result is None else result.chunks)

    def _measured(self, answer: Answer, chunks: tuple[Hit, ...]) -> Answer:
        """Return the answer with what was read beside the document, and the bytes of it all."""
        length = len(answer.prompt.token_ids) + len(answer.generation.tokens)
        size = length * slot_bytes(self.engine.model.config, self.engine.target.dtype)
        return replace(answer, chunks=chunks, report=replace(answer.report, kv_bytes=size))

    def _matches(self, question: str) -> ChunkHits | None:
        """Return the chunks for a model with a context of its own, None where there is none."""
        if self._writer.transform is None and not wants_draft_prompt(self.engine.drafter):
            return None
        return self.chunks.find(self.engine.tokenizer, question, self.template)

    def _known_states(self, question: str, states: Tensor) -> tuple[KnownStates, ...]:
        """Return the states of the chunks that the question finds, for a head's own cache."""
        spans = self.chunks.spans(question, self.prefix)
        return tuple(KnownStates(start, states[:, start:end]) for start, end in spans)

    @property
    def chunks(self) -> Chunks:
        """The chunks in which a drafter's part of the document is looked up."""
        if self._chunks is None:
            self._chunks = Chunks(self.document, self.hit, self.tokens, self._search)
        return self._chunks

    def prompt(self, question: str) -> Prompt:
        """Return the prompt of a question, whose beginning is the document's."""
        question = " ".join(question.split())
        tokenizer = self.engine.tokenizer
        text, end = led_by(tokenizer, question, self.hit, self.template)
        ids = (*self.prefix.token_ids, *plain_ids(tokenizer, text[end:]))
        whole = replace(self.prefix, text=text, token_ids=ids)
        return laid_out(tokenizer, whole, self.template)

    def _read(self, on_read: OnRead | None) -> None:
        """Read the document, and keep its keys and values; no text is written."""
        keeps_states = needs_hidden([self.engine.drafter])
        ids, context = self.prefix.token_ids, self._context()
        result = read_document(self.engine, ids, context, states=keeps_states, on_read=on_read)
        self._about = replace(self._about, states=result)

    @contextmanager
    def _context(self) -> Iterator[PrefixCache]:
        """Lend a context that no other question uses."""
        with self._using:
            cache = self._idle.pop() if self._idle else PrefixCache(self._beginnings)
        try:
            yield cache
        finally:
            with self._using:
                self._idle.append(cache)

    def _decode(self, tokens: Any) -> str:
        return str(self.engine.tokenizer.decode(tokens, skip_special_tokens=True))


def _laid(
    engine: Engine, document: Document, characters: Part, template: PromptTemplate
) -> tuple[Hit, Prompt]:
    """Return a document as the one passage of a prompt, and the prompt up to its end."""
    start, end = characters
    text = document.text[start:end].strip()
    if not text:
        raise InputError(f"that part of {document.name} holds no text; choose another.")
    first = document.text.index(text, start)
    passage = Passage(0, first, first + len(text), document.title, text)
    hit = Hit(document, passage, 1.0)
    whole, at = led_by(engine.tokenizer, "?", hit, template)
    if not at:
        raise InputError(
            f"the prompt {template.name!r} does not put the document on lines of its own; "
            f"expected a "
            "template that does, before the question."
        )
    return hit, placed(engine.tokenizer, whole[:at], [hit])


def _characters(tokenizer: Any, document: Document, token_range: Part | None) -> Part:
    """Return from where to where a part of a document reaches, in characters."""
    if token_range is None:
        return 0, len(document.text)
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "token_range= needs a tokenizer that tells characters; expected a fast one."
        )
    encoded = tokenizer(document.text, add_special_tokens=False, return_offsets_mapping=True)
    places = encoded["offset_mapping"]
    if token_range[0] >= len(places):
        raise InputError(
            f"token_range {token_range} begins behind the {len(places)} tokens of {document.name}; "
            "expected less."
        )
    return int(places[token_range[0]][0]), int(places[min(token_range[1], len(places)) - 1][1])


def _checked_range(token_range: Part | None) -> Part | None:
    if token_range is None:
        return None
    first, last = token_range
    if not 0 <= first < last:
        raise InputError(f"Expected token_range=(FROM, TO) with FROM below TO, got {token_range}.")
    return int(first), int(last)


def _check_room(engine: Engine, prefix: Prompt, token_range: Part | None) -> None:
    """Raise where a document fits neither the context nor the memory, and say what would."""
    limit, length = engine.target.max_length, len(prefix.token_ids)
    first = token_range[0] if token_range else 0
    if limit is not None and length + QUESTION_ROOM > limit:
        spanned = sum(end - start for start, end, _, _ in prefix.spans) or length
        fits = max(1, limit - QUESTION_ROOM - (length - spanned))
        raise PromptTooLongError(
            f"the document takes {length:,} tokens of a context of {limit:,}, {QUESTION_ROOM} of "
            f"which question and answer need; {fits:,} fit: read a part of it "
            f"(token_range=({first}, {first + fits}), --token-range {first}:{first + fits}), "
            "or ask DocQA, which searches it."
        )
