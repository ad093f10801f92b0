"""One long document, prefilled once for all questions.

The prompt has the document first and then the question, tokenized separately, so that every
question reuses the document's keys and values (RAGCache, arXiv 2404.12457). They can be saved, and
reused after a restart.
"""

import os
import weakref
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ragspec.engine.engine import Engine
from ragspec.engine.plain_text import encode_text, mark_special_tokens
from ragspec.engine.request import OnRead, check_options, expect_engine
from ragspec.errors import InputError, PromptTooLongError, UnsupportedModelError
from ragspec.pipelines.answering.answer import Answer, SearchResult
from ragspec.pipelines.answering.answerer import Answerer, Question
from ragspec.pipelines.answering.chunks import Chunks
from ragspec.pipelines.answering.prompt import Prompt, clean_question, led_by, passage_first, placed
from ragspec.pipelines.answering.saved_document import SavedDocument, open_document, save_document
from ragspec.pipelines.answering.template import PromptTemplate, find_template, suited
from ragspec.retrievers.search.dense import EmbedderSpec
from ragspec.retrievers.search.documents import Document, load_document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passages import Passage
from ragspec.retrievers.search.sentences import rank_sentences
from ragspec.sampling.settings import whole
from ragspec.storage.filesystem import expect_path
from ragspec.storage.store import is_store
from ragspec.verification.prefix_cache import BLOCK
from ragspec.verification.sequence_cache import Layers, slot_bytes

QUESTION_ROOM = 256  # tokens of the context that a document leaves to question and answer

TokenRange = tuple[int, int]


class LongDocument(Answerer, AbstractContextManager["LongDocument", None]):
    """Answers questions over one document, which `open` prefills.

    Any number of threads may ask. The engine's prefix cache keeps the keys and values until
    `close`; a question that runs beside others has a copy of them. `PrefixCache.bytes` counts what
    is kept after them too, up to its limit. `refuse` has no effect here. The option `transform` may
    be the `Steering` of a model that reads the chunks of a question.

    Args:
        saved: The document, whose keys and values go to the engine's prefix cache.
        embedder, tenant: See `open`.

    Attributes:
        hit: The part of the document that is read.
        prefix: The prompt up to the end of the document.
    """

    def __init__(
        self, engine: Engine, saved: SavedDocument, embedder: EmbedderSpec = None, tenant: str = ""
    ) -> None:
        super().__init__(engine, prompt=saved.template)
        check_options({"tenant": tenant})
        self.document, self.token_range, self.tenant = saved.document, saved.token_range, tenant
        self.hit, self.prefix = _laid(engine, saved)
        self._embedder = embedder
        if not saved.layers:
            _check_room(engine, self.prefix, saved.token_range)
        elif self.prefix.token_ids != saved.tokens:
            raise InputError(
                f"{saved.document.name} was saved over {len(saved.tokens)} tokens that its text "
                "does not give now; the tokenizer or chat template has changed. Save the document "
                "again."
            )
        self._hold(saved.layers)

    def _hold(self, layers: Layers) -> None:
        """Keep the document in the engine's prefix cache, with these keys and values if any."""
        cache = self.engine.prefix_cache
        self._pin = cache.pin(self.prefix.token_ids, self.tenant)
        weakref.finalize(self, cache.unpin, self._pin).atexit = False
        if layers:
            cache.insert(self.prefix.token_ids, layers, self.tenant)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str] | Document,
        engine: Engine,
        *,
        token_range: TokenRange | None = None,
        prompt: str | Path | PromptTemplate | None = None,
        embedder: EmbedderSpec = None,
        tenant: str = "",
        on_read: OnRead | None = None,
    ) -> Self:
        """Read a document, or open one that `save` wrote.

        Args:
            path: A file, a `Document`, or the folder of a saved one, which brings its own prompt
                and token range.
            engine: Reads the document and writes the answers. With the drafter `Rapid` a model
                reads the chunks of each question.
            token_range: Tokens of the document to read, from and to; None for all.
            prompt: See `Answerer`.
            embedder: Embeds the chunks, see `PassageIndex.build`; None for the bundled one.
            tenant: Owner of the document and of all texts over it, see `Options`.
            on_read: Called with the tokens read and their total.

        Raises:
            DocumentError: The file holds no text.
            PromptTooLongError: The document does not fit the context; the message says what does.
            InputError: The part holds no text, or options exclude each other.
            StoreError: The saved document is damaged, or of another model.
            UnsupportedModelError: The model's cache cannot be saved.
        """
        expect_engine(engine)
        if not isinstance(path, Document) and is_store(expect_path(path, "the document")):
            if token_range is not None or prompt is not None:
                raise InputError(
                    f"got token_range or prompt with {path}, which was saved with its own; "
                    "expected none of them, or the document itself."
                )
            return cls(engine, open_document(Path(path), engine), embedder, tenant)
        document = path if isinstance(path, Document) else load_document(path)
        template = find_template(suited(engine.tokenizer) if prompt is None else prompt)
        opened = cls(engine, SavedDocument(document, template, token_range), embedder, tenant)
        opened._layers(on_read)
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
        """The bytes of the keys and values."""
        return self._cache_bytes(self.tokens)

    def _cache_bytes(self, length: int) -> int:
        return length * slot_bytes(self.engine.model.config, self.engine.target.dtype)

    def close(self) -> None:
        """Let the prefix cache evict the document; later questions may read it again."""
        self.engine.prefix_cache.unpin(self._pin)

    def __exit__(self, *raised: object) -> None:
        self.close()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the prefilled document to a folder completely, or raise StoreError."""
        about = (self.document, self.template, self.token_range)
        saved = SavedDocument(*about, self.prefix.token_ids, self._layers())
        save_document(expect_path(path, "the saved document"), saved, self.engine)

    def over(self, engine: Engine) -> Self:
        """Return the document with another engine over the same target."""
        other = super().over(engine)
        if engine.target is not self.engine.target:
            raise InputError("got an engine over another model; expected one over the same target.")
        layers: Layers = {}
        if engine.scheduler is not self.engine.scheduler:  # a prefix cache of its own
            layers = {n: (k.clone(), v.clone()) for n, (k, v) in self._layers().items()}
        other._hold(layers)
        return other

    def _layers(self, on_read: OnRead | None = None) -> Layers:
        """Return the keys and values of the prefix cache, after a prefill if it has none."""
        tokens, engine = list(self.prefix.token_ids), self.engine
        layers = engine.prefix_cache.export(tokens, self.tenant)
        if layers is None:  # not read yet, or a question that runs has them
            engine.prefill(tokens, tenant=self.tenant, on_read=on_read)
            layers = engine.prefix_cache.export(tokens, self.tenant)
        if layers is None and len(tokens) < BLOCK:
            raise InputError(
                f"the document has {len(tokens)} tokens with what stands before it; expected at "
                f"least {BLOCK}. Ask it with DocQA, or `ragspec ask --docs`."
            )
        if layers is None:
            raise UnsupportedModelError(
                f"what {type(engine.model).__name__} makes of a document cannot be kept: its cache "
                "cannot be cut, or its positions depend on the prompt's length. Ask it with DocQA, "
                "or `ragspec ask --docs`, over passages."
            )
        return layers

    def prompt(self, question: str) -> Prompt:
        """Return the prompt of a question, which begins with the document."""
        return passage_first(self.engine.tokenizer, question, self.hit, self.template, self.prefix)

    def search(self, question: str, *, refuse: bool = True) -> SearchResult:
        """Return the document's sentences that answer a question best."""
        return SearchResult((), tuple(rank_sentences(clean_question(question), [self.hit])))

    def _write(self, question: Question) -> Answer:
        text, options = question.text, question.options
        check_options(options, ("tenant",), "LongDocument.open()")
        options["tenant"] = self.tenant
        prompt, chunks = self.prompt(text), tuple[Hit, ...]()
        if options.get("transform") is not None or self.engine.needs.draft_prompt:
            chunks, ids = self.chunks.find(self.engine.tokenizer, text, self.template)
            options.setdefault("draft_prompt", ids)
        generation = self._generate(prompt, question)
        size = self._cache_bytes(len(prompt.token_ids) + len(generation.tokens))
        generation = replace(generation, report=replace(generation.report, kv_bytes=size))
        return replace(self.answer_of(question, prompt, generation), chunks=chunks)

    @cached_property
    def chunks(self) -> Chunks:
        """The search for chunks, built on first use."""
        return Chunks(self.hit, self.tokens, self._embedder)


