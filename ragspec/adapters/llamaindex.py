"""LlamaIndex: an LLM, a retriever over our index, and LlamaIndex's retrievers for `DocQA`.

    llm = RagspecLLM(model="smollm2")
    llm.chat([ChatMessage(role="user", content="Name three rivers.")])
    index.as_query_engine(llm=llm, streaming=True)

Written against llama-index-core 0.14. A model with a chat template is asked in it, also by
`complete`, whose prompt is then a user's turn; any other goes on with the text of the prompt, and a
conversation becomes one by `messages_to_prompt`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any, ClassVar

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
from ragspec.retrievers.search.fusion import Hit

try:
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
        TextBlock,
    )
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.custom import CustomLLM
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
except ModuleNotFoundError as error:
    raise for_extra(error) from error

_TAKEN = frozenset({"formatted", "tool_choice"})  # keywords that are LlamaIndex's own


class RagspecLLM(CustomLLM):  # type: ignore[misc]
    """A model that drafts from its prompt, from documents and from whatever else is named.

    Attributes:
        model: A name or path; engine or pool: one that is there already, in its place. A pool lets
            concurrent calls share the device;
        max_batch_size: Makes one over the model.
        drafter, draft_model, budget: See `Engine`, with model alone.
        chat_template: Jinja, for models that come without one. The sampling fields may be given to
            every call, too, and further ones: logprobs, top_logprobs, prediction, tenant (of a
            pool), and documents, texts or nodes that are drafted from and cited. temperature 0, the
            default, is greedy. `additional_kwargs` of a response have the figures of acceptance,
            citations and usage.

    Raises:
        InputError: And the errors of `Engine`.
    """

    model: str | None = None
    engine: Any = Field(default=None, exclude=True, repr=False)
    pool: Any = Field(default=None, exclude=True, repr=False)
    max_batch_size: int = 0
    drafter: Any = Field(default="auto", exclude=True)
    draft_model: Any = Field(default=None, exclude=True)
    budget: Any = Field(default="auto", exclude=True)
    chat_template: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    tenant: str | None = None
    _writer: HostWriter = PrivateAttr()

    SETTINGS: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
        "max_tokens",
        "stop",
        "tenant",
    )

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Not in a validator: pydantic would hide our errors in one of its own.
        read_settings(self._settings)
        self._writer = HostWriter.of(
            self.model,
            self.engine,
            self.pool,
            template=self.chat_template,
            max_batch_size=self.max_batch_size,
            drafter=self.drafter,
            draft_model=self.draft_model,
            budget=self.budget,
        )

    @classmethod
    def class_name(cls) -> str:
        """Return the name by which LlamaIndex keeps it."""
        return "RagspecLLM"

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.SETTINGS}

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts by; num_output: what it leaves room for, at least."""
        context = self._writer.engine.target.max_length
        facts: dict[str, Any] = {} if context is None else {"context_window": context}
        if self.max_tokens is not None:
            facts["num_output"] = self.max_tokens
        return LLMMetadata(
            is_chat_model=self._writer.is_chat, model_name=self._writer.name, **facts
        )

    def close(self) -> None:
        """End the pool that `max_batch_size` made, if any."""
        self._writer.close()

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a conversation."""
        job = self._request(messages, kwargs)
        return _chatted(self._completed(job))

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Yield the answer to a conversation as it grows."""
        job = self._request(messages, kwargs)
        return (_chatted(each) for each in self._growing(job))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Return what the model writes after a prompt; formatted: whether it is taken as it is."""
        return self._completed(self._job(prompt, formatted, kwargs))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Yield what the model writes after a prompt as it grows."""
        return self._growing(self._job(prompt, formatted, kwargs))

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the answer to a conversation; the event loop goes on meanwhile."""
        return _chatted(await asyncio.to_thread(self._completed, self._request(messages, kwargs)))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Return what the model writes after a prompt; the event loop goes on meanwhile."""
        return await asyncio.to_thread(self._completed, self._job(prompt, formatted, kwargs))

    @llm_chat_callback()  # type: ignore[untyped-decorator]
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Return the answer to a conversation as it grows; the event loop goes on meanwhile."""
        job = self._request(messages, kwargs)
        return (_chatted(each) async for each in self._agrowing(job))

    @llm_completion_callback()  # type: ignore[untyped-decorator]
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Return what the model writes after a prompt as it grows; as `astream_chat`."""
        return self._agrowing(self._job(prompt, formatted, kwargs))

    def _job(self, prompt: str, formatted: bool, inputs: dict[str, Any]) -> Job:
        if self._writer.is_chat and not formatted:
            return self._request([ChatMessage(role=MessageRole.USER, content=prompt)], inputs)
        request, hits = self._read(inputs)
        if not formatted and self.completion_to_prompt is not None:
            prompt = self.completion_to_prompt(prompt)
        return self._writer.complete(prompt, request, hits)

    def _request(self, messages: Sequence[ChatMessage], inputs: dict[str, Any]) -> Job:
        if not self._writer.is_chat:
            return self._job(self.messages_to_prompt(messages), True, inputs)
        request, hits = self._read(inputs)
        return self._writer.chat([_message(each) for each in messages], request, hits)

    def _read(self, inputs: dict[str, Any]) -> tuple[Any, Any]:
        """Return what is asked for, and the documents as hits; raises InputError."""
        if inputs.get("tools"):
            raise InputError("got tools; expected none, as texts are not parsed for calls of them.")
        selected = {name: value for name, value in inputs.items() if name not in {*_TAKEN, "tools"}}
        request = read_settings(self._settings, selected)
        return request, hits_of(map(_summary, request.documents))

    def _completed(self, job: Job) -> CompletionResponse:
        if job.request.several:
            raise InputError(f"got n={job.request.sampling.n}; expected n=1: LlamaIndex takes one.")
        text = self._writer.write(job)[0]
        return CompletionResponse(text=text.text, additional_kwargs=self._facts(job, text))

    def _growing(self, job: Job) -> Generator[CompletionResponse]:
        chunks = self._writer.stream(job)

        def grow() -> Generator[CompletionResponse]:
            text = ""
            try:
                for piece in chunks:
                    text += piece
                    yield CompletionResponse(text=text, delta=piece)
            finally:
                chunks.close()
            facts = self._facts(job, chunks.result)
            yield CompletionResponse(text=text, delta="", additional_kwargs=facts)

        return grow()

    async def _agrowing(self, job: Job) -> AsyncGenerator[CompletionResponse]:
        chunks = self._writer.stream(job)
        text = ""
        async for piece in pulled(chunks):
            text += piece
            yield CompletionResponse(text=text, delta=piece)
        facts = self._facts(job, chunks.result)
        yield CompletionResponse(text=text, delta="", additional_kwargs=facts)

    def _facts(self, job: Job, text: Generation) -> dict[str, Any]:
        """Return the figures of a text; the counts of tokens by the names that LlamaIndex reads."""
        usage = self._writer.usage(text)
        counts = {name: usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")}
        named = {f"{name}_tokens": count for name, count in counts.items()}
        return {**self._writer.metadata(job, text), **named, "usage": usage}


class LlamaIndexRetriever(BaseRetriever):  # type: ignore[misc]
    """Our passages as LlamaIndex's nodes, best first.

    Args:
        index: A PassageIndex, or the folder that its `save` wrote.
        similarity_top_k: Passages.
        mode: "dense", "sparse", "fused", None for the best that the index can do. metadata of a
            node: source, name, title, start and end (characters of the source's text), page.

    Raises:
        InputError, StoreError: What is wrong, and a remedy.
    """

    def __init__(
        self, index: Any, similarity_top_k: int = 5, mode: str | None = None, **settings: Any
    ) -> None:
        self._k, self._mode = search_of(similarity_top_k, mode)
        self._index = opened(index)
        super().__init__(**settings)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self._index.search(query_bundle.query_str, self._k, self._mode)
        return [NodeWithScore(node=_node(hit), score=hit.score) for hit in hits]


def passages_from(retriever: Any) -> HostRetriever:
    """Return a LlamaIndex retriever as one that `DocQA` takes; raises InputError for another thing.

    It is asked as it was made: how many nodes it finds is its own setting.
    """
    if not isinstance(retriever, BaseRetriever):
        raise InputError(
            f"got {type(retriever).__name__}; expected a LlamaIndex retriever, such as "
            "index.as_retriever()."
        )
    return HostRetriever(lambda query, k: map(_summary, retriever.retrieve(query)))


def _summary(inputs: Any) -> ProgressCallback:
    """Return a node of LlamaIndex, with its score or without, or a text."""
    if isinstance(inputs, str):
        return inputs, 0.0, {}
    node, score = (
        (inputs.node, inputs.score) if isinstance(inputs, NodeWithScore) else (inputs, None)
    )
    if not isinstance(node, TextNode):
        raise InputError(
            f"got {type(node).__name__} among the documents; expected texts, or nodes of text."
        )
    meta = {"name": node.metadata.get("file_name"), **node.metadata}
    return node.get_content(), float(score or 0.0), meta


def _node(hit: Hit) -> TextNode:
    """Return a passage as a node, of whose metadata a prompt shows the title alone."""
    facts = {name: value for name, value in facts_of(hit).items() if name != "score"}
    silent = [name for name in facts if name != "title"]
    return TextNode(
        text=hit.passage.text,
        metadata=facts,
        excluded_llm_metadata_keys=silent,
        excluded_embed_metadata_keys=silent,
    )


def _message(message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates read it; raises InputError for what is no text."""
    strange = {type(b).__name__ for b in message.blocks if not isinstance(b, TextBlock)}
    if strange:
        raise InputError(
            f"got a message with {', '.join(sorted(strange))}; expected text alone: this engine "
            "reads text."
        )
    instance = {"role": str(message.role.value), "content": message.content or ""}
    calls = message.additional_kwargs.get("tool_calls")
    return {**instance, "tool_calls": list(calls)} if isinstance(calls, Iterable) else instance


def _chatted(response: CompletionResponse) -> ChatResponse:
    """Return a completion as an assistant's turn."""
    facts = response.additional_kwargs
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        additional_kwargs=facts,
        raw=facts or None,
    )
