"""Conversion of API requests to requests of the engine: token ids, sampling and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragspec.engine.plain_text import mark_special_tokens
from ragspec.engine.request import Options
from ragspec.errors import InputError
from ragspec.pipelines.answering.prompt import Prompt, build_prompt, passages_of, placed
from ragspec.pipelines.answering.template import (
    find_template,
    is_chat,
    passages_for,
    suited,
    templated,
)
from ragspec.pipelines.server.drafting import ALL
from ragspec.pipelines.server.errors import ApiError
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.passages import Passage
from ragspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.docqa import DocQA
    from ragspec.pipelines.server.schema import (
        ChatRequest,
        CompletionRequest,
        DocumentText,
        TextRequest,
    )


CHARACTERS = 8  # of a token, as an upper bound
LONGEST = 8192  # tokens of a context that the model does not state


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for `samples` texts after one prompt.

    Attributes:
        prompt: Token ids or a text.
        store: Name of a store, None for none; all of them by default.
        cited: The prompt with its passages, if it has any.
        refused: Why the model is not called, None if it is.
    """

    prompt: Any
    sampling: Sampling
    options: Options
    samples: int
    drafter: Any = None
    budget: Any = None
    store: Any = ALL
    cited: Prompt | None = None
    refused: str | None = None


def read_chat(request: ChatRequest, engine: Engine, documents: DocQA | None) -> EngineRequest:
    """Return the engine's request for a chat request.

    The documents of the request are put before its last message. Without any, the passages that the
    server's documents have for that message are.

    Raises:
        InputError, ApiError: The request contradicts itself, or has empty documents.
    """
    turns = [(turn.role, turn.text) for turn in request.messages]
    hits, refused = _hits(request, turns[-1], engine, documents)
    alternatives = _alternatives(request)
    options = _options(request, engine, request.max_completion_tokens or request.max_tokens)
    if refused is not None:
        return _engine_request(request, "", options, alternatives, refused=refused)
    if hits and not is_chat(engine.tokenizer):
        prompt = _question(turns, hits, engine, options)
    else:
        prompt = _conversation(turns, hits, engine)
    options["spans"], options["texts"] = prompt.spans, prompt.layout
    ids = list(prompt.token_ids)
    return _engine_request(request, ids, options, alternatives, prompt if hits else None)


def read_completion(request: CompletionRequest, engine: Engine) -> list[EngineRequest]:
    """Return the engine's requests for a completion request, one for each prompt."""
    options = _options(request, engine, 16 if request.max_tokens is None else request.max_tokens)
    return [_engine_request(request, each, options, request.logprobs) for each in request.prompts]


def _engine_request(
    request: TextRequest,
    prompt: Any,
    options: Options,
    alternatives: int | None,
    cited: Prompt | None = None,
    refused: str | None = None,
) -> EngineRequest:
    if alternatives is not None:
        options["logprobs"] = alternatives
    store = request.store if "store" in request.model_fields_set else ALL
    return EngineRequest(
        prompt,
        _sampling(request),
        options,
        request.samples,
        request.drafter,
        request.budget,
        store,
        cited,
        refused,
    )


def _sampling(request: TextRequest) -> Sampling:
    """Return the sampling settings; the defaults are OpenAI's: temperature 1 over all tokens."""
    settings: dict[str, Any] = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": request.top_p,
        "top_k": None if request.top_k is None else max(0, request.top_k),
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "logit_bias": _bias(request.logit_bias),
        "seed": request.seed,
    }
    return Sampling(**{name: value for name, value in settings.items() if value is not None})


def _bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for token in bias:
        if not (token.isdecimal() and token.isascii() and len(token) < 12):
            raise InputError(f"logit_bias has the token {token[:20]!r}; expected token ids.")
    return {int(token): value for token, value in bias.items()}


def _options(request: TextRequest, engine: Engine, most: int | None) -> Options:
    options: Options = {"ignore_eos": request.ignore_eos}
    if request.stops:
        options["stop"] = request.stops
    if most is not None:
        options["max_new_tokens"] = most
    if request.prediction is not None:
        if request.drafter == "none":
            raise InputError("got a prediction and drafter none; expected one: leave one out.")
        options["prediction"] = text = request.prediction.text
        longest = CHARACTERS * (engine.target.max_length or LONGEST)
        if len(text) > longest:
            raise InputError(
                f"got a prediction of {len(text)} characters; expected {longest} at most, as no "
                "output here is longer. Send the part that the output will resemble."
            )
    return options


def _alternatives(request: ChatRequest) -> int | None:
    """Return the number of top log-probabilities, None for no log-probabilities."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InputError("got top_logprobs without logprobs; expected logprobs: true beside it.")
    return (request.top_logprobs or 0) if request.logprobs else None


def _hits(
    request: ChatRequest, last: tuple[str, str], engine: Engine, documents: DocQA | None
) -> tuple[list[Hit], str | None]:
    """Return the passages of the prompt, and why the model is not called or None."""
    if request.documents is not None:
        hits = [_hit_of(number, each) for number, each in enumerate(request.documents, start=1)]
        if hits and last[0] != "user":
            raise ApiError(400, "got documents, and a last message that is no user's.", None)
        return hits, None
    if documents is None or last[0] != "user" or not last[1].strip():
        return [], None
    hits, refused = documents.search(last[1], passages_for(engine))
    if refused is not None and len(request.messages) > 1:  # may be about an earlier message
        return [], None
    return hits, refused


def _hit_of(number: int, document: DocumentText | str) -> Hit:
    """Return a document of a request as a hit of one passage."""
    text = document if isinstance(document, str) else document.text
    title = "" if isinstance(document, str) else document.title
    name = title or f"document {number}"
    if not text.strip():
        raise InputError(f"{name} is empty; expected text.")
    return Hit(Document(name, name, text), Passage(number - 1, 0, len(text), name, text), 1.0)


def _conversation(turns: Sequence[tuple[str, str]], hits: Sequence[Hit], engine: Engine) -> Prompt:
    """Return the prompt of the turns, with the passages in the last one.

    Without a chat template it has the texts of the turns alone, separated by blank lines.
    """
    tokenizer = engine.tokenizer
    marked = [
        ("system" if role == "developer" else role, mark_special_tokens(text, tokenizer))
        for role, text in turns
    ]
    if not is_chat(tokenizer):
        return placed(tokenizer, "\n\n".join(text for _, text in marked), hits)
    if hits:
        template = find_template(suited(tokenizer))
        marked[-1] = ("user", template.content(marked[-1][1], passages_of(hits, tokenizer)))
    messages = [{"role": role, "content": text} for role, text in marked]
    return placed(tokenizer, templated(tokenizer, messages), hits)


def _question(
    turns: Sequence[tuple[str, str]], hits: Sequence[Hit], engine: Engine, options: Options
) -> Prompt:
    """Return the last turn as a question over passages, for a model without a chat template."""
    template = find_template(suited(engine.tokenizer))
    options.setdefault("stop", template.stop)
    limit = engine.target.max_length
    room = None if limit is None else limit - (options.get("max_new_tokens") or 0)
    return build_prompt(engine.tokenizer, turns[-1][1], hits, room=room, template=template)
