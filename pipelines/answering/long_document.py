"""One long document, prefilled once for all questions.

The prompt has the document first and then the question, tokenized separately, so that every
question reuses the document's keys and values (RAGCache, arXiv 2404.12457). They can be saved, and
reused after a restart.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragspec.drafters.base import KnownStates
from ragspec.engine.plain_text import encode_text, mark_special_tokens, without_marks
from ragspec.engine.request import refuse_unknown
from ragspec.errors import InputError, PromptTooLongError, UnsupportedModelError
from ragspec.pipelines.answering.chunks import ChunkHits, Chunks, ChunkSearch
from ragspec.pipelines.answering.docqa import NEW_TOKENS, Answer, answer_of, generate_answer
from ragspec.pipelines.answering.modes import AnswerWriter, writer_of
from ragspec.pipelines.answering.prompt import Prompt, laid_out, led_by, placed
from ragspec.pipelines.answering.saved_document import (
    SavedDocument,
    nbytes,
    open_document,
    save_document,
)
from ragspec.pipelines.answering.template import PromptTemplate, find_template, suited
from ragspec.retrievers.search.documents import Document, load_document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passages import Passage
from ragspec.sampling.settings import Sampling
from ragspec.storage.store import is_store
from ragspec.verification.sequence_cache import slot_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from ragspec.drafters.base import Drafter
    from ragspec.engine.engine import Engine
    from ragspec.engine.request import OnRead

QUESTION_ROOM = 256  # tokens of the context that a document leaves to question and answer

Part = tuple[int, int]


class LongDocument:
    """Answers questions over one document, which `open` prefills.

    Any number of threads may ask. The engine's prefix cache keeps the keys and values until
    `close`; each question that runs beside others has a copy.

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
        self._about = replace(saved, layers={})
        self.hit = hit
        self.prefix = prefix
        cache = self.engine.prefix_cache
        self._pin = cache.pin(prefix.token_ids)
        weakref.finalize(self, self._pin.close).atexit = False
        if saved.layers:
            cache.insert(prefix.token_ids, saved.layers)
        self._bytes = nbytes(saved.layers)
        self._chunks: Chunks | None = None

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
            drafter: Replaces the engine's drafter; "rapid" reads the chunks of each question.
            draft_model: The model that reads chunks, as for `Engine`; None for the target.
            mode, eta: See `Rapid`. In mode "steered" that model moves the answers' distribution.
            chunks: Settings of the search for chunks.
            on_read: Called with the tokens read and their total.

        Raises:
            DocumentError: The file holds no text.
            PromptTooLongError: The document does not fit the context; the message says what does.
            InputError: The part holds no text, or options exclude each other.
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
        characters = _characters(engine.tokenizer, document, token_range)
        hit, prefix = _laid(engine, document, characters, template)
        _check_room(writer.engine, prefix, token_range)
        part = None if token_range is None else (int(token_range[0]), int(token_range[1]))
        saved = SavedDocument(document, template, prefix.token_ids, part, characters, {})
        opened = cls(writer, saved, hit, prefix, chunks)
        opened._read(on_read)
        return opened

    @property
    def tokens(self) -> int:
        """The number of prompt tokens up to the end of the document, which are read once."""
        return len(self.prefix.token_ids)

    @property
    def text(self) -> str:
        """The part of the document's text that is read."""
        return self.hit.passage.text

    @property
    def bytes(self) -> int:
        """The bytes of the keys and values and, if a drafter needs them, of the hidden states."""
        states = self._about.states
        return self._bytes + (0 if states is None else states.nbytes)

    def close(self) -> None:
        """Let the prefix cache evict the document; later questions may read it again."""
        self._pin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the prefilled document to a folder, completely or not at all.

        Raises:
            StoreError: The folder cannot be written.
        """
        save_document(Path(path), self._saved(), self.engine)

    def over(self, engine: Engine) -> LongDocument:
        """Return the document with another engine over the same target, steered as before."""
        if engine.target is not self.engine.target:
            raise InputError("got an engine over another model; expected one over the same target.")
        writer = AnswerWriter(engine, self._writer.transform)
        if engine.scheduler is self.engine.scheduler:
            saved = self._about
        else:  # a prefix cache of its own
            saved = self._saved()
            layers = {n: (k.clone(), v.clone()) for n, (k, v) in saved.layers.items()}
            saved = replace(saved, layers=layers)
        return LongDocument(writer, saved, self.hit, self.prefix, self._search)

    def _saved(self) -> SavedDocument:
        tokens = self.prefix.token_ids
        layers = self.engine.prefix_cache.export(tokens)
        if layers is None:  # a question that runs has them
            self.engine.prefill(list(tokens))
            layers = self.engine.prefix_cache.export(tokens)
        return replace(self._about, layers=layers or {})

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
            stream: Called with each piece of text as it is verified. An interrupt then ends the
                answer and keeps its text.
            options: Further arguments of `Engine.generate`.

        Raises:
            InputError: The question is empty, or n is above 1.
            PromptTooLongError: Question and answer do not fit after the document.
        """
        refuse_unknown(options)
        if not isinstance(question, str) or not question.strip():
            raise InputError(f"The question is empty or no text ({question!r}); ask something.")
        if sampling is not None and sampling.n != 1:
            raise InputError(f"ask() gives one answer, got n={sampling.n}; use Engine.generate.")
        prompt = self.prompt(question)
        options = {**options, "max_new_tokens": max_new_tokens}
        hits = self._matches(question)
        if hits is not None:
            options.setdefault("draft_prompt", hits.prompt)
        if self._writer.transform is not None:
            options.setdefault("transform", self._writer.transform)
        if self._about.states is not None and self.engine.needs.hidden_states:
            options.setdefault("known_states", self._known_states(question, self._about.states))
        generation = generate_answer(
            self.engine, prompt, self.template, sampling, stream, **options
        )
        answer = answer_of(question, prompt, self.template, generation, 0.0, self.engine)
        length = len(prompt.token_ids) + len(generation.tokens)
        size = length * slot_bytes(self.engine.model.config, self.engine.target.dtype)
        report = replace(answer.report, kv_bytes=size)
        return replace(answer, chunks=() if hits is None else hits.chunks, report=report)

    def _matches(self, question: str) -> ChunkHits | None:
        """Return the chunks of a question if a model reads them, else None."""
        if self._writer.transform is None and not self.engine.needs.draft_prompt:
            return None
        return self.chunks.find(self.engine.tokenizer, question, self.template)

    def _known_states(self, question: str, states: Tensor) -> tuple[KnownStates, ...]:
        """Return the hidden states of a question's chunks, for the cache of a feature head."""
        spans = self.chunks.spans(question, self.prefix)
        return tuple(KnownStates(start, states[:, start:end]) for start, end in spans)

    @property
    def chunks(self) -> Chunks:
        """The search for chunks, built on first use."""
        if self._chunks is None:
            self._chunks = Chunks(self.document, self.hit, self.tokens, self._search)
        return self._chunks

    def prompt(self, question: str) -> Prompt:
        """Return the prompt of a question, which begins with the document."""
        question = " ".join(question.split())
        tokenizer = self.engine.tokenizer
        text, end = led_by(tokenizer, question, self.hit, self.template)
        ids = (*self.prefix.token_ids, *encode_text(tokenizer, text[end:]).ids)
        whole = replace(self.prefix, text=without_marks(text), token_ids=ids)
        return laid_out(tokenizer, whole, self.template)

    def _read(self, on_read: OnRead | None) -> None:
        """Prefill the document, and keep its keys and values."""
        wants, tokens = self.engine.needs.hidden_states, self.prefix.token_ids
        states = self.engine.prefill(list(tokens), cached=not wants, states=wants, on_read=on_read)
        layers = self.engine.prefix_cache.export(tokens)
        if layers is None:
            raise UnsupportedModelError(
                f"what {type(self.engine.model).__name__} makes of a document cannot be kept: its "
                "cache cannot be cut, or its positions depend on the prompt's length. Ask it with "
                "DocQA over passages."
            )
        self._bytes = nbytes(layers)
        self._about = replace(self._about, states=states)


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
            "expected a template that does, before the question."
        )
    return hit, placed(engine.tokenizer, whole[:at], [hit])


def _characters(tokenizer: Any, document: Document, token_range: Part | None) -> Part:
    """Return the characters (start, end) of a part of a document."""
    if token_range is None:
        return 0, len(document.text)
    first, last = token_range
    if not 0 <= first < last:
        raise InputError(f"Expected token_range=(FROM, TO) with FROM below TO, got {token_range}.")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            "token_range= needs a tokenizer that tells characters; expected a fast one."
        )
    places = encode_text(tokenizer, mark_special_tokens(document.text, tokenizer)).offsets
    if first >= len(places):
        raise InputError(
            f"token_range {token_range} begins behind the {len(places)} tokens of {document.name}; "
            "expected less."
        )
    return places[first][0], places[min(last, len(places)) - 1][1]


def _check_room(engine: Engine, prefix: Prompt, token_range: Part | None) -> None:
    """Raise PromptTooLongError if a document does not fit the context, and say what would."""
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
