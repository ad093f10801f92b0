"""A model that writes for a host: messages in, texts and their figures out.

The conversation is written into the chat template whole, as by `pipelines.chat`; documents that
came with it are drafted from, found in the prompt or not, and quotations of them are cited.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any, Self

from ragspec.adapters.requests import GenerateRequest
from ragspec.drafters.base import SourceText
from ragspec.engine.engine import Engine
from ragspec.engine.options import Options
from ragspec.engine.output import Generation, Stream
from ragspec.engine.pool import Pool
from ragspec.engine.prompts import read_message, well_formed
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.pipelines.docqa.citations import cite
from ragspec.pipelines.docqa.prompt import (
    Prompt,
    escape_special_tokens,
    placed,
    plain_ids,
    special_of,
)
from ragspec.pipelines.docqa.template import is_chat, templated
from ragspec.retrievers.search.fusion import Hit

OF_TOOLS = ("tool", "function")  # roles whose texts a template may leave out
PER_STEP = ("per_step_accepted", "per_step_drafted")  # as long as the text; not for metadata


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and what was asked of it; texts: to draft from beside the prompt."""

    prompt: Prompt
    request: GenerateRequest
    texts: tuple[SourceText, ...] = ()

    @property
    def options(self) -> Options:
        """What the engine is given with the prompt's ids."""
        return {**self.request.options, "spans": self.prompt.spans, "texts": self.texts}


class HostWriter:
    """Writes texts for a host, by an engine alone or by a pool that many callers share.

    source: an Engine, a Pool, or the path or name of a model. template: a Jinja chat template in
    place of the tokenizer's own. max_batch_size: texts in one batch; above 0 an engine serves
    through a pool of its own, which `close` ends. engine: of a model that is named, see
    `Engine.from_pretrained`. Raises InputError for what contradicts itself, and the errors of
    `Engine`.
    """

    def __init__(
        self,
        source: Engine | Pool | str | os.PathLike[str],
        *,
        template: str | None = None,
        max_batch_size: int = 0,
        **engine: Any,
    ) -> None:
        self._name = ""
        if isinstance(source, str | os.PathLike):
            self._name = os.fspath(source)
            source = Engine.from_pretrained(self._name, **engine)
        elif isinstance(source, Engine | Pool):
            _refuse(engine, f"an {type(source).__name__}")
        else:
            raise InputError(
                f"got {type(source).__name__} as a model; expected its path or name, an Engine or "
                "a Pool."
            )
        if max_batch_size and isinstance(source, Pool):
            raise InputError(
                "got max_batch_size with a Pool; expected one of them. A pool has its own."
            )
        self._owned = isinstance(source, Engine) and bool(max_batch_size)
        self.pool = source if isinstance(source, Pool) else None
        self.engine = source.engine if isinstance(source, Pool) else source
        if self.engine.tokenizer is None:
            raise InputError("got an engine without a tokenizer; expected one that has it.")
        if isinstance(source, Engine) and max_batch_size:
            self.pool = Pool(source, max_batch_size)
        self.template = template

    @classmethod
    def of(
        cls,
        model: str | os.PathLike[str] | None,
        engine: Engine | None,
        pool: Pool | None,
        *,
        template: str | None,
        max_batch_size: int,
        **settings: Any,
    ) -> Self:
        """Return a writer over the one of model, engine and pool that is given.

        settings: of a model that is named; an engine must come with those that `Engine` has by
        itself. Raises InputError for none and for several.
        """
        inputs = [each for each in (model, engine, pool) if each is not None]
        if len(inputs) != 1:
            raise InputError(
                f"got {len(inputs)} of model, engine and pool; expected one of them, such as "
                "model='starter'."
            )
        for name, value, kind in (("engine", engine, Engine), ("pool", pool, Pool)):
            if not isinstance(value, kind | None):
                raise InputError(
                    f"got {type(value).__name__} as the {name}; expected a {kind.__name__}."
                )
        if not isinstance(max_batch_size, int) or max_batch_size < 0:
            raise InputError(
                f"max_batch_size is {max_batch_size!r}; expected a whole number, 0 for no pool."
            )
        plain = signature(Engine.from_pretrained).parameters
        current = {k: v for k, v in settings.items() if v != plain[k].default}
        return cls(inputs[0], template=template, max_batch_size=max_batch_size, **current)

    @property
    def name(self) -> str:
        """The model's name as it was given, else its own, "" where it has none."""
        return self._name or str(getattr(self.engine.model.config, "name_or_path", "") or "")

    @property
    def is_chat(self) -> bool:
        """Whether there is a chat template for messages."""
        return self.template is not None or is_chat(self.engine.tokenizer)

    def close(self) -> None:
        """End the pool that this writer made; texts running are cancelled."""
        if self._owned and self.pool is not None:
            self.pool.close(cancel=True)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        request: GenerateRequest,
        hits: Sequence[Hit] = (),
    ) -> Job:
        """Return the job of answering messages ({"role", "content"}).

        hits: documents to draft from and to cite. Raises InputError for messages that are none or
        that the template refuses, UnsupportedModelError where there is no template.
        """
        if not messages:
            raise InputError("got no messages; expected at least one.")
        if not self.is_chat:
            raise UnsupportedModelError(
                f"{type(self.engine.model).__name__} comes without a chat template; expected a "
                "chat model, or chat_template= with a template in Jinja."
            )
        tokenizer = self.engine.tokenizer
        special = special_of(tokenizer)
        turns = [_disarmed(read_message(m, i), special) for i, m in enumerate(messages)]
        text = templated(tokenizer, turns, self.template)
        message = [str(turn["content"]) for turn in turns if turn["role"] in OF_TOOLS]
        return self._job(text, request, hits, [each for each in message if each not in text])

    def complete(self, prompt: str, request: GenerateRequest, hits: Sequence[Hit] = ()) -> Job:
        """Return the job of going on with a text as it is."""
        if not isinstance(prompt, str):
            raise InputError(f"got {type(prompt).__name__} as a prompt; expected a text.")
        return self._job(well_formed(prompt), request, hits)

    def _job(
        self, text: str, request: GenerateRequest, hits: Sequence[Hit], further: Sequence[str] = ()
    ) -> Job:
        """Return the job of a prompt; what of the documents it does not hold becomes texts."""
        tokenizer = self.engine.tokenizer
        begin = getattr(tokenizer, "bos_token", None)
        if begin and not is_chat(tokenizer):  # then the tokenizer writes it
            text = text.removeprefix(begin)
        prompt = placed(tokenizer, text, hits)
        record = {span[2] for span in prompt.spans}
        texts = [
            SourceText(tuple(plain_ids(tokenizer, well_formed(hit.passage.text))), number)
            for number, hit in enumerate(hits)
            if number not in record
        ]
        texts += [SourceText(tuple(plain_ids(tokenizer, each)), -1) for each in further]
        return Job(prompt, request, tuple(texts))

    def write(self, job: Job) -> list[Generation]:
        """Return the texts of a job, as many as were asked for."""
        ids, sampling = list(job.prompt.token_ids), job.request.sampling
        if self.pool is None:
            result = self.engine.generate(ids, sampling, **job.options)
            return list(result) if job.request.several else [result]
        alone = replace(sampling, n=1)
        handles = []
        try:
            for sample in range(sampling.n):
                handles.append(
                    self.pool.submit(
                        ids, alone, sample=sample, tenant=job.request.tenant, **job.options
                    )
                )
            return [request_handle.result() for request_handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def stream(self, job: Job) -> Stream:
        """Return the text of a job piece by piece; to close it early cancels the text."""
        ids, sampling = list(job.prompt.token_ids), job.request.sampling
        if job.request.several:
            raise InputError(f"got n={sampling.n} for a stream; expected n=1.")
        if self.pool is None:
            return self.engine.stream(ids, sampling, **job.options)
        return self.pool.submit(ids, sampling, tenant=job.request.tenant, **job.options).stream()

    def metadata(self, job: Job, generation: Generation) -> dict[str, Any]:
        """Return what is told of a text beside it, as JSON types.

        speculative_decoding: the figures of acceptance by vLLM's names. citations: see `Citation`.
        """
        report = generation.report.to_dict()
        figures = {k: v for k, v in report["speculative_decoding"].items() if k not in PER_STEP}
        facts: dict[str, Any] = {
            "model_name": self.name,
            "finish_reason": generation.finish_reason,
            "label": generation.label,
            "seed": generation.report.seed,
            "forwards": generation.report.forward_passes,
            "accepted_by_source": dict(generation.report.accepted_by_source),
            "speculative_decoding": figures,
        }
        if job.prompt.hits:
            result = cite(generation.text, job.prompt, generation.steps, self._decode)
            facts["citations"] = [asdict(citation) for citation in result]
        if generation.logprobs is not None:
            facts["logprobs"] = {"content": self._logprobs(generation)}
        return facts

    def usage(self, generation: Generation) -> dict[str, Any]:
        """Return what a text took, by OpenAI's names."""
        report = generation.report
        prompt, written = len(generation.prompt_tokens), len(generation.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": report.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": report.accepted_prediction_tokens,
                "rejected_prediction_tokens": report.rejected_prediction_tokens,
            },
        }

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.engine.tokenizer.decode(tokens, skip_special_tokens=True))

    def _logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        """Return log-probabilities by OpenAI's names."""

        def on_progress(token: int, logprob: float) -> dict[str, Any]:
            return {"token": str(self.engine.tokenizer.decode([token])), "logprob": logprob}

        return [
            {
                **on_progress(each.token, each.logprob),
                "top_logprobs": [on_progress(*one) for one in each.top],
            }
            for each in generation.logprobs or ()
        ]


