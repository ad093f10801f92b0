"""Haystack: a chat generator.

    pipeline.add_component("llm", RagspecChatGenerator(model="smollm2"))
    pipeline.run({"llm": {"messages": [ChatMessage.from_user("Name three rivers.")]}})

Written against haystack-ai 3, whose asynchronous pipelines run this component in threads.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from ragspec.adapters.passages import hits_of
from ragspec.adapters.writer import HostWriter, Job
from ragspec.errors import InputError
from ragspec.pipelines.openai import read_settings
from ragspec.registry import for_extra
from ragspec.reports.generation import Generation

try:
    from haystack import Document, component, default_to_dict
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
    """A chat generator that drafts from its prompt, from documents and from any other source.

    Args:
        model: Name or path, loaded by `warm_up` or by the first run. Alternatively pass an engine;
            a pipeline with one cannot be saved. Concurrent runs share it.
        generation_kwargs: temperature (0, the default, is greedy), top_p, top_k, min_p, max_tokens,
            seed, stop, n, penalties, logprobs, top_logprobs, prediction, tenant.
        chat_template: Jinja source, for models without a chat template.
        settings: `drafter`, `draft_model`, `budget` and `max_batch_size` (see `Engine`), which need
            `model`.

    Raises:
        InputError, SamplingError: Settings contradict each other or are out of range. Loading
            raises the errors of `Engine`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: Any = None,
        chat_template: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        **settings: Any,
    ) -> None:
        read_settings(generation_kwargs or {})
        self.model = model
        self.chat_template = chat_template
        self.generation_kwargs = dict(generation_kwargs or {})
        self.streaming_callback = streaming_callback
        self.settings = settings
        self._engine = engine
        self._writer: HostWriter | None = None
        if model is None or engine is not None:
            self.warm_up()  # loads nothing; contradictions are errors at once

    def warm_up(self) -> None:
        """Load the model if it is not loaded."""
        if self._writer is None:
            template = self.chat_template
            self._writer = HostWriter(self.model, self._engine, template=template, **self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the component as JSON types; raise InputError for one with an engine."""
        plain = all(isinstance(value, str | int | None) for value in self.settings.values())
        if self.model is None or not plain:
            raise InputError(
                "got a generator with an object in it (engine, drafter or budget); expected "
                "names alone, which can be written to a file. Make it with model=NAME."
            )
        callback = self.streaming_callback
        record: dict[str, Any] = default_to_dict(
            self,
            model=self.model,
            chat_template=self.chat_template,
            generation_kwargs=self.generation_kwargs,
            streaming_callback=None if callback is None else serialize_callable(callback),
            **self.settings,
        )
        return record

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RagspecChatGenerator:
        """Return the component that `to_dict` wrote."""
        settings = dict(data.get("init_parameters", {}))
        if settings.get("streaming_callback"):
            settings["streaming_callback"] = deserialize_callable(settings["streaming_callback"])
        return cls(**settings)

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

        Args:
            messages: The conversation, or the text of a user's turn.
            streaming_callback: Called with each piece of text; needs n=1.
            documents: Documents to draft from and to cite, whether or not they are in the prompt.

        Returns:
            `replies`, as many as n; `meta` has finish reason, usage, acceptance and citations.

        Raises:
            InputError, SamplingError: A message, document or setting is invalid.
            PromptTooLongError: The conversation does not fit the context.
            UnsupportedModelError: There is no chat template.
        """
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=False
        )
        self.warm_up()
        assert self._writer is not None
        request = read_settings(self.generation_kwargs, generation_kwargs or {})
        hits = hits_of([*request.documents, *(documents or ())])
        if isinstance(messages, str):
            messages = [ChatMessage.from_user(messages)]
        job = self._writer.chat([_read_message(m) for m in messages], request, hits)
        if callback is None:
            texts = self._writer.write(job)
        else:
            texts = [_stream(self._writer, job, callback, ComponentInfo.from_component(self))]
        return {"replies": [_reply(self._writer, job, n, text) for n, text in enumerate(texts)]}


def _stream(
    writer: HostWriter, job: Job, callback: StreamingCallbackT, info: ComponentInfo
) -> Generation:
    """Write a text, call the callback with each piece, and return the generation."""
    meta: dict[str, Any] = {"model": writer.name}
    with closing(writer.stream(job)) as chunks:
        for number, piece in enumerate(chunks):
            callback(StreamingChunk(piece, meta, info, index=0, start=number == 0))
    meta = {**meta, "usage": writer.metadata(job, chunks.result)["usage"]}
    reason: Any = chunks.result.finish_reason
    callback(StreamingChunk("", meta, info, index=0, finish_reason=reason))
    return chunks.result


def _reply(writer: HostWriter, job: Job, number: int, text: Generation) -> ChatMessage:
    facts = writer.metadata(job, text)
    meta = {**facts, "model": facts.pop("model_name"), "index": number}
    return ChatMessage.from_assistant(text.text, meta=meta)


def _read_message(message: Any) -> dict[str, Any]:
    """Return a message as chat templates read it; raise InputError for parts without text."""
    if not isinstance(message, ChatMessage):
        raise InputError(f"got {type(message).__name__} as a message; expected a ChatMessage.")
    if message.images or message.files:
        raise InputError(
            "got a message with images or files; expected text alone: this engine reads text."
        )
    turn: dict[str, Any] = message.to_openai_dict_format(require_tool_call_ids=False)
    return turn
