"""Schemas of requests: OpenAI's fields, and those that speculation adds.

Unknown fields are refused, since the server would ignore them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_STOPS, MOST_SAMPLES, MOST_PROMPTS, MOST_DOCUMENTS = 16, 16, 64, 256
LONGEST = 1 << 20  # characters of a text, or tokens of a list

Text = Annotated[str, Field(max_length=LONGEST)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=LONGEST)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
Positive = Annotated[int, Field(ge=1, le=1 << 31)]


class Strict(BaseModel):
    """A schema that refuses unknown fields and texts in place of numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Part(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


Parts = Annotated[list[Part], Field(min_length=1, max_length=1000)]


class Message(Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Parts
    name: str | None = None

    @property
    def text(self) -> str:
        """The text of the message, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class DocumentText(Strict):
    """A document of a request, which is drafted from and cited."""

    text: Annotated[str, Field(min_length=1, max_length=LONGEST)]
    title: Annotated[str, Field(max_length=1000)] = ""


class PredictedContent(Strict):
    """A text that the output is expected to resemble (Predicted Outputs)."""

    type: Literal["content"]
    content: Text | Parts

    @property
    def text(self) -> str:
        """The predicted text, its parts joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(Strict):
    """The only response format: text."""

    type: Literal["text"]


class TextRequest(Strict):
    """The fields that chat and completion requests share.

    Attributes:
        drafter: A method by name, several (fused), or "none".
        budget: "auto", or draft nodes per step.
        store: One of the server's stores; absent for all, null for none.
    """

    model: Annotated[str, Field(max_length=500)]
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=4096)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    stop: Stop | Stops | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    prediction: PredictedContent | None = None
    drafter: str | Annotated[list[str], Field(min_length=1, max_length=8)] | None = None
    budget: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] | None = None
    store: Annotated[str, Field(max_length=200)] | None = None
    user: Annotated[str, Field(max_length=200)] | None = None
    metadata: dict[str, Any] | None = None  # as OpenAI's clients send it; not kept

    @property
    def samples(self) -> int:
        """The number of texts to write."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end the text."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(TextRequest):
    """A request for the next turn of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    documents: (
        Annotated[
            list[DocumentText | Annotated[str, Field(min_length=1, max_length=LONGEST)]],
            Field(max_length=MOST_DOCUMENTS),
        ]
        | None
    ) = None
    response_format: TextFormat | None = None


class CompletionRequest(TextRequest):
    """A request for the continuation of prompts, as texts or token ids."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: Alternatives | None = None
    echo: Literal[False] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]


class ImageRequest(Strict):
    """A request for images."""

    model: Annotated[str, Field(max_length=500)] | None = None
    prompt: Annotated[str, Field(min_length=1, max_length=4000)]
    n: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] | None = None
    size: Annotated[str, Field(max_length=20)] | None = None
    response_format: Literal["b64_json"] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    guidance_scale: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    user: Annotated[str, Field(max_length=200)] | None = None


class StoreRequest(Strict):
    """A store to draft from: its name in requests, and its folder on the server."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
