"""LlamaIndex: an LLM.

    llm = RagspecLLM(model="smollm2")
    llm.chat([ChatMessage(role="user", content="Name three rivers.")])
    index.as_query_engine(llm=llm, streaming=True)

Written against llama-index-core 0.14. A model with a chat template reads prompts as a user's turn;
any other continues the prompt, and a conversation becomes one by `messages_to_prompt`.
"""

from collections.abc import Sequence

from ragspec.adapters.writer import HostModel, HostReply, Job, in_thread
from ragspec.errors import InputError
from ragspec.registry import optional_packages

with optional_packages():
    from llama_index.core import llms
    from llama_index.core.base.llms import generic_utils
    from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW, DEFAULT_NUM_OUTPUTS
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

BOOKKEEPING = frozenset({"formatted", "tool_choice", "tools"})  # LlamaIndex's own keywords


class RagspecLLM(HostModel, llms.CustomLLM):  # type: ignore[misc]
    """A language model; for its settings see `HostModel`.

    `additional_kwargs` of a response has acceptance figures, citations and usage.
    """

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in LlamaIndex."""
        return "RagspecLLM"

    @property
    def metadata(self) -> llms.LLMMetadata:
        """The sizes by which LlamaIndex plans prompts; it leaves `num_output` tokens free."""
        return llms.LLMMetadata(
            context_window=self._writer.engine.target.max_length or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens or DEFAULT_NUM_OUTPUTS,
            is_chat_model=self._writer.is_chat,
            model_name=self._writer.name,
        )

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def chat(self, messages: Sequence[llms.ChatMessage], **kwargs: object) -> llms.ChatResponse:
        """Return the answer to a conversation."""
        return _response(self._writer.write(self._job(messages, kwargs, False))[0])

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def stream_chat(
        self, messages: Sequence[llms.ChatMessage], **kwargs: object
    ) -> llms.ChatResponseGen:
        """Yield the answer to a conversation as it grows."""
        return (_response(each) for each in self._writer.stream(self._job(messages, kwargs, False)))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def complete(
        self, prompt: str, formatted: bool = False, **kwargs: object
    ) -> llms.CompletionResponse:
        """Continue a prompt; with `formatted`, without the chat template."""
        reply = self._writer.write(self._job(prompt, kwargs, formatted))[0]
        return generic_utils.chat_response_to_completion_response(_response(reply))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: object
    ) -> llms.CompletionResponseGen:
        """Yield the continuation of a prompt as it grows."""
        replies = self._writer.stream(self._job(prompt, kwargs, formatted))
        return generic_utils.stream_chat_response_to_completion_response(map(_response, replies))

    achat, acomplete = in_thread("chat"), in_thread("complete")
    astream_chat, astream_complete = in_thread("stream_chat"), in_thread("stream_complete")

    def _job(
        self, prompt: str | Sequence[llms.ChatMessage], settings: dict[str, object], formatted: bool
    ) -> Job:
        request = self.request(settings, BOOKKEEPING)
        if request.sampling.n > 1:
            raise InputError(f"got n={request.sampling.n}; expected n=1: LlamaIndex takes one.")
        if isinstance(prompt, str) and self._writer.is_chat and not formatted:
            prompt = [llms.ChatMessage(role=llms.MessageRole.USER, content=prompt)]
        if not isinstance(prompt, str):
            messages = [_read_message(each) for each in prompt]
            if self._writer.is_chat:
                return self._writer.chat(messages, request)
            self._writer.read(messages)  # for its errors
            prompt = self.messages_to_prompt(prompt)
        elif not formatted:
            prompt = self.completion_to_prompt(prompt)
        return self._writer.complete(str(prompt), request)


def _read_message(message: llms.ChatMessage) -> dict[str, object]:
    """Return a message in OpenAI's form, without thoughts; pictures and the like are parts."""
    kinds = {block.block_type for block in message.blocks} - {"text", "thinking", "tool_call"}
    parts = [{"type": block.block_type} for block in message.blocks] if kinds else None
    calls = []
    for block in message.blocks:
        if block.block_type == "tool_call":
            function = {"name": block.tool_name, "arguments": block.tool_kwargs}
            calls.append({"type": "function", "id": block.tool_call_id, "function": function})
    turn = {"role": str(message.role.value), "content": parts or message.content}
    return {**turn, "tool_calls": calls or message.additional_kwargs.get("tool_calls")}


def _response(reply: HostReply) -> llms.ChatResponse:
    """Return an assistant's turn, with token counts under the names that LlamaIndex reads."""
    facts = {**reply.facts, **reply.facts.get("usage", {})}
    return llms.ChatResponse(
        message=llms.ChatMessage(role=llms.MessageRole.ASSISTANT, content=reply.text),
        delta=reply.delta,
        additional_kwargs=facts,
        raw=facts or None,
    )
