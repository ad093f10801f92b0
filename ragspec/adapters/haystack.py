"""Haystack: a chat generator, a retriever over our index, and Haystack's retrievers for `DocQA`.

    pipeline.add_component("llm", RagspecChatGenerator(model="smollm2"))
    pipeline.run({"llm": {"messages": [ChatMessage.from_user("Name three rivers.")]}})

Written against haystack-ai 3.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ragspec.adapters.passages import (
    HostRetriever,
    ProgressCallback,
    facts_of,
    hits_of,
    opened,
    search_of,
)
from ragspec.adapters.requests import read_settings
from ragspec.adapters.writer import HostWriter, Job, pulled
from ragspec.engine.output import Generation
from ragspec.errors import InputError
from ragspec.registry import for_extra

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.dataclasses import (
        ChatMessage,
        ComponentInfo,
        StreamingCallbackT,
        StreamingChunk,
        select_streaming_callback,
    )
    from haystack.utils import deserialize_callable, serialize_callable
except ModuleNotFoundError as error:
    raise for_extra(error) from error


@component
class RagspecChatGenerator:
    """A chat generator that drafts from its prompt, from documents and from whatever else is named.

    Args:
        model: A name or path, loaded by `warm_up` or by the first run; engine or pool: one that is
            there already, in its place, which a pipeline cannot be saved with. A pool lets
            concurrent runs share the device;
        max_batch_size: Makes one over the model.
        drafter, draft_model, budget: See `Engine`, with model alone.
        chat_template: Jinja, for models that come without one.
        generation_kwargs: Temperature (0, the default, is greedy), top_p, top_k, min_p, max_tokens,
            seed, stop, n, penalties, logprobs, top_logprobs, prediction, tenant (of a pool).

    Raises:
        InputError, SamplingError: And, once it is loaded, the errors of `Engine`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: Any = None,
        pool: Any = None,
        max_batch_size: int = 0,
        drafter: Any = "auto",
        draft_model: str | None = None,
        budget: str | int = "auto",
        chat_template: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> None:
        read_settings(generation_kwargs or {})
        self.model = model
        self.max_batch_size = max_batch_size
        self.drafter = drafter
        self.draft_model = draft_model
        self.budget = budget
        self.chat_template = chat_template
        self.generation_kwargs = dict(generation_kwargs or {})
        self.streaming_callback = streaming_callback
        self._ready = (engine, pool)
        self._writer: HostWriter | None = None
        if model is None or engine is not None or pool is not None:
            self.warm_up()  # nothing is loaded for these; what contradicts itself is told at once

    def warm_up(self) -> None:
        """Load the model, if it is not loaded."""
        if self._writer is None:
            self._writer = HostWriter.of(
                self.model,
                *self._ready,
                template=self.chat_template,
                max_batch_size=self.max_batch_size,
                drafter=self.drafter,
                draft_model=self.draft_model,
                budget=self.budget,
            )

    def close(self) -> None:
        """End the pool that `max_batch_size` made, if any; the next run makes another."""
        if self._writer is not None and self.max_batch_size:
            self._writer.close()
            self._writer = None

    def to_dict(self) -> dict[str, Any]:
        """Return what makes the component again; raises InputError for one with an engine."""
        named = isinstance(self.drafter, str | None) and isinstance(self.budget, str | int)
        if self.model is None or not named:
            raise InputError(
                "got a generator with an object in it (engine, pool, drafter or budget); expected "
                "names alone, which can be written to a file. Make it with model=NAME."
            )
        callback = self.streaming_callback
        instance: dict[str, Any] = default_to_dict(
            self,
            model=self.model,
            max_batch_size=self.max_batch_size,
            drafter=self.drafter,
            draft_model=self.draft_model,
            budget=self.budget,
            chat_template=self.chat_template,
            generation_kwargs=self.generation_kwargs,
            streaming_callback=None if callback is None else serialize_callable(callback),
        )
        return instance

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RagspecChatGenerator:
        """Return the component that `to_dict` wrote."""
        settings = dict(data.get("init_parameters", {}))
        if settings.get("streaming_callback"):
            settings["streaming_callback"] = deserialize_callable(settings["streaming_callback"])
        instance: RagspecChatGenerator = default_from_dict(
            cls, {**data, "init_parameters": settings}
        )
        return instance

    @component.output_types(replies=list[ChatMessage])  # type: ignore[untyped-decorator]
    def run(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        documents: list[Document] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer a conversation.

        messages: or a text, which is a user's turn. streaming_callback: called with each piece;
        needs n=1. documents: drafted from and cited; the prompt may hold them or not. replies: as
        many as n asks for; `meta` has finish reason, usage, figures of acceptance and citations.
        Raises InputError, SamplingError, PromptTooLongError, UnsupportedModelError.
        """
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=False
        )
        writer, job = self._job(messages, generation_kwargs, documents)
        if callback is None:
            return _replies(writer, job, writer.write(job))
        info = ComponentInfo.from_component(self)
        chunks = writer.stream(job)
        try:
            for number, piece in enumerate(chunks):
                callback(_chunk(writer, number, piece, info))
        finally:
            chunks.close()
        callback(_last(writer, chunks.result, info))
        return _replies(writer, job, [chunks.result])

    @component.output_types(replies=list[ChatMessage])  # type: ignore[untyped-decorator]
    async def run_async(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        documents: list[Document] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer a conversation as `run` does; the event loop goes on meanwhile."""
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=True
        )
        writer, job = self._job(messages, generation_kwargs, documents)
        if callback is None:
            return _replies(writer, job, await asyncio.to_thread(writer.write, job))
        info = ComponentInfo.from_component(self)
        chunks = writer.stream(job)
        number = 0
        async for piece in pulled(chunks):
            await _call(callback, _chunk(writer, number, piece, info))
            number += 1
        await _call(callback, _last(writer, chunks.result, info))
        return _replies(writer, job, [chunks.result])

    def _job(
        self,
        messages: list[ChatMessage] | str,
        generation_kwargs: dict[str, Any] | None,
        documents: list[Document] | None,
    ) -> tuple[HostWriter, Job]:
        self.warm_up()
        assert self._writer is not None
        request = read_settings(self.generation_kwargs, generation_kwargs or {})
        hits = hits_of(map(_summary, [*request.documents, *(documents or ())]))
        if isinstance(messages, str):
            messages = [ChatMessage.from_user(messages)]
        return self._writer, self._writer.chat([_message(m) for m in messages], request, hits)


