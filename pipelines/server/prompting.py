"""Conversion of API requests to requests of the engine: token ids, sampling and options."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ragspec.engine.engine import Engine
from ragspec.engine.plain_text import mark_special_tokens, render_chat
from ragspec.engine.prompts import check_length, encode_prompts
from ragspec.engine.request import Options
from ragspec.errors import InputError
from ragspec.pipelines.answering.answer import Answer, SearchResult
from ragspec.pipelines.answering.answerer import Question
from ragspec.pipelines.answering.conversation import search_turn
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.answering.prompt import Prompt, passages_of, placed
from ragspec.pipelines.answering.template import is_chat
from ragspec.pipelines.openai import NAMES, GenerateRequest, read_settings
from ragspec.pipelines.server import schema
from ragspec.reports.generation import Generation
from ragspec.retrievers.search import fusion, passages, sentences
from ragspec.retrievers.search.documents import Document
from ragspec.sampling.settings import Sampling, TokenLogprob
from ragspec.sampling.text_output import TextOutput
from ragspec.verification.causal import score_tokens

CHARACTERS = 8  # of a token, as an upper bound
LONGEST = 8192  # tokens of a context that the model does not state
COMPLETION_TOKENS = 16  # of a completion that names no limit
LIMITS = ("max_tokens", "max_completion_tokens")
SETTINGS = NAMES.intersection(schema.TextRequest.model_fields) - {*LIMITS, "n", "prediction"}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for the texts after one prompt.

    Attributes:
        search: The result of the search for its question.
        answer: Returns the answer of a text, None without passages.
        unasked: The answer without the model, None if it is called.
        echo, echoed: The text of the prompt if it is part of the answer, and its tokens if they
            are scored.
    """

    prompt: Sequence[int]
    sampling: Sampling
    options: Options
    search: SearchResult = field(default_factory=SearchResult)
    answer: Callable[[Generation], Answer] | None = None
    unasked: Answer | None = None
    echo: str = ""
    echoed: tuple[TokenLogprob, ...] = ()


def read_chat(body: schema.ChatRequest, documents: DocQA) -> list[EngineRequest]:
    """Return the engine's requests for a chat request.

    The documents of the request are put before its last message. Without any, the passages that the
    server's documents have for that message are. Their engine is the server's.
    """
    if body.top_logprobs and not body.logprobs:
        raise InputError("got top_logprobs without logprobs; expected logprobs: true beside it.")
    turns = [schema.text_of(turn.content) for turn in body.messages]
    question, engine = turns[-1], documents.engine
    result = _search(body, question, documents)
    hits = result.hits
    if hits and body.temperature is None:  # as in `DocQA`; elsewhere OpenAI's default
        body = body.model_copy(update={"temperature": 0.0})
    read = _read(body, engine, (body.top_logprobs or 0) if body.logprobs else None)
    sampling, options, new = read.sampling, read.options, _limit_of(body)
    unasked = documents.unasked(question, result) if hits or result.refused else None
    if unasked is not None:  # its options are checked as if the model were called
        _limit(options, 1, new, engine, "messages")
        engine.prepare([0], sampling, options)
        return [EngineRequest((), sampling, options, search=result, unasked=unasked)]
    if hits and not is_chat(engine.tokenizer):
        prompt = documents.prompt_over(question, hits, max(new or 0, 0))
    else:
        prompt = _conversation(body, turns, hits, documents)
    if not prompt.token_ids:
        raise InputError("messages: expected some text, got none.")
    parts: Options = {"spans": prompt.spans, "texts": prompt.layout}
    options |= documents.options_over(prompt, options) if hits else parts
    source = "documents" if body.documents else "messages"
    _limit(options, len(prompt.token_ids), new, engine, source)
    answer = partial(documents.answer_of, Question(question, result), prompt) if hits else None
    return [EngineRequest(prompt.token_ids, sampling, options, result, answer)]


