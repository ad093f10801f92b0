"""Schemas of requests: OpenAI's fields, and those that speculation adds.

A field that changes the result is honoured or refused by name. All other fields are accepted, and
`ignored_fields` names them for a header of the response.
"""

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal
from urllib.parse import quote

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ragspec.pipelines.server.errors import SIZE, STORE, TEXT, TOKEN, ApiError

MOST_STOPS, MOST_SAMPLES, MOST_PROMPTS, MOST_DOCS = 16, 16, 64, 256
MOST_IGNORED, LONGEST_NAME = 32, 100
LONGEST = 1 << 20  # characters of a text, or tokens of a list
NOTHING: tuple[Any, ...] = (None, False, "", [], {})
CONTINUES, ANSWERS = "continue_final_message", "add_generation_prompt"
# Fields that would change the result, each with the values that ask for nothing.
_UNSUPPORTED = """tools functions tool_calls guided_json guided_regex guided_choice guided_grammar
structured_outputs json_schema grammar suffix mask audio web_search_options use_beam_search
bad_words allowed_token_ids prompt_logprobs logits_processors include_stop_str_in_output
top_logprobs regex chat_template truncate_prompt_tokens echo image instructions system template
images negative_prompt lora_path mirostat dry_multiplier xtc_probability dynatemp_range watermark
penalty_alpha eta_cutoff epsilon_cutoff no_repeat_ngram_size top_a min_length max_length
max_output_tokens stop_sequences stop_strings stop_regex structural_tag suppress_tokens
custom_token_bans conversation messages documents tokenize padding truncation ebnf return_tensors
return_dict return_assistant_tokens_mask tokenizer_kwargs rule drafter budget codes
guidance_interval class_labels steps num_inference_steps iterations height width stream
num_images_per_prompt bad_words_ids stopping_strings ban_eos_token begin_suppress_tokens
dynamic_temperature smoothing_factor mirostat_mode prompt_embeds return_token_ids
return_tokens_as_token_ids n_probs response_schema format sampling_params options extra_body"""
REFUSED = MappingProxyType(
    dict.fromkeys(_UNSUPPORTED.split(), NOTHING)
    | dict.fromkeys(("tool_choice", "function_call"), (*NOTHING, "none", "auto"))
    | dict.fromkeys(("best_of", "length_penalty", "num_beams", "guidance_scale"), (None, 1))
    | dict.fromkeys(("typical_p", "typical", "tfs_z", "tfs"), (None, 1))
    | dict.fromkeys(("n_predict", "num_predict"), (None, -1))
    | dict.fromkeys(("do_sample", "skip_special_tokens", "detokenize"), (None, True))
    | dict.fromkeys(("eos_token_id", "forced_eos_token_id"), (None,))
    | dict.fromkeys((CONTINUES, ANSWERS), (None,))  # see `_refused`
    | {"response_format": (None, {"type": "text"}), "modalities": (*NOTHING, ["text"])}
    | {"background": (None, "auto", "opaque"), "output_format": (None, "png")}
    | {"top_n_sigma": (*NOTHING, -1)}
)
REFUSED_IN_IMAGES = REFUSED | (
    dict.fromkeys(("lora", "init_image", "input_image", "sampler", "scheduler"), NOTHING)
    | dict.fromkeys(("guidance", "cfg_scale", "cfg", "strength"), (None,))
    | dict.fromkeys(("frequency_penalty", "presence_penalty"), (None, 0))
    | {"repetition_penalty": (None, 1), "cfg_interval": (None, -1), "logit_bias": (None, {})}
    | {"quality": (None, "auto", "standard"), "input_fidelity": (None, "low")}
)
SYNONYMS = MappingProxyType(dict.fromkeys(("guidance", "cfg_scale", "cfg"), "guidance_scale"))


def _whole(value: object) -> object:
    """Return a float without a fraction as an integer, as some clients send integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _counts_tokens(value: int) -> int:
    if value == 0:
        raise ValueError("expected at least 1, or -1 for the rest of the context")
    return value


Int = Annotated[int, BeforeValidator(_whole)]
Text = Annotated[str, Field(max_length=LONGEST)]
Filled = Annotated[str, Field(pattern=TEXT, max_length=LONGEST)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=LONGEST)]
SEVERAL = Field(min_length=1, max_length=MOST_PROMPTS)
Alternatives = Annotated[Int, Field(ge=0, le=20)]
NoneIfFalse = BeforeValidator(lambda value: None if value is False else value)
Limit = Annotated[Int, Field(ge=-1, le=1 << 31), AfterValidator(_counts_tokens)]
TopK = Annotated[Int, Field(ge=-1, le=1 << 31), AfterValidator(lambda k: max(0, k))]
Token = Annotated[str, Field(pattern=TOKEN), AfterValidator(int)]
Bias = Annotated[float, Field(ge=-1e6, le=1e6)]
Name = Annotated[str, Field(max_length=500)]
Samples = Annotated[Int, Field(ge=1, le=MOST_SAMPLES)]


class Body(BaseModel, extra="allow", strict=True):
    """A schema that refuses texts in place of numbers."""


class Part(Body):
    """A part of a message."""

    type: Literal["text"]
    text: Text


Content = Text | Annotated[list[Part | Text], Field(max_length=1000)]  # LangChain sends both


def text_of(content: Content | None, separator: str = "\n") -> str:
    """Return the text of a content; vLLM and llama.cpp's server join the parts by newlines, too."""
    parts = content if isinstance(content, list) else [content or ""]
    return separator.join(part if isinstance(part, str) else part.text for part in parts)


