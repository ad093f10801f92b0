"""Haystack: a chat generator.

    pipeline.add_component("llm", RagspecChatGenerator(model="smollm2"))
    pipeline.run({"llm": {"messages": [ChatMessage.from_user("Name three rivers.")]}})

Written against haystack-ai 3.
"""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from inspect import isawaitable
from typing import Any

from ragspec.adapters import writer
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.pipelines.openai import read_settings
from ragspec.registry import expect_known, optional_packages

with optional_packages():
    from haystack import Document, component, default_to_dict
    from haystack.dataclasses import ChatMessage, ComponentInfo, StreamingCallbackT, StreamingChunk
    from haystack.dataclasses.streaming_chunk import select_streaming_callback
    from haystack.tools import ToolsType
    from haystack.utils import deserialize_callable, serialize_callable


@component
class RagspecChatGenerator:
    """A chat generator that drafts from its prompt, from documents and from any other source.

    Args:
        model: Name or path, loaded by the first run; or pass `engine`, which cannot be saved.
        generation_kwargs: The settings of a call, see `HostModel`.
        streaming_callback: Called with each piece of text; needs n=1.
        settings: chat_template, drafter, draft_model, budget, max_batch_size, see `HostModel`.

    Raises:
        InputError, SamplingError: A setting is invalid. Loading raises the errors of `Engine`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: Engine | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        **settings: Any,
    ) -> None:
        expect_known("setting", settings, writer.SETTINGS)
        self.settings = {"model": model, "engine": engine, **settings}
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback = streaming_callback
        self._writer: writer.HostWriter | None = None
        read_settings(self.generation_kwargs)
        if model is None or engine is not None:
            self.warm_up()  # loads nothing; contradictions are errors at once

    def warm_up(self) -> writer.HostWriter:
        """Load the model if it is not loaded, and return what writes with it."""
        self._writer = self._writer or writer.HostWriter(**self.settings)
        return self._writer

    def to_dict(self) -> dict[str, object]:
        """Return the component for Haystack, which refuses to save an object such as an engine."""
        callback = self.streaming_callback and serialize_callable(self.streaming_callback)
        settings = {"generation_kwargs": self.generation_kwargs, "streaming_callback": callback}
        return dict(default_to_dict(self, **self.settings, **settings))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RagspecChatGenerator":
        """Return the component that `to_dict` wrote."""
        settings = dict(data.get("init_parameters", {}))
        callback = settings.pop("streaming_callback", None)
        return cls(streaming_callback=callback and deserialize_callable(callback), **settings)

    @component.output_types(replies=list[ChatMessage])  # type: ignore[untyped-decorator]
    def run(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        documents: list[Document] | None = None,
        tools: ToolsType | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer a conversation.

        Args:
            messages: The conversation, or the text of a user's turn.
            documents: Documents to draft from and to cite, whether or not they are in the prompt.
            tools: None or empty; other components pass it.

        Returns:
            `replies`, as many as n; `meta` has finish reason, usage, acceptance and citations.

        Raises:
            InputError, SamplingError, PromptTooLongError: As for `Engine.generate`.
            UnsupportedModelError: There is no chat template.
        """
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, False)
        job = self._job(messages, generation_kwargs, documents, tools)
        if callback is None:
            return _replies(self.warm_up().write(job))
        with closing(self.warm_up().stream(job)) as replies:
            for reply in replies:
                callback(self._chunk(reply))
        return _replies([reply])

    @component.output_types(replies=list[ChatMessage])  # type: ignore[untyped-decorator]
    async def run_async(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        documents: list[Document] | None = None,
        tools: ToolsType | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer a conversation as `run` does; a cancelled call ends its texts."""
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, True)
        job = await asyncio.to_thread(self._job, messages, generation_kwargs, documents, tools)
        if callback is None:
            return _replies(await writer.in_thread("write")(self.warm_up(), job))
        async for reply in writer.pulled(self.warm_up().stream(job)):
            if isawaitable(done := callback(self._chunk(reply))):
                await done
        return _replies([reply])

    def _job(
        self,
        messages: list[ChatMessage] | str,
        settings: dict[str, Any] | None,
        documents: list[Document] | None,
        tools: ToolsType | None,
    ) -> writer.Job:
        if tools:
            raise InputError(writer.NO_TOOLS)
        request = read_settings(self.generation_kwargs, settings, {"documents": documents})
        turns = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
        ids = {"require_tool_call_ids": False}
        turns = [t.to_openai_dict_format(**ids) if isinstance(t, ChatMessage) else t for t in turns]
        return self.warm_up().chat(turns, request)

    def _chunk(self, reply: writer.HostReply) -> StreamingChunk:
        meta, ends = {"model": self.warm_up().name, **reply.facts}, reply.facts.get("finish_reason")
        place = {"index": 0, "start": reply.text == reply.delta, "finish_reason": ends}
        return StreamingChunk(reply.delta, meta, ComponentInfo.from_component(self), **place)


def _replies(texts: Sequence[writer.HostReply]) -> dict[str, list[ChatMessage]]:
    return {"replies": [ChatMessage.from_assistant(each.text, meta=each.facts) for each in texts]}