def read_completion(
    body: schema.CompletionRequest, engine: Engine, gone: Callable[[], bool] = lambda: False
) -> list[EngineRequest]:
    """Return the engine's requests for a completion, one for each prompt; `gone`: see `draw`."""
    requests: list[EngineRequest] = []
    if body.echo and body.stream:
        raise InputError("got echo with stream; expected one of them.")
    read = _read(body, engine, body.logprobs)
    new = _limit_of(body) or COMPLETION_TOKENS
    for prompt in body.prompts:
        (ids,), _ = encode_prompts(prompt, engine.tokenizer, engine.target.input_size)
        options: Options = {**read.options}
        _limit(options, len(ids), new, engine, "prompt")
        echo, echoed = TextOutput(engine.tokenizer), tuple[TokenLogprob, ...]()
        if body.echo and not gone():
            echo.push(ids)
            if body.logprobs is not None:
                echoed = tuple(score_tokens(engine.target, ids, body.logprobs))
        requests.append(EngineRequest(ids, read.sampling, options, echo=echo.text, echoed=echoed))
    return requests


def _read(body: schema.TextRequest, engine: Engine, logprobs: int | None) -> GenerateRequest:
    """Return the settings, by default OpenAI's temperature of 1, but for the limit of tokens."""
    settings = {name: getattr(body, name) for name in SETTINGS}
    request = read_settings({"temperature": 1.0, "logprobs": logprobs}, settings)
    if body.prediction is not None:
        if body.drafter == "none":
            raise InputError("got a prediction and drafter none; expected one: leave one out.")
        request.options["prediction"] = text = schema.text_of(body.prediction.content, "")
        longest = CHARACTERS * (engine.target.max_length or LONGEST)
        if len(text) > longest:
            raise InputError(
                f"got a prediction of {len(text)} characters; expected {longest} at most, as no "
                "output here is longer. Send the part that the output will resemble."
            )
    return request


def _limit_of(body: schema.TextRequest) -> int | None:
    """Return the limit of new tokens, None for none; raise InputError for two that differ."""
    first, other = body.max_tokens, body.max_completion_tokens
    if first and other and first != other:
        got = f"max_tokens {first} and max_completion_tokens {other}"
        raise InputError(f"got {got}; expected one of them. Leave one out.")
    return first or other


def _limit(options: Options, length: int, new: int | None, engine: Engine, source: str) -> None:
    """Set the limit of new tokens, None and -1 for the rest; `source` is the prompt's field."""
    count = new if new is not None and new > 0 else None
    check_length(length, count, engine.target.max_length, (source, "max_new_tokens"))
    options["max_new_tokens"] = count or (engine.target.max_length or LONGEST) - length


def _search(body: schema.ChatRequest, question: str, documents: DocQA) -> SearchResult:
    """Return the passages of the prompt, their best sentences, and why the model is not called."""
    last = body.messages[-1].role
    if body.documents is not None:
        hits = [_hit_of(number, each) for number, each in enumerate(body.documents, start=1)]
        if hits and last != "user":
            raise InputError("got documents, and a last message that is no user's.")
        return SearchResult(hits, tuple(sentences.rank_sentences(question, hits, ranked=False)))
    if last != "user" or not question.strip():
        return SearchResult()
    earlier = [schema.text_of(turn.content) for turn in body.messages[:-1] if turn.role == "user"]
    extracts = documents.template.extracts
    result = search_turn(documents.search, question, earlier, extracts=extracts)
    return replace(result, hits=documents.read_hits(result))


def _hit_of(number: int, document: schema.DocumentText | str) -> fusion.Hit:
    """Return a document of a request as a hit of one passage."""
    each = schema.DocumentText(text=document) if isinstance(document, str) else document
    name = each.title or f"document {number}"
    passage = passages.Passage(number - 1, 0, len(each.text), name, each.text)
    return fusion.Hit(Document(name, name, each.text), passage, 1.0)


def _conversation(
    body: schema.ChatRequest, turns: Sequence[str], hits: Sequence[fusion.Hit], documents: DocQA
) -> Prompt:
    """Return the prompt of turns, with passages in the last; without a template, texts alone."""
    tokenizer = documents.engine.tokenizer
    marked = [mark_special_tokens(text, tokenizer) for text in turns]
    if not is_chat(tokenizer):
        return placed(tokenizer, "\n\n".join(marked), hits)
    if hits:
        marked[-1] = documents.template.content(marked[-1], passages_of(hits, tokenizer))
    roles = ["system" if turn.role == "developer" else turn.role for turn in body.messages]
    messages = [{"role": r, "content": text} for r, text in zip(roles, marked, strict=True)]
    variables = body.chat_template_kwargs or {}  # of the REFUSED, those that ask for nothing
    variables = {name: value for name, value in variables.items() if name not in schema.REFUSED}
    return placed(tokenizer, render_chat(tokenizer, messages, **variables), hits)
