"""OpenAI's forms: settings by its names, choices, usage, log-probabilities, citations."""

import math
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from ragspec.engine.prompts import stop_strings
from ragspec.engine.request import Options, check_options
from ragspec.errors import InputError
from ragspec.pipelines.answering.answer import Answer
from ragspec.registry import expect_known
from ragspec.reports.generation import Generation
from ragspec.reports.report import joined
from ragspec.sampling.decoding import decoder_of
from ragspec.sampling.settings import Sampling, TokenLogprob
from ragspec.sampling.text_output import PlacedToken
from ragspec.types import Tokenizer

# Names of OpenAI, transformers and Haystack for one of ours.
ALIASES = MappingProxyType(
    dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens")
    | dict.fromkeys(("stop_words", "stop_sequences"), "stop")
    | {"num_return_sequences": "n", "min_tokens": "min_new_tokens"}
)
SAMPLING = frozenset(field.name for field in fields(Sampling)) - {"defaults"}
OPTIONS = frozenset(["max_new_tokens", "stop", "stop_token_ids", "ignore_eos", "ignore_defaults"])
OPTIONS |= {"logprobs", "prediction"}
CITED = ("document", "start", "end", "page", "place", "passage", "matched_by")
NAMES = SAMPLING | OPTIONS | frozenset(ALIASES) | {"top_logprobs", "documents", "tenant"}


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The settings of one call, the documents to draft from and to cite, and their owner."""

    sampling: Sampling
    options: Options
    documents: tuple[Any, ...] = ()
    tenant: str = ""


def read_settings(*settings: Mapping[str, object] | None, stop: object = None) -> GenerateRequest:
    """Return the request of merged settings; later mappings override, and None means absent.

    Args:
        stop: Stop strings in addition to those of the mappings.

    Raises:
        InputError, SamplingError: A setting is unknown, out of range, or contradicts another.
    """
    merged: dict[str, Any] = {}
    for mapping in settings:
        if not isinstance(mapping, Mapping | None):
            raise InputError(f"got the settings {mapping!r}; expected a mapping of their names.")
        merged |= _by_name(mapping or {}, merged.get("logprobs"))
    stops = dict.fromkeys([*stop_strings(merged.pop("stop", None)), *stop_strings(stop)])
    documents, tenant = merged.pop("documents", ()), merged.pop("tenant", "")
    if isinstance(documents, str | Mapping) or not isinstance(documents, Iterable):
        raise InputError(f"documents is {documents!r}; expected a list of texts or documents.")
    options: Any = {name: value for name, value in merged.items() if name in OPTIONS}
    if stops:
        options["stop"] = list(stops)
    check_options({**options, "tenant": tenant})
    sampling = Sampling(**{name: v for name, v in merged.items() if name in SAMPLING})
    return GenerateRequest(sampling, options, tuple(documents), tenant)


def _by_name(settings: Mapping[str, object], earlier: object) -> dict[str, object]:
    """Return settings by our names, without None; `earlier` mappings may ask for logprobs."""
    named, typed = dict[str, object](), dict[str, str]()
    expect_known("setting", settings, NAMES)
    for name, value in settings.items():
        ours = ALIASES.get(name, name)
        if value is None:
            continue
        first, other = typed.setdefault(ours, name), named.setdefault(ours, value)
        if first != name and other != value:
            raise InputError(f"got {first}={other!r} and {name}={value!r}; leave one out.")
    top = named.pop("top_logprobs", None)
    if top is not None:
        named["logprobs"] = _alternatives(named.get("logprobs", True), top)
    elif named.get("logprobs") is True and earlier:
        named["logprobs"] = earlier  # True asks for no other number of alternatives
    return named


def _alternatives(logprobs: object, top: object) -> object:
    """Return the value of our `logprobs` for OpenAI's `logprobs` and `top_logprobs`."""
    if logprobs is False and not top:
        return False
    if logprobs is not True and logprobs != top:
        raise InputError(f"got logprobs={logprobs!r} and top_logprobs={top!r}; pass logprobs=True.")
    return top


