"""The forms in which a prompt may come, brought to one: lists of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragspec.errors import InputError, PromptTooLongError

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | torch.Tensor
Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]]

_FORMS = (
    "expected a text, chat messages ({'role', 'content'}), token ids, or a list of one of these"
)


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """Token ids of each prompt, and whether a single one was given (so one result comes back)."""

    ids: list[list[int]]
    single: bool


def encode_prompts(
    prompts: Any,
    tokenizer: Any,
    vocab_size: int,
    attention_mask: torch.Tensor | None = None,
) -> EncodedPrompts:
    """Return the token ids of one prompt or a batch in any accepted form.

    A tensor [T] or [1, T] and a flat list of ids are one prompt, a tensor [B, T] or a list of
    lists is a batch; attention_mask [B, T] marks padding. Raises InputError for an empty prompt,
    ids outside the vocabulary, text without a tokenizer, and other types.
    """
    if isinstance(prompts, torch.Tensor):
        found = _from_tensor(prompts, attention_mask)
    elif isinstance(prompts, str):
        found = EncodedPrompts([_encode(prompts, tokenizer)], True)
    elif isinstance(prompts, Sequence) and len(prompts) > 0:
        found = _from_list(prompts, tokenizer)
    else:
        raise InputError(f"got {_described(prompts)} as a prompt; {_FORMS}")
    for number, ids in enumerate(found.ids):
        _check(ids, number, vocab_size)
    return found


def check_length(prompt: int, new: int, limit: int | None) -> None:
    """Refuse a text that would outgrow the context of the model.

    Raises PromptTooLongError with the numbers.
    """
    if limit is not None and prompt + new > limit:
        raise PromptTooLongError(
            f"the prompt has {prompt} tokens and {new} new ones were asked for: {prompt + new} "
            f"exceed the model's context of {limit}. Shorten the prompt by "
            f"{prompt + new - limit} tokens or pass max_new_tokens={max(0, limit - prompt)}."
        )


def _from_tensor(ids: torch.Tensor, mask: torch.Tensor | None) -> EncodedPrompts:
    if ids.dtype not in (torch.int64, torch.int32) or ids.ndim not in (1, 2):
        raise InputError(
            f"got a tensor of {ids.dtype} with shape {list(ids.shape)} as a prompt; expected "
            "token ids, int64, shape [T] or [B, T]"
        )
    rows = ids[None] if ids.ndim == 1 else ids
    if mask is None:
        return EncodedPrompts(rows.tolist(), len(rows) == 1)
    kept = [row[keep.bool()].tolist() for row, keep in zip(rows, mask, strict=True)]
    return EncodedPrompts(kept, len(rows) == 1)


def _from_list(prompts: Sequence[Any], tokenizer: Any) -> EncodedPrompts:
    first = prompts[0]
    if _is_id(first):
        return EncodedPrompts([[int(token) for token in prompts]], True)
    if isinstance(first, Mapping):
        return EncodedPrompts([_chat(prompts, tokenizer)], True)
    rows = [encode_prompts(prompt, tokenizer, 1 << 62).ids[0] for prompt in prompts]
    return EncodedPrompts(rows, False)


def _encode(text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise InputError(
            "got a text as a prompt but the engine has no tokenizer; pass "
            "Engine(model, tokenizer) or token ids"
        )
    return list(tokenizer(text)["input_ids"])


def _chat(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "got chat messages but the tokenizer has no chat template; pass a text, or set "
            "tokenizer.chat_template"
        )
    ids = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    return list(ids)


def _check(ids: list[int], number: int, vocab_size: int) -> None:
    if not ids:
        raise InputError(f"prompt {number} is empty; give at least one token to go on from")
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise InputError(
            f"prompt {number} has the token id {wrong}; expected 0 to {vocab_size - 1}. Was it "
            "made with another tokenizer?"
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) or (
        hasattr(value, "__index__") and not isinstance(value, (str, torch.Tensor))
    )


def _described(value: Any) -> str:
    if isinstance(value, Sequence):
        return f"an empty {type(value).__name__}"
    return f"an object of type {type(value).__name__}"
