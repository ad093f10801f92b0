"""Tokens of texts that may spell out special tokens, which then are tokenized as plain text.

A prompt mixes the special tokens of a template with texts of documents and users. Marks stand in
the special tokens that these texts spell out, until the whole is tokenized: they keep the tokenizer
from taking them for control tokens, and leave no trace in tokens, text and offsets.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragspec.errors import InputError
from ragspec.sampling.decoding import decoder_of
from ragspec.types import Tokenizer

Message = Mapping[str, Any]
MARK = "\ufdd0"  # a noncharacter, which texts do not have


@dataclass(frozen=True, slots=True)
class Encoding:
    """A text of T tokens.

    Attributes:
        text: Without marks.
        offsets: The characters (start, end) of each token; empty if the tokenizer has none.
    """

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


def mark_special_tokens(text: str, tokenizer: Tokenizer) -> str:
    """Mark the special tokens that a text spells out, for `encode_text`."""
    for token in decoder_of(tokenizer).special:
        if len(token) > 1 and token in text:
            text = text.replace(token, token[0] + MARK + token[1:])
    return text


def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """Tokenize a text; special tokens count only where they are not marked."""
    encoded = _encode(tokenizer, [text], add_special_tokens)
    if MARK not in text:
        return encoded
    marks = [at for at, character in enumerate(text) if character == MARK]
    tokens = list(zip(encoded.ids, encoded.offsets, strict=False))
    plain = [(token, span) for token, span in tokens if not _holds(marks, *span)]
    alone = all(end - start == 1 for _, (start, end) in tokens if _holds(marks, start, end))
    if not encoded.offsets or not alone:
        return _encode(tokenizer, text.split(MARK), add_special_tokens)
    offsets = [(a - bisect_left(marks, a), b - bisect_left(marks, b)) for _, (a, b) in plain]
    return Encoding(text.replace(MARK, ""), tuple(token for token, _ in plain), tuple(offsets))


def _holds(marks: Sequence[int], start: int, end: int) -> bool:
    """Return whether a mark stands between two characters."""
    return bisect_left(marks, start) < bisect_left(marks, end)


def _encode(tokenizer: Tokenizer, parts: Sequence[str], add_special_tokens: bool) -> Encoding:
    """Tokenize the parts of a text one by one, as marks that tokens hide must be cut out.

    A tokenizer that begins every text with a space does so at each part.
    """
    more = {"verbose": False, "return_offsets_mapping": getattr(tokenizer, "is_fast", False)}
    ids, offsets, start = list[int](), list[tuple[int, int]](), 0
    for number, part in enumerate(parts):
        encoded = tokenizer(part, add_special_tokens=add_special_tokens and not number, **more)
        ids += map(int, encoded["input_ids"])
        offsets += [(start + int(a), start + int(b)) for a, b in encoded.get("offset_mapping", ())]
        start += len(part)
    return Encoding("".join(parts), tuple(ids), tuple(offsets))


def render_chat(tokenizer: Tokenizer, turns: Sequence[Message], /, **options: object) -> str:
    """Return turns in the chat template, followed by the beginning of an answer.

    If the last turn is the assistant's, the answer goes on after its text. Options are those of
    `apply_chat_template`, such as variables of the template.

    Raises:
        InputError: The template refuses the turns.
    """
    last = turns[-1]
    open_turn = last["role"] == "assistant" and not last.get("tool_calls")
    if open_turn and not (last.get("content") or "").strip():  # a template may trim it
        turns, open_turn = turns[:-1], False
    form = {"add_generation_prompt": not open_turn, "continue_final_message": open_turn}
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **form, **options))
    except Exception as error:  # a template raises whatever its author wrote
        roles = ", ".join(str(turn["role"]) for turn in turns)
        raise InputError(
            f"the model's chat template refuses the messages ({error}); got the roles {roles}. "
            "Expected turns as its authors ask for them, mostly user and assistant by turns, and "
            "with some models no system text."
        ) from error