class OpenAIReply:
    """Builds the JSON of the answer to a chat or to a completion, whole or in chunks."""

    def __init__(self, chat: bool, model: str, tokenizer: Tokenizer) -> None:
        self.chat, self.model, self.tokenizer = chat, model, tokenizer
        self._decoder = decoder_of(tokenizer)
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def record(
        self, choices: Sequence[dict[str, object]], *, chunk: bool = False, **more: object
    ) -> dict[str, object]:
        """Return an answer, or a chunk of a stream."""
        kind = f"chat.completion{'.chunk' * chunk}" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": list(choices), **more}

    def choice(
        self,
        index: int,
        text: str,
        *,
        stream: bool = False,
        placed: Sequence[PlacedToken] | None = None,
        finish: str | None = None,
        **message: object,
    ) -> dict[str, object]:
        """Return a choice: a whole text, or with `stream` a piece of one or its end.

        Args:
            placed: The tokens of the text, if their log-probabilities are requested.
            message: Fields of the message of a chat.
        """
        body: dict[str, object] = {"text": text}
        if self.chat and stream:
            body = {"delta": message if finish else {**message, "content": text}}
        elif self.chat:
            usual = {"role": "assistant", "content": text, "refusal": None}
            body = {"message": {**usual, "annotations": [], **message}}
        logprobs = None if placed is None else self.logprobs(placed)
        return {"index": index, "logprobs": logprobs, "finish_reason": finish, **body}

    def logprobs(self, placed: Sequence[PlacedToken]) -> dict[str, object]:
        """Return log-probabilities in the form of chats, or of completions."""
        scored = [each.scored for each in placed]
        if self.chat:
            content = [
                self._scored(each.token, each.logprob, token.part)
                | {"top_logprobs": [self._scored(*pair) for pair in each.top]}
                for each, token in zip(scored, placed, strict=True)
            ]
            return {"content": content, "refusal": None}
        # The first token of an echoed prompt has no probability.
        known = [None if math.isnan(each.logprob) else each for each in scored]
        return {
            "tokens": [self._name(each.token) for each in scored],
            "token_logprobs": [each and each.logprob for each in known],
            "top_logprobs": [each and self._top(each) for each in known],
            "text_offset": [each.start for each in placed],
        }

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of a token and its alternatives, the best of each name."""
        top, pairs = dict[str, float](), [(scored.token, scored.logprob), *scored.top]
        for token, logprob in sorted(pairs, key=lambda pair: -pair[1]):
            top.setdefault(self._name(token), logprob)
        return top

    def _name(self, token: int) -> str:
        """Return the text of a token, or as OpenAI does the bytes of a part of a character."""
        text, raw = self._decoder.piece(token), self._decoder.piece_bytes(token)
        return f"bytes:{repr(raw)[2:-1]}" if raw and raw != text.encode() else text

    def _scored(self, token: int, logprob: float, part: str | None = None) -> dict[str, object]:
        raw = self._decoder.piece_bytes(token) if part is None else part.encode()
        data = None if raw is None else list(raw)
        return {"token": self._name(token), "logprob": max(logprob, -9999.0), "bytes": data}


def finish_reason(generation: Generation) -> str:
    """Return the finish reason in OpenAI's terms."""
    return "length" if generation.finish_reason in ("length", "paused") else "stop"


def figures(texts: Sequence[Generation]) -> dict[str, object]:
    """Return the usage of an answer, and its figures of speculation under vLLM's names.

    A prompt of several samples counts once.
    """
    total = joined([text.report for text in texts], (), 0.0, None)
    firsts = [text for text in texts if not text.sample]
    read = sum(len(text.prompt_tokens) for text in firsts)
    written = sum(len(text.tokens) for text in texts)
    cached = sum(text.report.cached_tokens for text in firsts)
    histogram = total.acceptance_histogram
    accepted = [sum(histogram[place:]) for place in range(1, len(histogram))]
    return {
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": total.accepted_prediction_tokens,
                "rejected_prediction_tokens": total.rejected_prediction_tokens,
            },
        },
        "metrics": {
            "speculative_decoding": {
                "num_drafts": sum(1 for count in total.per_step_drafted if count),
                "num_draft_tokens": total.drafted,
                "num_accepted_tokens": total.accepted,
                "num_accepted_tokens_per_pos": accepted,
                "num_forwards": total.forwards,
                "accepted_by_source": total.accepted_by_source,
                "label": texts[0].label,
                "seeds": [text.report.seed for text in texts if text.report.seed is not None],
            }
        },
    }


def citations_of(answer: Answer) -> list[dict[str, object]]:
    """Return citations in OpenAI's form; a URL is the document's name and characters (RFC 5147)."""
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "url": f"{quote(each.document)}#char={each.start},{each.end}",
                "title": answer.prompt.hits[each.passage - 1].passage.title,
                "start_index": each.answer_start,
                "end_index": each.answer_end,
            },
            **{name: getattr(each, name) for name in CITED},
        }
        for each in answer.citations
    ]
