"""Generation of texts for a host, from messages to generations with their figures.

The chat template renders a conversation as a whole. Its documents are drafted from and cited,
whether or not they are in the prompt.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from inspect import signature
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_serializer

from ragspec.adapters.passages import hits_of
from ragspec.drafters.base import SourceText
from ragspec.engine.engine import OPTIONS, Engine
from ragspec.engine.plain_text import Message, encode_text, render_chat
from ragspec.engine.prompts import read_message, well_formed
from ragspec.engine.request import Options, expect_engine
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.pipelines.answering.citations import find_evidence
from ragspec.pipelines.answering.prompt import Prompt, placed
from ragspec.pipelines.answering.template import is_chat
from ragspec.pipelines.openai import NAMES, GenerateRequest, OpenAIReply, figures, read_settings
from ragspec.registry import expect_known
from ragspec.reports.generation import Generation, place_tokens
from ragspec.retrievers.search.sentences import rank_sentences
from ragspec.sampling.settings import Sampling

T = TypeVar("T")
TOOL_ROLES = ("tool", "function")  # roles whose texts a template may leave out
DEFAULTS = {p.name: p.default for p in signature(Engine.from_pretrained).parameters.values()}
SETTINGS = DEFAULTS.keys() - {"model", "options"} | {*OPTIONS, "chat_template"}
NO_TOOLS = "got tools; expected none, as texts are not parsed for calls of them."
PER_STEP = ("per_step_accepted", "per_step_drafted")  # too long for metadata
# Done once the asynchronous call ends, or is cancelled, whose thread reads this.
_CALL_END: ContextVar[Future[None] | None] = ContextVar("call_end", default=None)


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, the arguments of `Engine.generate`, and the question over its passages."""

    prompt: Prompt
    sampling: Sampling
    options: Options
    question: str


@dataclass(frozen=True, slots=True)
class HostReply:
    """A text for a host, or its state in a stream.

    Attributes:
        text: All of it so far.
        delta: What this state adds to the one before.
        facts: Its figures as JSON types once it has ended, else empty. `speculative_decoding` has
            acceptance figures under vLLM's names; for `citations`, `support` and `sentences` see
            `Answer`.
    """

    text: str
    delta: str
    facts: dict[str, Any] = field(default_factory=dict)