@component
class HaystackRetriever:
    """Our passages as Haystack's documents, best first.

    Args:
        index: A PassageIndex, or the folder that its `save` wrote, opened by `warm_up` or the first
            run.
        top_k: Passages.
        mode: "dense", "sparse", "fused", None for the best that the index can do. meta of a
            document: source, name, title, start and end (characters of the source's text), page.

    Raises:
        InputError, StoreError: What is wrong, and a remedy.
    """

    def __init__(self, index: Any, top_k: int = 10, mode: str | None = None) -> None:
        search_of(top_k, mode)
        self.index = index
        self.top_k = top_k
        self.mode = mode
        self._opened: Any = None

    def warm_up(self) -> None:
        """Open the index, if it is not open."""
        if self._opened is None:
            self._opened = opened(self.index)

    def to_dict(self) -> dict[str, Any]:
        """Return what makes the component again; raises InputError for an index in memory."""
        if not isinstance(self.index, str):
            raise InputError(
                f"got a retriever over {type(self.index).__name__}; expected the folder of a saved "
                "index, which can be written to a file. Save it, and name the folder."
            )
        instance: dict[str, Any] = default_to_dict(
            self, index=self.index, top_k=self.top_k, mode=self.mode
        )
        return instance

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> HaystackRetriever:
        """Return the component that `to_dict` wrote."""
        instance: HaystackRetriever = default_from_dict(cls, data)
        return instance

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    def run(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        """Return the passages that are found for a query."""
        self.warm_up()
        k, mode = search_of(self.top_k if top_k is None else top_k, self.mode)
        hits = self._opened.search(query, k, mode)
        return {"documents": [_document(facts_of(hit), hit.passage.text) for hit in hits]}


def passages_from(retriever: Any) -> HostRetriever:
    """Return a Haystack retriever as one that `DocQA` takes.

    Args:
        retriever: A component whose `run(query=...)` returns documents; one over embeddings goes
            into a component that embeds the query, such as TextEmbeddingRetriever. It is asked as
            it was made: how many documents it finds is its own setting.

    Raises:
        InputError: For another thing.
    """
    inputs = getattr(retriever, "__haystack_input__", None)
    if inputs is None or "query" not in inputs._sockets_dict:
        raise InputError(
            f"got {type(retriever).__name__}; expected a Haystack component with the input query, "
            "such as InMemoryBM25Retriever."
        )

    def find(query: str, k: int) -> list[ProgressCallback]:
        if hasattr(retriever, "warm_up"):
            retriever.warm_up()
        return [_summary(document) for document in retriever.run(query=query)["documents"]]

    return HostRetriever(find)


def _summary(document: Any) -> ProgressCallback:
    """Return a document of Haystack, or a text."""
    if isinstance(document, str):
        return document, 0.0, {}
    if not isinstance(document, Document) or document.content is None:
        what = "one without text" if isinstance(document, Document) else type(document).__name__
        raise InputError(f"got {what} among the documents; expected Haystack's documents of text.")
    meta = {"name": document.meta.get("file_path"), **document.meta}
    return document.content, float(document.score or 0.0), meta


def _document(facts: Mapping[str, Any], text: str) -> Document:
    meta = {name: value for name, value in facts.items() if name != "score"}
    return Document(content=text, meta=meta, score=facts["score"])


def _message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates read it; raises InputError for what is no text."""
    if not isinstance(message, ChatMessage):
        raise InputError(f"got {type(message).__name__} as a message; expected a ChatMessage.")
    if message.images or message.files:
        raise InputError(
            "got a message with images or files; expected text alone: this engine reads text."
        )
    instance: dict[str, Any] = message.to_openai_dict_format(require_tool_call_ids=False)
    return instance


def _last(writer: HostWriter, text: Generation, info: ComponentInfo) -> StreamingChunk:
    meta = {"model": writer.name, "usage": writer.usage(text)}
    return StreamingChunk(
        "", meta=meta, component_info=info, index=0, finish_reason=text.finish_reason
    )


def _chunk(writer: HostWriter, number: int, piece: str, info: ComponentInfo) -> StreamingChunk:
    meta = {"model": writer.name}
    return StreamingChunk(piece, meta=meta, component_info=info, index=0, start=number == 0)


async def _call(callback: StreamingCallbackT, chunk: StreamingChunk) -> None:
    """Call a callback, which may be a coroutine or not."""
    result = callback(chunk)
    if inspect.isawaitable(result):
        await result


def _replies(
    writer: HostWriter, job: Job, texts: Sequence[Generation]
) -> dict[str, list[ChatMessage]]:
    replies = []
    for number, text in enumerate(texts):
        facts = writer.metadata(job, text)
        facts["model"] = facts.pop("model_name")
        meta = {**facts, "index": number, "usage": writer.usage(text)}
        replies.append(ChatMessage.from_assistant(text.text, meta=meta))
    return {"replies": replies}
