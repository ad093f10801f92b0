"""LangChain: a chat model, a retriever over our index, and LangChain's retrievers for `DocQA`.

    llm = ChatRagspec(model="smollm2", temperature=0.7)
    llm.invoke("Name three rivers.").response_metadata["speculative_decoding"]
    llm.bind(documents=retriever.invoke(question)).stream(messages)

Written against langchain-core 1.x. Tools are not bound and schemas not enforced: a model says what
it says, and its text is what `invoke` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from ragspec.adapters.writer import HostWriter, Job
from ragspec.engine.output import Generation
from ragspec.errors import InputError
from ragspec.registry import for_extra

try:
    from langchain_core.documents import Document
    from langchain_core.language_models.chat_models import BaseChatModel, LangSmithParams
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        ToolMessage,
        convert_to_openai_messages,
    )
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.retrievers import BaseRetriever
    from pydantic import ConfigDict, Field, PrivateAttr
except ModuleNotFoundError as error:
    raise for_extra(error) from error

# Keywords that LangChain passes on to a model for its own bookkeeping.
_OF_LANGCHAIN = frozenset({"stream", "stream_usage", "ls_structured_output_format"})


class ChatRagspec(BaseChatModel):  # type: ignore[misc]
    """A chat model that drafts from its prompt, from documents and from whatever else is named.

    Attributes:
        model: A name or path; engine or pool: one that is there already, in its place. A pool lets
            concurrent calls (`batch`, `abatch`, several chains) share the device;
        max_batch_size: Makes one over the model.
        drafter, draft_model, budget: See `Engine`, with model alone.
        chat_template: Jinja, for models that come without one. The sampling fields may be given to
            every call and to `bind`, too, and further ones: n, logprobs, top_logprobs, prediction,
            tenant (of a pool), and documents, texts or LangChain's documents that are drafted from
            and cited. Documents that a tool returned as its artifact are taken by themselves.
            temperature 0, the default, is greedy.

    Raises:
        InputError: For settings that contradict each other.
        UnsupportedModelError: For messages without a chat template, and the errors of `Engine`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str | None = None
    engine: Any = Field(default=None, exclude=True, repr=False)
    pool: Any = Field(default=None, exclude=True, repr=False)
    max_batch_size: int = 0
    drafter: Any = "auto"
    draft_model: Any = None
    budget: Any = "auto"
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

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.SETTINGS}

    @property
    def _llm_type(self) -> str:
        return "ragspec"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What tells texts of one such model from those of another, for LangChain's caches."""
        return {**self._settings, "model": self._writer.name, "chat_template": self.chat_template}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "ragspec"
        params["ls_model_name"] = self._writer.name
        return params

    def close(self) -> None:
        """End the pool that `max_batch_size` made, if any."""
        self._writer.close()

    def _job(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, inputs: dict[str, Any]
    ) -> Job:
        """Return what is to be written; raises InputError."""
        if inputs.get("tools") or inputs.get("functions"):
            raise InputError("got tools; expected none, as texts are not parsed for calls of them.")
        selected = {name: value for name, value in inputs.items() if name not in _OF_LANGCHAIN}
        request = read_settings(self._settings, selected, stop=stop)
        message = [*map(_summary, request.documents), *map(_summary, _artifacts(messages))]
        return self._writer.chat(
            convert_to_openai_messages(list(messages)), request, hits_of(message)
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        job = self._job(messages, stop, kwargs)
        texts = self._writer.write(job)
        instance = [
            ChatGeneration(
                message=AIMessage(
                    content=text.text,
                    response_metadata=self._facts(job, text),
                    usage_metadata=self._usage(text),
                ),
                generation_info={"finish_reason": text.finish_reason},
            )
            for text in texts
        ]
        return ChatResult(generations=instance, llm_output={"model_name": self._writer.name})

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        job = self._job(messages, stop, kwargs)
        chunks = self._writer.stream(job)
        try:
            for piece in chunks:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            chunks.close()
        text = chunks.result
        last = AIMessageChunk(
            content="",
            response_metadata=self._facts(job, text),
            usage_metadata=self._usage(text),
            chunk_position="last",
        )
        info = {"finish_reason": text.finish_reason}
        yield ChatGenerationChunk(message=last, generation_info=info)

    def _facts(self, job: Job, text: Generation) -> dict[str, Any]:
        return {**self._writer.metadata(job, text), "model_provider": "ragspec"}

    def _usage(self, text: Generation) -> UsageMetadata:
        return UsageMetadata(
            input_tokens=len(text.prompt_tokens),
            output_tokens=len(text.tokens),
            total_tokens=len(text.prompt_tokens) + len(text.tokens),
            input_token_details={"cache_read": text.report.cached_tokens},
        )


class LangChainRetriever(BaseRetriever):  # type: ignore[misc]
    """Our passages as LangChain's documents, best first.

    Attributes:
        index: A PassageIndex, or the folder that its `save` wrote.
        k: Passages.
        mode: "dense", "sparse", "fused", None for the best that the index can do. metadata of a
            document: source, name, title, start and end (characters of the source's text), page,
            score.

    Raises:
        InputError, StoreError: What is wrong, and a remedy.
    """

    index: Any
    k: int = 5
    mode: str | None = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        search_of(self.k, self.mode)
        self.index = opened(self.index)

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any = None, **kwargs: Any
    ) -> list[Document]:
        k, mode = search_of(kwargs.pop("k", self.k), kwargs.pop("mode", self.mode))
        if kwargs:
            raise InputError(f"got {', '.join(kwargs)}; expected k, mode or nothing.")
        hits = self.index.search(query, k, mode)
        return [Document(page_content=hit.passage.text, metadata=facts_of(hit)) for hit in hits]


def passages_from(retriever: Any) -> HostRetriever:
    """Return a LangChain retriever as one that `DocQA` takes; raises InputError for another thing.

    It is asked as it was made: how many documents it finds is its own setting.
    """
    if not isinstance(retriever, BaseRetriever):
        raise InputError(
            f"got {type(retriever).__name__}; expected a LangChain retriever, such as "
            "vectorstore.as_retriever()."
        )
    return HostRetriever(lambda query, k: map(_summary, retriever.invoke(query)))


def _summary(document: Any) -> ProgressCallback:
    """Return a document of LangChain, or a text."""
    if isinstance(document, str):
        return document, 0.0, {}
    if not isinstance(document, Document):
        raise InputError(
            f"got {type(document).__name__} among the documents; expected texts or LangChain's "
            "documents."
        )
    score = document.metadata.get("score")
    return (
        document.page_content,
        float(score) if isinstance(score, int | float) else 0.0,
        document.metadata,
    )


def _artifacts(messages: Iterable[BaseMessage]) -> Iterator[Document]:
    """Yield the documents that tools returned beside their words."""
    for message in messages:
        result = message.artifact if isinstance(message, ToolMessage) else None
        if isinstance(result, list | tuple):
            yield from (each for each in result if isinstance(each, Document))