async def pulled(chunks: Stream) -> AsyncIterator[str]:
    """Yield the pieces of a stream, each made in a thread, so that the event loop goes on."""
    try:
        while (piece := await asyncio.to_thread(next, chunks, None)) is not None:
            yield piece
    finally:
        chunks.cancel()


def _disarmed(turn: dict[str, Any], special: Sequence[str]) -> dict[str, Any]:
    """Return a turn whose text spells no special token out, arguments of calls as mappings."""
    if turn.get("tool_calls"):
        turn = {**turn, "tool_calls": [_called(each) for each in turn["tool_calls"]]}
    content = turn.get("content")
    if content is None:
        return {**turn, "content": ""}
    if not isinstance(content, str):
        raise InputError(f"a message has the content {content!r}; expected a text.")
    return {**turn, "content": escape_special_tokens(content, special)}


def _called(call: Any) -> Any:
    """Return a tool call as chat templates read it: with a mapping of arguments, not its JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        read = json.loads(function["arguments"])
        return {**call, "function": {**function, "arguments": read}}
    except json.JSONDecodeError:  # a model wrote it
        return call


def _refuse(inputs: Mapping[str, Any], what: str) -> None:
    """Raise InputError for settings of a model that comes with its own."""
    if inputs:
        raise InputError(
            f"got {', '.join(inputs)} with {what}; expected none, as it has its own. Leave them "
            "out, or name the model."
        )