class Message(Body):
    """A turn of a conversation; only an assistant's may have no text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Content | None, Field(validate_default=True)] = None

    @pydantic.field_validator("content")
    @classmethod
    def _expect_text(cls, content: Content | None, info: pydantic.ValidationInfo) -> Content | None:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("missing", "expected a text")
        return content


class DocumentText(Body):
    """A document of a request, which is drafted from and cited."""

    text: Filled
    title: Annotated[str, Field(max_length=1000)] | None = None


class PredictedContent(Body):
    """A text that the output is expected to resemble (Predicted Outputs)."""

    type: Literal["content"]
    content: Content


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None


class TextRequest(Body):
    """The fields that chat and completion requests share.

    Attributes:
        max_tokens, max_completion_tokens: Most new tokens; -1 for the rest of the context.
        drafter: A method by name, several (fused), or "none".
        budget: "auto", or draft nodes per step.
        store: One of the server's stores; absent for all, null for none. OpenAI's boolean is
            ignored.
    """

    model: Name
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Annotated[Int, Field(ge=0, le=1 << 31)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[Token, Bias], Field(max_length=4096)] | None = None
    n: Samples | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[Int], Field(max_length=MOST_STOPS)] | None = None
    seed: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    prediction: PredictedContent | None = None
    drafter: Name | Annotated[list[Name], Field(min_length=1, max_length=8)] | None = None
    budget: Literal["auto"] | Annotated[Int, Field(ge=0, le=64)] | None = None
    store: Annotated[str, Field(max_length=200)] | bool | None = True
    user: Annotated[str, Field(max_length=200)] | None = None


class ChatRequest(TextRequest):
    """A request for the next turn of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[DocumentText | Filled], Field(max_length=MOST_DOCS)] | None = None


class CompletionRequest(TextRequest):
    """A request for the continuation of prompts, as texts or token ids."""

    prompt: Text | Tokens | Annotated[list[Text], SEVERAL] | Annotated[list[Tokens], SEVERAL]
    logprobs: Annotated[Alternatives | None, NoneIfFalse] = None
    echo: bool | None = None
    add_special_tokens: Literal[True] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]


class ImageRequest(Body):
    """A request for images."""

    model: Name | None = None
    prompt: Annotated[str, Field(min_length=1, max_length=4000)]
    n: Samples | None = None
    size: Annotated[str, Field(pattern=SIZE)] | None = None
    response_format: Literal["b64_json"] | None = None
    seed: Int | None = None
    negative_prompt: Annotated[str, Field(max_length=4000)] | None = None
    guidance_scale: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None


class StoreRequest(BaseModel, extra="forbid", strict=True):
    """A store to draft from: its name in requests, and its folder on the server."""

    name: Annotated[str, Field(pattern=STORE)]
    path: Annotated[str, Field(min_length=1, max_length=4096)]


def _refused(body: Body) -> Mapping[str, tuple[Any, ...]]:
    """Return the REFUSED; a last message of the assistant, unless blank, is always continued."""
    if isinstance(body, ImageRequest):
        return REFUSED_IN_IMAGES
    last = body.messages[-1] if isinstance(body, ChatRequest) else None
    goes_on = last is not None and last.role == "assistant" and bool(text_of(last.content).strip())
    return REFUSED | {CONTINUES: (None, goes_on), ANSWERS: (None, not goes_on)}


def ignored_fields(body: Body) -> dict[str, str]:
    """Return a header naming ignored fields; raise ApiError for one that matters or is misspelt."""
    names, refused = dict[str, None](), _refused(body)
    for path, value, known in _unknown_fields(body, ""):
        name = path.rpartition(".")[2]
        plain = quote(".".join(each for each in path.split(".") if not each.isdecimal())) or "''"
        if plain in names or value is None or value in refused.get(name, ()):
            continue
        if len(names) == MOST_IGNORED or len(plain) > LONGEST_NAME:
            raise ApiError(400, f"expected at most {MOST_IGNORED} further fields, of short names.")
        near = difflib.get_close_matches(SYNONYMS.get(name, name), known, 1, 0.8)
        if name in refused or near:
            hint = f"Did you mean {near[0]}?" if near else _reason(name)
            raise ApiError(400, f"{path}: expected none. {hint}", "unsupported", path)
        names[plain] = None
    return {"X-Ignored-Fields": ", ".join(names)} if names else {}


def _reason(name: str) -> str:
    """Return why a field has no effect where it stands."""
    if name in (CONTINUES, ANSWERS):
        return "A last message of the assistant is continued, unless blank; others are answered."
    kinds: dict[str, type[Body]] = {"/v1/chat/completions": ChatRequest}
    kinds["/v1/completions"] = CompletionRequest
    routes = [route for route, kind in kinds.items() if name in kind.model_fields]
    return f"It is a field of {' and '.join(routes)}." if routes else "It is not supported."


def _unknown_fields(body: Body, path: str) -> Iterator[tuple[str, object, list[str]]]:
    """Yield path and value of each field without a schema, and the names beside it."""
    known = list(type(body).model_fields)
    for name, value in (body.model_extra or {}).items():
        yield path + name, value, known
    for name in body.model_fields_set.intersection(known):
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from _unknown_fields(value, f"{path}{name}.")
        for number, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Body):
                yield from _unknown_fields(item, f"{path}{name}.{number}.")
        if name == "chat_template_kwargs":
            refused = REFUSED.keys() & (value or {}).keys()
            yield from ((f"{name}.{key}", value[key], []) for key in sorted(refused))
