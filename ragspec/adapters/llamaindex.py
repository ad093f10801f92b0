"""LlamaIndex: an LLM.

    llm = RagspecLLM(model="smollm2")
    llm.chat([ChatMessage(role="user", content="Name three rivers.")])
    index.as_query_engine(llm=llm, streaming=True)

Written against llama-index-core 0.14. A model with a chat template reads prompts as a user's turn;
any other continues the prompt, and a conversation becomes one by `messages_to_prompt`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from typing import Any

from ragspec.adapters.passages import hits_of
from ragspec.adapters.writer import Job, in_thread
from ragspec.errors import InputError
from ragspec.registry import for_extra
from ragspec.reports.generation import Generation

try:
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
        TextBlock,
    )
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.custom import CustomLLM

    from ragspec.adapters.host_model import HostModel  # needs pydantic, which the host brings
except ModuleNotFoundError as error:
    raise for_extra(error) from error

BOOKKEEPING = frozenset({"formatted", "tool_choice", "tools"})  # LlamaIndex's own keywords


class RagspecLLM(HostModel, CustomLLM):  # type: ignore[misc]
    """A language model; for its settings see `HostModel`.

    `additional_kwargs` of a response has acceptance figures, citations and usage.
    """

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in LlamaIndex."""
        return "RagspecLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The sizes by which LlamaIndex plans prompts; it leaves `num_output` tokens free."""
        sizes = {
            "context_window": self._writer.engine.target.max_length,
            "num_output": self.max_tokens,
        }
        return LLMMetadata(
            is_chat_model=self._writer.is_chat,
            model_name=self._writer.name,
            **{name: size for name, size in sizes.items() if size is not None},
        )

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a conversation."""
        return _as_chat(self._write(self._job(messages, **kwargs)))

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield the answer to a conversation as it grows."""
        return (_as_chat(each) for each in self._stream(self._job(messages, **kwargs)))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a prompt; with `formatted`, without the chat template."""
        return self._write(self._job(prompt, formatted, **kwargs))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Yield the continuation of a prompt as it grows."""
        return self._stream(self._job(prompt, formatted, **kwargs))

    achat, acomplete = in_thread("chat"), in_thread("complete")
    astream_chat, astream_complete = in_thread("stream_chat"), in_thread("stream_complete")

    def _job(
        self, prompt: str | Sequence[ChatMessage], formatted: bool = False, **settings: Any
    ) -> Job:
        request = self.request(settings, BOOKKEEPING)
        if request.sampling.n > 1:
            raise InputError(f"got n={request.sampling.n}; expected n=1: LlamaIndex takes one.")
        hits = hits_of(request.documents)
        if isinstance(prompt, str) and self._writer.is_chat and not formatted:
            prompt = [ChatMessage(role=MessageRole.USER, content=prompt)]
        if not isinstance(prompt, str) and self._writer.is_chat:
            return self._writer.chat([_read_message(each) for each in prompt], request, hits)
        if not isinstance(prompt, str):
            prompt = str(self.messages_to_prompt(prompt))
        elif not formatted and self.completion_to_prompt is not None:
            prompt = str(self.completion_to_prompt(prompt))
        return self._writer.complete(prompt, request, hits)

    def _write(self, job: Job) -> CompletionResponse:
        text = self._writer.write(job)[0]
        return CompletionResponse(text=text.text, additional_kwargs=self._figures(job, text))

    def _stream(self, job: Job) -> Generator[CompletionResponse]:
        text = ""
        with closing(self._writer.stream(job)) as chunks:
            for piece in chunks:
                text += piece
                yield CompletionResponse(text=text, delta=piece)
        facts = self._figures(job, chunks.result)
        yield CompletionResponse(text=text, delta="", additional_kwargs=facts)

    def _figures(self, job: Job, text: Generation) -> dict[str, Any]:
        """Return the figures of a text, with token counts under the names that LlamaIndex reads."""
        facts = self._writer.metadata(job, text)
        counts = {k: v for k, v in facts["usage"].items() if isinstance(v, int)}
        return {**facts, **counts}


def _read_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates read it; raise InputError for parts without text."""
    others = {type(b).__name__ for b in message.blocks if not isinstance(b, TextBlock)}
    if others:
        raise InputError(
            f"got a message with {', '.join(sorted(others))}; expected text alone: this engine "
            "reads text."
        )
    turn = {"role": str(message.role.value), "content": message.content or ""}
    calls = message.additional_kwargs.get("tool_calls")
    return {**turn, "tool_calls": list(calls)} if isinstance(calls, Iterable) else turn


def _as_chat(response: CompletionResponse) -> ChatResponse:
    """Return a completion as an assistant's turn."""
    facts = response.additional_kwargs
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        additional_kwargs=facts,
        raw=facts or None,
    )
