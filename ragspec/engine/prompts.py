"""Conversion of prompts in all accepted forms to token ids."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.base import SourceText
from ragspec.engine.plain_text import Message, encode_text, mark_special_tokens, render_chat
from ragspec.errors import InputError, PromptTooLongError, RagspecError, pluralize
from ragspec.trees.draft_tree import PREDICTION
from ragspec.types import Tokenizer

Encoded = tuple[list[list[int]], bool]
Prompts = str | Sequence[object] | Mapping[str, object] | Tensor | np.ndarray

_FORMS = "expected a text, chat messages ({'role', 'content'}), token ids, or a list of these"
THOUGHTS = ("thinking", "reasoning", "redacted_thinking")  # parts of turns that are not sent again


def encode_prompts(
    prompts: Prompts, tokenizer: "Tokenizer | None", input_size: int, mask: Tensor | None = None
) -> Encoded:
    """Return the token ids of each prompt of any accepted form, and whether it is a single one.

    A tensor or array [T] or [1, T] and a flat list of ids are one prompt. A tensor [B, T] or a list
    of lists is a batch. The output of a tokenizer (input_ids, attention_mask) is accepted as well.

    Args:
        input_size: Number of ids that the model reads, which may be more than it produces.
        mask: Marks padding, [B, T].

    Raises:
        InputError: A prompt is empty or of another type, an id is outside the vocabulary, or a text
            comes without a tokenizer.
    """
    every, single = _read(prompts, tokenizer, mask)
    for number, ids in enumerate(every):
        name = _numbered(number, len(every))
        if not ids:
            raise InputError(f"{name} is empty; expected at least one token to go on from.")
        expect_ids(name, ids, input_size)
    return every, single


def expect_ids(
    name: str, ids: Iterable[object], size: int, error: type[RagspecError] = InputError
) -> list[int]:
    """Return token ids as a list; raise an error if one is not from 0 to `size` - 1."""
    tokens: list[int] = []
    for token in ids:
        if not isinstance(token, int | Integral) or not 0 <= int(token) < size:
            raise error(
                f"{name} has the token id {token!r}; expected 0 to {size - 1}. Was it made with "
                "another tokenizer?"
            )
        tokens.append(int(token))
    return tokens


def _read(prompts: object, tokenizer: "Tokenizer | None", mask: Tensor | None) -> Encoded:
    """Return the token ids of one prompt or several in any accepted form, unchecked."""
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        if mask is None:
            mask = prompts.get("attention_mask")
        prompts = prompts["input_ids"]
        if isinstance(prompts, list) and mask is not None:
            prompts, mask = _unpadded(prompts, mask), None
    if isinstance(prompts, (Tensor, np.ndarray)):
        return _from_tensor(prompts, mask)
    if mask is not None:
        raise InputError(
            f"got an attention_mask with a {type(prompts).__name__} as a prompt; expected a tensor "
            "[B, T] of token ids. Leave the padding and the mask out."
        )
    if isinstance(prompts, str):
        return [_tokenize("a prompt", prompts, tokenizer)], True
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes) and len(prompts) > 0:
        return _from_list(prompts, tokenizer)
    kind = "an empty" if isinstance(prompts, Sequence) and not prompts else "an object of type"
    raise InputError(f"got {kind} {type(prompts).__name__} as a prompt; {_FORMS}")


def _numbered(number: int, of: int) -> str:
    """Return the name of a prompt in an error, counted from 1."""
    return "the prompt" if of == 1 else f"prompt {number + 1} of {of}"


def end_tokens(config: object, tokenizer: object) -> list[int]:
    """Return the end tokens of a generation config, if any, else those of the tokenizer."""
    named = (getattr(each, "eos_token_id", None) for each in (config, tokenizer))
    ends = next((each for each in named if each is not None), ())
    return [int(ends)] if isinstance(ends, int) else [int(token) for token in ends]


def stop_strings(stop: object) -> tuple[str, ...]:
    """Return the stop strings of a text, a list of them, or None."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) for item in strings):
        raise InputError(f"stop is {stop!r}; expected a text, a list of them, or None")
    if "" in strings:
        raise InputError("a stop string is empty; expected at least one character")
    return tuple(strings)


