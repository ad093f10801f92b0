"""Whether two models mean the same by a token id."""

from __future__ import annotations

from typing import Any

from ragspec.errors import TokenizerMismatchError


def check_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, target_size: int, draft_size: int
) -> None:
    """Refuse a draft model whose token ids mean something else than the target's.

    The tokenizers must give every id that both have the same token; special tokens may have
    different names. The models' vocabularies may be padded to different sizes. Where a tokenizer
    is None only the sizes can be compared. Raises TokenizerMismatchError.
    """
    if target_tokenizer is None or draft_tokenizer is None:
        if target_size != draft_size:
            raise TokenizerMismatchError(
                f"the draft model has {draft_size} token ids and the target {target_size}, and "
                "without both tokenizers they cannot be compared; expected one vocabulary. Pass "
                "draft_model=(model, tokenizer) and the target's tokenizer."
            )
        return
    target, draft = _tokens_by_id(target_tokenizer), _tokens_by_id(draft_tokenizer)
    special = _special_ids(target_tokenizer) & _special_ids(draft_tokenizer)
    shared = target.keys() & draft.keys()
    wrong = sorted(i for i in shared if target[i] != draft[i] and i not in special)
    if wrong or not shared:
        example = (
            f"id {wrong[0]} is {draft[wrong[0]]!r} in the draft model's tokenizer and "
            f"{target[wrong[0]]!r} in the target's"
            if wrong
            else "no id in common"
        )
        raise TokenizerMismatchError(
            f"the draft model's tokenizer differs from the target's in {len(wrong)} of "
            f"{len(shared)} token ids ({example}); expected one vocabulary. Use a draft model of "
            "the target's family, or drafter='context', which needs no model."
        )


def _tokens_by_id(tokenizer: Any) -> dict[int, str]:
    return {int(number): str(token) for token, number in tokenizer.get_vocab().items()}


def _special_ids(tokenizer: Any) -> set[int]:
    return {int(number) for number in getattr(tokenizer, "added_tokens_decoder", {})}
