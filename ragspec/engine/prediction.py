"""Predicted outputs: a text that the answer will resemble, as one more source to draft from.

The form is that of OpenAI's Predicted Outputs; here the prediction changes nothing but the speed.
The last tokens of the prompt are put before it, so that a match leads from the prompt into its
beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from ragspec.drafters.base import SourceText
from ragspec.engine.prompts import well_formed
from ragspec.errors import InputError
from ragspec.trees.draft_tree import PREDICTION

ANCHOR = 4  # tokens of the prompt; more would make a first match look surer than it is

_FORMS = (
    "expected a text, token ids, {'type': 'content', 'content': text}, or a list with one of "
    "these or None for each prompt"
)


def read_prediction(
    prediction: Any, prompts: Sequence[Sequence[int]], tokenizer: Any, vocab_size: int
) -> tuple[SourceText | None, ...]:
    """Return what is predicted for each prompt, ready to draft from; () for no prediction.

    prediction: a text, token ids, OpenAI's mapping, or a list of these or None, one for each
    prompt; a single one serves all prompts. Raises InputError for other forms, text without a
    tokenizer and ids outside the vocabulary.
    """
    if prediction is None:
        return ()
    several = isinstance(prediction, Sequence) and not isinstance(prediction, str | bytes)
    if several and len(prediction) and not isinstance(prediction[0], Integral):
        return _one_each(prediction, prompts, tokenizer, vocab_size)
    ids = _encode(prediction, tokenizer, vocab_size)
    return tuple(anchored(prompt, ids) for prompt in prompts)


def _one_each(
    predictions: Sequence[Any], prompts: Sequence[Sequence[int]], tokenizer: Any, vocab_size: int
) -> tuple[SourceText | None, ...]:
    if len(predictions) != len(prompts):
        raise InputError(
            f"got {len(predictions)} predictions for {len(prompts)} prompts; expected one for each "
            "prompt (None where nothing is predicted), or a single one for all."
        )
    return tuple(
        None if one is None else anchored(prompt, _encode(one, tokenizer, vocab_size))
        for prompt, one in zip(prompts, predictions, strict=True)
    )


def anchored(
    prompt: Sequence[int], ids: Sequence[int], document: int = PREDICTION
) -> SourceText | None:
    """Return the ids as a text to draft from right after the prompt; None for no ids."""
    if not ids:
        return None
    anchor = tuple(prompt[-ANCHOR:])
    return SourceText((*anchor, *ids), document, -len(anchor))


def _encode(prediction: Any, tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the token ids of one prediction."""
    text = _content(prediction)
    if isinstance(text, str):
        if tokenizer is None:
            raise InputError(
                "got a text as a prediction but the engine has no tokenizer; pass one, or token ids"
            )
        return [int(i) for i in tokenizer(well_formed(text), add_special_tokens=False)["input_ids"]]
    ids_value = isinstance(text, Sequence) and not isinstance(text, (bytes, bytearray))
    if not ids_value or not all(isinstance(i, Integral) for i in text):
        raise InputError(f"got {type(prediction).__name__} as a prediction; {_FORMS}.")
    ids = [int(i) for i in text]
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise InputError(
            f"the prediction has the token id {wrong}; expected 0 to {vocab_size - 1}. Was it "
            "made with another tokenizer?"
        )
    return ids


def _content(prediction: Any) -> Any:
    """Return the text of OpenAI's form, whose content may come in parts; others as they are."""
    if not isinstance(prediction, Mapping):
        return prediction
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else (None,)
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"got a prediction without text in 'content'; {_FORMS}.")
    return "".join(str(text) for text in texts)