class HostWriter:
    """Writes texts for a host, with an engine that concurrent calls share.

    Args:
        model: Name or path; exactly one of model and engine is required.
        chat_template: Jinja source in place of the tokenizer's template.
        settings: Arguments of `Engine.from_pretrained`, only with `model`.

    Raises:
        InputError: Arguments contradict each other; also the errors of `Engine`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        engine: Engine | None = None,
        *,
        chat_template: str | None = None,
        **settings: Any,
    ) -> None:
        if (model is None) == (engine is None):
            raise InputError(
                f"got {'neither' if model is None else 'both'} of model and engine; expected one, "
                "such as model='starter'."
            )
        expect_known("setting", settings, SETTINGS)
        changed = {k: value for k, value in settings.items() if value != DEFAULTS.get(k)}
        if changed and engine is not None:
            raise InputError(
                f"got {', '.join(changed)} with an engine, which has its own. Leave them out, or "
                "name the model."
            )
        self.engine = engine or Engine.from_pretrained(os.fspath(model or ""), **changed)
        expect_engine(self.engine)
        self._template = chat_template
        self.name = str(model or getattr(self.engine.model.config, "name_or_path", "") or "")
        # The key of a cache of texts, unique if an engine or an object is passed.
        named = model is not None and all(isinstance(v, str | int | None) for v in changed.values())
        target = f"{type(self.engine.target).__name__} {self.engine.target.dtype}"
        self.identity = {"model": self.name, "chat_template": chat_template, "target": target}
        self.identity |= changed if named else {"engine": uuid.uuid4().hex}

    @property
    def is_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._template is not None or is_chat(self.engine.tokenizer)

    def chat(self, messages: Sequence[Message], request: GenerateRequest) -> Job:
        """Return the job of answering messages ({"role", "content"}).

        Raises:
            InputError: There is no message, one has no text, or the template refuses them.
            UnsupportedModelError: There is no chat template.
        """
        if not self.is_chat:
            raise UnsupportedModelError(
                f"{type(self.engine.model).__name__} comes without a chat template; expected a "
                "chat model, or chat_template= with a template in Jinja."
            )
        tokenizer, turns = self.engine.tokenizer, self.read(messages)
        options = {} if self._template is None else {"chat_template": self._template}
        text = render_chat(tokenizer, turns, **options)
        spoken = [turn["content"] for turn in turns if turn["role"] in TOOL_ROLES]
        left_out = [each for each in spoken if each not in text]
        return self._job(text, request, turns[-1]["content"], left_out)

    def read(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages as turns; raise InputError if there is none, or one has no text."""
        if not messages:
            raise InputError("got no messages; expected at least one.")
        return [read_message(each, n, self.engine.tokenizer) for n, each in enumerate(messages)]

    def complete(self, prompt: str, request: GenerateRequest) -> Job:
        """Return the job of continuing a text without a template."""
        return self._job(well_formed(prompt), request)

    def _job(
        self, text: str, request: GenerateRequest, question: str = "", further: Sequence[str] = ()
    ) -> Job:
        """Return a job; documents others the prompt become texts to draft from."""
        tokenizer, hits = self.engine.tokenizer, hits_of(request.documents)
        for hit in hits:  # a host puts them into the turn
            question = question.replace(hit.passage.text, "")
        begin = getattr(tokenizer, "bos_token", None)
        if begin and not is_chat(tokenizer):  # the tokenizer adds it again
            text = text.removeprefix(begin)
        prompt = placed(tokenizer, text, hits)
        if not prompt.token_ids:
            raise InputError("the prompt is empty; expected at least one token to go on from.")
        held = {span[2] for span in prompt.spans}
        others = [(n, hit.passage.text) for n, hit in enumerate(hits) if n not in held]
        others += [(-1, each) for each in further]
        texts = [SourceText(encode_text(tokenizer, well_formed(text)).ids, n) for n, text in others]
        options: Options = {**request.options, "tenant": request.tenant}
        options |= {"spans": prompt.spans, "texts": texts}
        return Job(prompt, request.sampling, options, question)

    def write(self, job: Job) -> list[HostReply]:
        """Return the samples of a job."""
        requests, _ = self.engine.prepare([list(job.prompt.token_ids)], job.sampling, job.options)
        owner, call_end = object(), _CALL_END.get()
        with ExitStack() as stack:
            add = (closing(self.engine.add(each, owner)) for each in requests)
            handles = [*map(stack.enter_context, add)]
            if call_end is not None:
                call_end.add_done_callback(lambda _: [each.future.cancel() for each in handles])
            texts = [each.result() for each in handles]
        return [HostReply(each.text, each.text, self._facts(job, each)) for each in texts]

    def stream(self, job: Job) -> Generator[HostReply]:
        """Yield the states of one text, the last with its figures; closing it cancels the text."""
        if (n := job.sampling.n) > 1:
            raise InputError(f"got n={n}; expected n=1 in a stream. Ask for whole texts instead.")
        text = ""
        chunks = self.engine.stream(list(job.prompt.token_ids), job.sampling, **job.options)
        with closing(chunks):
            for delta in chunks:
                text += delta
                yield HostReply(text, delta)
        yield HostReply(text, "", self._facts(job, chunks.result))

    def _facts(self, job: Job, generation: Generation) -> dict[str, object]:
        report, tokenizer = generation.report, self.engine.tokenizer
        steps = report.to_dict()["speculative_decoding"]
        facts: dict[str, Any] = {
            "model": self.name,
            "index": generation.sample,
            "finish_reason": generation.finish_reason,
            "label": generation.label,
            "seed": report.seed,
            "forwards": report.forward_passes,
            "accepted_by_source": dict(report.accepted_by_source),
            "speculative_decoding": {k: v for k, v in steps.items() if k not in PER_STEP},
            "usage": figures([generation])["usage"],
        }
        if job.prompt.hits:
            sentences = tuple(rank_sentences(job.question, job.prompt.hits))
            about = job.question, generation, job.prompt, sentences
            citations, support, _ = find_evidence(*about, "")
            facts["citations"] = [asdict(citation) for citation in citations]
            facts["support"] = support
            facts["sentences"] = [each.to_dict() for each in sentences]
        if generation.logprobs is not None:
            reply = OpenAIReply(True, self.name, tokenizer)
            facts["logprobs"] = reply.logprobs(place_tokens(tokenizer, generation))
        return facts


