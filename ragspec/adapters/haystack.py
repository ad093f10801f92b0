"""Haystack: a chat generator.

    pipeline.add_component("llm", RagspecChatGenerator(model="smollm2"))
    pipeline.run({"llm": {"messages": [ChatMessage.from_user("Name three rivers.")]}})

Written against haystack-ai 3, whose asynchronous pipelines run this component in threads.
"""

from contextlib import closing
from typing import Any

from ragspec.adapters.writer import NO_TOOLS, SETTINGS, HostWriter
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
        expect_known("setting", settings, SETTINGS)
        self.settings = {"model": model, "engine": engine, **settings}
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback = streaming_callback
        self._writer: HostWriter | None = None
        read_settings(self.generation_kwargs)
        if model is None or engine is not None:
            self.warm_up()  # loads nothing; contradictions are errors at once

    def warm_up(self) -> HostWriter:
        """Load the model if it is not loaded, and return what writes with it."""
        self._writer = self._writer or HostWriter(**self.settings)
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
        if tools:
            raise InputError(NO_TOOLS)
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, False)
        request = read_settings(self.generation_kwargs, generation_kwargs, {"documents": documents})
        turns = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
        ids = {"require_tool_call_ids": False}
        turns = [t.to_openai_dict_format(**ids) if isinstance(t, ChatMessage) else t for t in turns]
        writer, info = self.warm_up(), ComponentInfo.from_component(self)
        job = writer.chat(turns, request)
        if callback is None:
            texts, form = writer.write(job), ChatMessage.from_assistant
            return {"replies": [form(each.text, meta=each.facts) for each in texts]}
        with closing(writer.stream(job)) as replies:
            for number, reply in enumerate(replies):
                meta, ends = {"model": writer.name, **reply.facts}, reply.facts.get("finish_reason")
                place = {"index": 0, "start": number == 0, "finish_reason": ends}
                callback(StreamingChunk(reply.delta, meta, info, **place))
        return {"replies": [ChatMessage.from_assistant(reply.text, meta=reply.facts)]}
