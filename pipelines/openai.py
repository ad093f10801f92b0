"""Generations in OpenAI's forms: choices, usage, log-probabilities, citations."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ragspec.pipelines.answering.citations import Citation, cite
from ragspec.sampling.text_output import TextOutput

if TYPE_CHECKING:
    from ragspec.pipelines.answering.prompt import Prompt
    from ragspec.reports.generation import Generation
    from ragspec.sampling.settings import TokenLogprob

REASONS = {"length": "length", "paused": "length"}  # in OpenAI's terms; all others are "stop"


@dataclass(frozen=True, slots=True)
class Placed:
    """A token's log-probability, with the character at which it begins in the text."""

    scored: TokenLogprob
    offset: int


def place_tokens(generation: Generation, tokenizer: Any) -> list[Placed]:
    """Return the tokens of a finished text with their places, without those of its stop string."""
    scored = generation.logprobs or ()
    output = TextOutput(tokenizer, generation.prompt_tokens, placed=True)
    output.push([each.token for each in scored])
    end = len(generation.text)
    stopped = generation.finish_reason == "stop" and len(output.text) > end
    placed = [Placed(*pair) for pair in zip(scored, output.starts, strict=True)]
    return [each for each in placed if not stopped or each.offset < end]


class OpenAIReply:
    """Builds the JSON of one answer, whole or as the chunks of a stream.

    Args:
        kind: "chat" or "completion".
        model: Name of the model in the API.
    """

    def __init__(self, kind: str, model: str, tokenizer: Any) -> None:
        self.chat = kind == "chat"
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.tokenizer = tokenizer

    def whole(
        self, done: Sequence[tuple[Generation, Prompt | None]], prompts: Sequence[int]
    ) -> dict[str, Any]:
        """Return the whole answer.

        Args:
            done: The texts, each with the prompt that it may cite.
            prompts: For each prompt the number of one of its texts, for the usage.
        """
        texts = [generation for generation, _ in done]
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [
                self._choice(index, generation, cited)
                for index, (generation, cited) in enumerate(done)
            ],
            "usage": usage(texts, prompts),
            "metrics": metrics(texts),
        }

    def chunk(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a chunk of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": list(choices), **more}

    def opening(self, index: int) -> dict[str, Any]:
        """Return the first choice of a stream, which has the role."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def piece(self, index: int, text: str, placed: Sequence[Placed] | None) -> dict[str, Any]:
        """Return a choice of a stream that holds a piece of text."""
        logprobs = None if placed is None else self.logprobs(placed)
        record: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": None}
        return {**record, "delta": {"content": text}} if self.chat else {**record, "text": text}

    def end(
        self, index: int, text: str, generation: Generation, cited: Prompt | None
    ) -> dict[str, Any]:
        """Return the last choice of a text in a stream: rest, finish reason and citations."""
        record: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": REASONS.get(generation.finish_reason, "stop"),
        }
        if not self.chat:
            return {**record, "text": text}
        delta: dict[str, Any] = {"content": text} if text else {}
        if cited is not None:
            delta["annotations"] = self.annotations(generation, cited)
        return {**record, "delta": delta}

    def refused(self, text: str, why: str, samples: int = 1) -> dict[str, Any]:
        """Return the answer to a question that the documents do not cover."""
        message = {"role": "assistant", "content": text, "refusal": why, "annotations": []}
        choice = {"message": message, "logprobs": None, "finish_reason": "stop"}
        choices = [{"index": index, **choice} for index in range(samples)]
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": usage([], []), "metrics": metrics([])}

    def annotations(self, generation: Generation, cited: Prompt) -> list[dict[str, Any]]:
        """Return the citations of a text."""
        citations = cite(generation.text, cited, generation.steps)
        return [_annotation(each, cited.hits[each.passage - 1].passage.title) for each in citations]

    def logprobs(self, placed: Sequence[Placed]) -> dict[str, Any]:
        """Return log-probabilities in the form of chats, or of completions."""
        scored = [each.scored for each in placed]
        if self.chat:
            content = [
                {
                    **self._scored(each.token, each.logprob),
                    "top_logprobs": [self._scored(token, value) for token, value in each.top],
                }
                for each in scored
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._decode([each.token]) for each in scored],
            "token_logprobs": [each.logprob for each in scored],
            "top_logprobs": [
                {self._decode([token]): value for token, value in each.top} for each in scored
            ],
            "text_offset": [each.offset for each in placed],
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, generation: Generation, cited: Prompt | None) -> dict[str, Any]:
        note = None
        if generation.logprobs is not None:
            note = self.logprobs(place_tokens(generation, self.tokenizer))
        record: dict[str, Any] = {
            "index": index,
            "logprobs": note,
            "finish_reason": REASONS.get(generation.finish_reason, "stop"),
        }
        if not self.chat:
            return {**record, "text": generation.text}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": generation.text,
            "refusal": None,
            "annotations": [] if cited is None else self.annotations(generation, cited),
        }
        return {**record, "message": message}

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode([token])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def usage(texts: Sequence[Generation], prompts: Sequence[int]) -> dict[str, Any]:
    """Return the tokens of prompts and texts; a prompt of several samples counts once.

    Args:
        prompts: For each prompt the number of one of its texts.
    """
    read = sum(len(texts[number].prompt_tokens) for number in prompts)
    written = sum(len(text.tokens) for text in texts)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {
            "cached_tokens": sum(texts[number].report.cached_tokens for number in prompts)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(t.report.accepted_prediction_tokens for t in texts),
            "rejected_prediction_tokens": sum(t.report.rejected_prediction_tokens for t in texts),
        },
    }


def metrics(texts: Sequence[Generation]) -> dict[str, Any]:
    """Return the figures of speculation under vLLM's names, and the label of exactness."""
    reports = [text.report for text in texts]
    by_source: Counter[str] = Counter()
    for report in reports:
        by_source.update(report.accepted_by_source)
    accepted = [count for report in reports for count in report.per_step_accepted]
    drafted = [count for report in reports for count in report.per_step_drafted]
    return {
        "speculative_decoding": {
            "num_drafts": sum(1 for count in drafted if count),
            "num_draft_tokens": sum(drafted),
            "num_accepted_tokens": sum(accepted),
            "num_accepted_tokens_per_pos": [
                sum(1 for count in accepted if count > place)
                for place in range(max(accepted, default=0))
            ],
            "num_forwards": sum(report.forwards for report in reports),
            "accepted_by_source": dict(by_source),
            "label": reports[0].label if reports else "exact",
            "seeds": [report.seed for report in reports],
        }
    }


def _annotation(citation: Citation, title: str) -> dict[str, Any]:
    """Return a citation, whose URL is the document's name with the characters (RFC 5147)."""
    place = f"{quote(citation.document)}#char={citation.start},{citation.end}"
    return {
        "type": "url_citation",
        "url_citation": {
            "url": place,
            "title": title,
            "start_index": citation.answer_start,
            "end_index": citation.answer_end,
        },
        "document": citation.document,
        "start": citation.start,
        "end": citation.end,
        "page": citation.page,
        "passage": citation.passage,
        "matched_by": citation.matched_by,
    }