def check_length(
    prompt: int,
    new: int | None,
    limit: int | None,
    names: tuple[str, str] = ("the prompt", "max_new_tokens"),
    fixed: bool = False,
) -> None:
    """Raise PromptTooLongError if prompt and new tokens exceed the model's context.

    Args:
        new: None for one, if the caller set no limit.
        names: The prompt and the limit of new tokens as the caller named them.
        fixed: Whether the caller cannot set that limit.
    """
    if limit is not None and prompt + (least := new or 1) > limit:
        advice = []
        if least < limit:  # else no prompt would be short enough
            advice.append(f"shorten {names[0]} by {pluralize(prompt + least - limit, 'token')}")
        if prompt < limit and not fixed:
            advice.append(f"set {names[1]} to {limit - prompt} or less")
        if not advice:
            advice.append(f"shorten {names[0]} to less than {limit} tokens and ask for fewer")
        raise PromptTooLongError(
            f"This model's maximum context length is {limit} tokens, but there are {prompt} in "
            f"{names[0]} and {f'{names[1]} is {new}' if new else 'the text needs one more'}. "
            f"To do: {', or '.join(advice)}."
        )


def as_list(values: Any) -> Any:
    """Return the values of a tensor or an array, in most cases a list; others unchanged."""
    return values.tolist() if hasattr(values, "tolist") else values


def _unpadded(ids: object, mask: object) -> list[list[int]]:
    """Return token ids, or lists of them, without padding."""
    row, marks = as_list(ids), as_list(mask)
    sizes = [len(each) if isinstance(each, list | tuple) else None for each in (row, marks)]
    if None in sizes or sizes[0] != sizes[1]:
        raise InputError(
            f"got an attention_mask of length {sizes[1]} for token ids of length {sizes[0]}; "
            "expected the same shape."
        )
    if isinstance(as_list(row[0]) if row else 0, list | tuple):
        rows: list[Any] = [_unpadded(*each) for each in zip(row, marks, strict=True)]
        return rows
    return [token for token, keep in zip(row, marks, strict=True) if keep]


def _from_tensor(ids: Tensor | np.ndarray, mask: object) -> Encoded:
    integers = torch.int64, torch.int32
    whole = ids.dtype.kind in "iu" if isinstance(ids, np.ndarray) else ids.dtype in integers
    if not whole or ids.ndim not in (1, 2) or not len(ids):
        raise InputError(
            f"got a tensor of {ids.dtype} with shape {list(ids.shape)} as a prompt; expected "
            "token ids, int64, shape [T] or [B, T]"
        )
    rows = ids[None] if ids.ndim == 1 else ids
    if mask is None:
        return rows.tolist(), len(rows) == 1
    marks, nested = as_list(mask), (list, tuple)
    if isinstance(marks, nested) and not any(isinstance(as_list(row), nested) for row in marks):
        marks = [marks]
    return _unpadded(rows, marks), len(rows) == 1


def _from_list(prompts: Sequence[Any], tokenizer: "Tokenizer | None") -> Encoded:
    belongs = next((each for each in (_is_id, _is_message) if each(prompts[0])), None)
    if belongs is not None:
        for number, item in enumerate(prompts):
            if not belongs(item):
                raise InputError(
                    f"got {type(prompts[0]).__name__} first and {item!r} at place {number} of one "
                    f"prompt; {_FORMS}"
                )
        return [[*map(int, prompts)] if belongs is _is_id else _chat(prompts, tokenizer)], True
    rows = []
    for number, prompt in enumerate(prompts):
        named = _numbered(number, len(prompts))
        try:
            ids, single = _read(prompt, tokenizer, None)
        except InputError as error:
            raise InputError(f"{named}: {error}") from error
        if not single:
            raise InputError(f"{named} is itself a list of prompts; {_FORMS}")
        rows += ids
    return rows, False


def _tokenize(name: str, text: str, tokenizer: "Tokenizer | None", **options: object) -> list[int]:
    """Return the token ids of a text; raise InputError without a tokenizer."""
    if tokenizer is None:
        raise InputError(f"got text as {name}, no tokenizer; pass Engine(model, tokenizer) or ids")
    ids = list(tokenizer(well_formed(text), verbose=False, **options)["input_ids"])
    begin = getattr(tokenizer, "bos_token", None)
    if begin and text.startswith(begin) and ids[:2] == [tokenizer.bos_token_id] * 2:
        del ids[0]  # the text of a chat template begins with the token that tokenizers add
    return ids


def encode_value(
    name: str, value: object, tokenizer: "Tokenizer | None", vocab_size: int
) -> tuple[int, ...]:
    """Return the token ids of an option that is a text or ids."""
    value = _tokenize(name, value, tokenizer) if isinstance(value, str) else as_list(value)
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise InputError(f"got {type(value).__name__} as {name}; expected a text or token ids")
    return tuple(expect_ids(name, value, vocab_size))