class HostModel(BaseModel):
    """A model of LangChain or LlamaIndex that drafts from any source; its settings are fields.

    Attributes:
        model: Name or path. Alternatively pass `engine`. Concurrent calls share it.
        max_batch_size: Texts decoded in one batch; it needs `model`.
        drafter, draft_model, budget: See `Engine`; they need `model`.
        chat_template: Jinja source, for models without a chat template.
        temperature: 0, the default, is greedy. Calls take the sampling fields too, and n,
            logprobs, top_logprobs, prediction, tenant and documents, which are drafted
            from and cited.

    Raises:
        InputError, SamplingError: Settings contradict each other; also the errors of `Engine`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str | None = None
    engine: Any = Field(default=None, exclude=True, repr=False)
    max_batch_size: int | None = None
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
    stop: str | list[str] | None = None
    tenant: str | None = None
    _loaded: tuple[dict[str, object], HostWriter] | None = PrivateAttr(None)

    def __init__(self, **settings: object) -> None:
        expect_known("setting", settings, type(self).model_fields)
        super().__init__(**settings)
        # Not in a validator: pydantic would hide our errors in one of its own.
        read_settings(self.settings)
        _ = self._writer

    @field_serializer("drafter", "draft_model", "budget")
    def _saved(self, value: object) -> object:
        """Return a setting as JSON, or the text of an object, which is then refused by name."""
        parts = value if isinstance(value, list | tuple) else [value]
        return value if all(isinstance(each, str | int | None) for each in parts) else str(value)

    @property
    def _writer(self) -> HostWriter:
        """The writer of the settings, loaded again if one of them has changed."""
        fields = HostModel.model_fields
        settings: dict[str, Any] = {name: getattr(self, name) for name in fields.keys() - NAMES}
        if self._loaded is None or self._loaded[0] != settings:
            self._loaded = settings, HostWriter(**settings)
        return self._loaded[1]

    def request(
        self, per_call: Mapping[str, object], bookkeeping: Collection[str], stop: object = None
    ) -> GenerateRequest:
        """Return a call's request without the host's `bookkeeping`; raise InputError for tools."""
        if per_call.get("tools") or per_call.get("functions"):
            raise InputError(NO_TOOLS)
        named = {name: value for name, value in per_call.items() if name not in bookkeeping}
        return read_settings(self.settings, named, stop=stop)

    @property
    def settings(self) -> dict[str, object]:
        """The settings that a call may change."""
        return {name: getattr(self, name) for name in HostModel.model_fields if name in NAMES}


def in_thread(name: str) -> Any:
    """Return the asynchronous form of the method of a name; to cancel it ends its texts."""

    async def call(self: object, *args: object, **kwargs: object) -> object:
        end = Future[None]()
        token = _CALL_END.set(end)
        try:
            result = await asyncio.to_thread(getattr(self, name), *args, **kwargs)
        finally:
            _CALL_END.reset(token)
            end.set_result(None)
        return pulled(result) if isinstance(result, Iterator) else result

    return call


async def pulled(items: Iterator[T]) -> AsyncGenerator[T]:
    """Yield the items of an iterator, computed in threads so that the event loop stays free."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item
