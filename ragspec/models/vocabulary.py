"""Whether a draft model has the target's vocabulary, by their tokenizers or before torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from ragspec.errors import TokenizerMismatchError
from ragspec.models.checks import TOKENIZERS, check_language_model
from ragspec.models.resolve import resolve_model
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


def check_saved_draft(name: str | Path, target: str | Path) -> None:
    """Raise ModelError if a draft model is none, or its tokenizer.json has another vocabulary."""
    from tokenizers import Tokenizer as Backend

    check_language_model(draft := resolve_model(name))
    sources = resolve_model(target), draft
    files = [each.folder / TOKENIZERS[0] for each in sources if each.file is None]
    if len(files) == 2 and all(file.is_file() for file in files):
        try:
            first, second = (Backend.from_file(str(file)) for file in files)
        except Exception:  # tokenizers has no tree of errors; the loading names the damage
            return
        check_vocabulary(first, second, 0, 0)


def check_vocabulary(
    tokenizer: "Tokenizer | Backend | None",
    other: "Tokenizer | Backend | None",
    target_size: int,
    draft_size: int,
) -> None:
    """Refuse a draft model with another vocabulary than the target's.

    Every id that both tokenizers have must stand for the same token. Special tokens may have
    different names, and the models may pad their vocabularies to different sizes. If a tokenizer
    is None, only the sizes are compared.

    Raises:
        TokenizerMismatchError: The vocabularies differ.
    """
    if tokenizer is None or other is None:
        if target_size != draft_size:
            raise TokenizerMismatchError(
                f"the draft model has {draft_size} token ids and the target {target_size}, and "
                "without both tokenizers they cannot be compared; expected one vocabulary. Pass "
                "draft_model=(model, tokenizer) and the target's tokenizer."
            )
        return
    target, draft = _tokens_by_id(tokenizer), _tokens_by_id(other)
    special = _special_ids(tokenizer) & _special_ids(other)
    shared = target.keys() & draft.keys()
    wrong = sorted(i for i in shared if target[i] != draft[i] and i not in special)
    if wrong or not shared:
        example = "no id in common"
        if wrong:
            theirs = f"{draft[wrong[0]]!r} in the draft model's tokenizer"
            example = f"id {wrong[0]} is {theirs} and {target[wrong[0]]!r} in the target's"
        raise TokenizerMismatchError(
            f"the draft model's tokenizer differs from the target's in {len(wrong)} of "
            f"{len(shared)} token ids ({example}); expected one vocabulary. Use a draft model of "
            "the target's family, or drafter='context', which needs no model."
        )


def _tokens_by_id(tokenizer: "Tokenizer | Backend") -> dict[int, str]:
    return {int(number): str(token) for token, number in tokenizer.get_vocab().items()}


def _special_ids(tokenizer: "Tokenizer | Backend") -> set[int]:
    read = getattr(tokenizer, "get_added_tokens_decoder", None)  # of a file
    return set(getattr(tokenizer, "added_tokens_decoder", {}) if read is None else read())