def _laid(engine: Engine, saved: SavedDocument) -> tuple[Hit, Prompt]:
    """Return a document as the one passage of a prompt, and the prompt up to its end."""
    document, template, tokenizer = saved.document, saved.template, engine.tokenizer
    start, end = _characters(tokenizer, document, saved.token_range)
    text = document.text[start:end].strip()
    if not text:
        raise InputError(f"that part of {document.name} holds no text; choose another.")
    first = document.text.index(text, start)
    hit = Hit(document, Passage(0, first, first + len(text), document.title, text), 1.0)
    whole, at = led_by(tokenizer, "?", hit, template)
    if not at:
        raise InputError(
            f"the prompt {template.name!r} does not put the document on lines of its own; "
            "expected a template that does, before the question."
        )
    return hit, placed(tokenizer, whole[:at], [hit])


def _characters(tokenizer: Any, document: Document, token_range: TokenRange | None) -> TokenRange:
    """Return the characters (start, end) of a part of a document."""
    if token_range is None:
        return 0, len(document.text)
    numbers: Any = token_range if isinstance(token_range, list | tuple) else ()
    ends = [place for each in numbers if (place := whole(each)) is not None]
    first, last = ends if len(ends) == len(numbers) == 2 else (-1, -1)
    if not 0 <= first < last:
        raise InputError(f"Expected token_range=(FROM, TO), FROM below TO, got {token_range!r}.")
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("token_range= needs the offsets of tokens; expected a fast tokenizer.")
    places = encode_text(tokenizer, mark_special_tokens(document.text, tokenizer)).offsets
    if first >= len(places):
        raise InputError(
            f"token_range {token_range} begins behind the end of {document.name} at {len(places)}; "
            "expected less."
        )
    return places[first][0], places[min(last, len(places)) - 1][1]


def _check_room(engine: Engine, prefix: Prompt, token_range: TokenRange | None) -> None:
    """Raise PromptTooLongError if a document does not fit the context, and say what would."""
    limit, length = engine.target.max_length, len(prefix.token_ids)
    first = token_range[0] if token_range else 0
    if limit is not None and length + QUESTION_ROOM > limit:
        spanned = sum(end - start for start, end, _, _ in prefix.spans) or length
        fits = max(1, limit - QUESTION_ROOM - (length - spanned))
        raise PromptTooLongError(
            f"the document takes {length:,} tokens of a context of {limit:,}, {QUESTION_ROOM} of "
            f"which question and answer need; {fits:,} fit: read a part of it "
            f"(token_range=({first}, {first + fits}), --set token-range={first}:{first + fits}), "
            "or ask DocQA, which searches it."
        )