def _chat(messages: Sequence[Message], tokenizer: "Tokenizer | None") -> list[int]:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "got chat messages but the tokenizer has no chat template; pass a text, or set "
            "tokenizer.chat_template"
        )
    turns = [read_message(each, number, tokenizer) for number, each in enumerate(messages)]
    return list(encode_text(tokenizer, render_chat(tokenizer, turns)).ids)


def read_message(message: Message, number: int, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return message `number`, from 0, as chat templates expect it.

    Texts are well formed, text parts are joined, special tokens in the text are marked, and the
    arguments of tool calls are mappings, not JSON. Fields that are None are left out.

    Raises:
        InputError: The message has no role, or a content that is not text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(
            f"message {number + 1} has no role ({message!r}); expected {{'role': 'user', "
            "'content': ...}."
        )
    turn = {name: _well_formed(each) for name, each in message.items() if each is not None}
    content = turn.get("content", "")
    if (text := _joined(content)) is None:
        what = f"the content {content!r}"
        if isinstance(content, list):
            kinds = [part.get("type") if isinstance(part, Mapping) else part for part in content]
            what = f"parts of the types {kinds}"
        raise InputError(
            f"message {number + 1} has {what}; expected a text, or text parts alone: this engine "
            "reads text."
        )
    if isinstance(calls := turn.get("tool_calls"), list):
        turn["tool_calls"] = [_parsed_call(c) if isinstance(c, Mapping) else c for c in calls]
    return {**turn, "content": mark_special_tokens(text, tokenizer)}


def _joined(content: object) -> str | None:
    """Return a text, or the joined parts of one without thoughts; None for anything else."""
    if isinstance(content, str):
        return content
    parts: Any = content if isinstance(content, Sequence) else (None,)
    named = [part if isinstance(part, Mapping) else {"text": part} for part in parts]
    texts: list[Any] = [part.get("text") for part in named if part.get("type") not in THOUGHTS]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def _parsed_call(call: Message) -> Message:
    """Return a tool call with its arguments as a mapping, if a model wrote them in JSON."""
    function: Any = call.get("function")
    with suppress(KeyError, TypeError, ValueError):  # another form, or no JSON
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    return call


def _well_formed(messages: object) -> object:
    """Return a message or a part of it with all of its texts well formed."""
    if isinstance(messages, str):
        return well_formed(messages)
    if isinstance(messages, list):
        return [_well_formed(each) for each in messages]
    if isinstance(messages, Mapping):
        return {name: _well_formed(value) for name, value in messages.items()}
    return messages


def _is_id(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "input_ids" not in value


def well_formed(text: str) -> str:
    """Return the text with U+FFFD in place of every lone surrogate; pairs become characters.

    JSON can hold half of a pair ("\\ud83d"), which tokenizers do not accept.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


ANCHOR = 4  # tokens of the prompt; more would make a first match look too certain


def read_prediction(
    prediction: object, prompts: Sequence[Sequence[int]], tokenizer: "Tokenizer | None", size: int
) -> tuple[SourceText | None, ...]:
    """Return the predicted text of each prompt as a text to draft from, None for no prediction.

    Args:
        prediction: A text, token ids, OpenAI's mapping, or a list of these or None, one for each
            prompt; a single one serves all prompts.

    Raises:
        InputError: The prediction has another form, a text comes without a tokenizer, or an id is
            outside the vocabulary.
    """

    def read(prompt: Sequence[int], value: object) -> SourceText | None:
        if value is None:
            return None
        if isinstance(value, Mapping) and (value := _joined(value.get("content"))) is None:
            raise InputError(
                "got a prediction without text in 'content'; expected a text, token ids, {'type': "
                "'content', 'content': text}, or a list with one of these or None for each prompt."
            )
        name = "a prediction"
        if isinstance(value, str):
            return anchored(prompt, _tokenize(name, value, tokenizer, add_special_tokens=False))
        return anchored(prompt, encode_value(name, value, tokenizer, size))

    rows: Sequence[object] = prediction if isinstance(prediction, Sequence) else ()
    if isinstance(rows, str | bytes) or not rows or isinstance(rows[0], Integral):
        rows = [prediction] * len(prompts)
    if len(rows) != len(prompts):
        raise InputError(
            f"got {pluralize(len(rows), 'prediction')} for "
            f"{pluralize(len(prompts), 'prompt')}; expected one each (or None), or one for all."
        )
    return tuple(map(read, prompts, rows))


def anchored(
    prompt: Sequence[int], ids: Sequence[int], document: int = PREDICTION
) -> SourceText | None:
    """Return the ids as a text to draft from right after the prompt; None for no ids."""
    if not ids:
        return None
    anchor = tuple(prompt[-ANCHOR:])
    return SourceText((*anchor, *ids), document, -len(anchor))
