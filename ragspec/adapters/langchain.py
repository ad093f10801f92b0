"""LangChain: a chat model.

    llm = ChatRagspec(model="smollm2", temperature=0.7)
    llm.invoke("Name three rivers.").response_metadata["speculative_decoding"]
    llm.bind(documents=documents).stream(messages)

Written against langchain-core 1.x. Tools and schemas are not enforced: `invoke` returns text.
"""

from collections.abc import Iterator, Sequence

from ragspec.adapters.writer import HostModel, HostReply, Job, in_thread
from ragspec.engine.plain_text import encode_text
from ragspec.engine.prompts import well_formed
from ragspec.registry import optional_packages

with optional_packages():
    from langchain_core import messages as chat
    from langchain_core.callbacks import CallbackManagerForLLMRun
    from langchain_core.language_models.chat_models import BaseChatModel, LangSmithParams
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

# Keywords that LangChain passes on to a model for its own bookkeeping.
BOOKKEEPING = frozenset({"stream", "stream_usage", "ls_structured_output_format"})


class ChatRagspec(HostModel, BaseChatModel, extra="forbid"):  # type: ignore[misc]
    """A chat model; for its settings see `HostModel`."""

    @property
    def _llm_type(self) -> str:
        return "ragspec"

    @property
    def _identifying_params(self) -> dict[str, object]:
        """The settings that identify the model in LangChain's caches."""
        return {**self.settings, **self._writer.identity}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, by which LangChain counts and trims."""
        if self.custom_get_token_ids is not None:
            return list(self.custom_get_token_ids(text))
        return list(encode_text(self._writer.engine.tokenizer, well_formed(text)).ids)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: object) -> LangSmithParams:
        stops = self.request({}, (), stop).options.get("stop")
        params = super()._get_ls_params(stop=stops, **kwargs)
        return {**params, "ls_provider": "ragspec", "ls_model_name": self._writer.name}

    def _job(
        self, messages: Sequence[chat.BaseMessage], stop: list[str] | None, more: dict[str, object]
    ) -> Job:
        turns = chat.convert_to_openai_messages(list(messages))
        return self._writer.chat(turns, self.request(more, BOOKKEEPING, stop))

    def _generate(
        self,
        messages: list[chat.BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: object,
    ) -> ChatResult:
        generations = [
            ChatGeneration(
                message=chat.AIMessage(content=reply.text, **_figures(reply)),
                generation_info={"finish_reason": reply.facts["finish_reason"]},
            )
            for reply in self._writer.write(self._job(messages, stop, kwargs))
        ]
        return ChatResult(generations=generations, llm_output={"model_name": self._writer.name})

    _agenerate = in_thread("_generate")

    def _stream(
        self,
        messages: list[chat.BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: object,
    ) -> Iterator[ChatGenerationChunk]:
        for reply in self._writer.stream(self._job(messages, stop, kwargs)):
            figures = {"chunk_position": "last", **_figures(reply)} if reply.facts else {}
            info = {"finish_reason": reply.facts["finish_reason"]} if reply.facts else None
            message = chat.AIMessageChunk(content=reply.delta, **figures)
            yield ChatGenerationChunk(message=message, generation_info=info)


def _figures(reply: HostReply) -> dict[str, object]:
    """Return the metadata and the usage of a message."""
    facts = {**reply.facts, "model_provider": "ragspec"}
    facts["model_name"], counts = facts.pop("model"), facts.pop("usage")
    tokens = UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
        input_token_details={"cache_read": counts["prompt_tokens_details"]["cached_tokens"]},
    )
    return {"response_metadata": facts, "usage_metadata": tokens}
