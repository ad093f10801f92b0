"""The parts of an image model of transformers: its weights, its text tokenizer, special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import (
    InputError,
    ModelError,
    ModelNotFoundError,
    TokenizerMismatchError,
    UnsupportedModelError,
)
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.models.transformers_targets import prompt_table
from ragspec.visual.pipeline.folder import load_weights
from ragspec.visual.pipeline.request import ImageConfig

PIPELINES = {
    "janus": "JanusPipeline",
    "emu3": "Emu3Pipeline",
    "chameleon": "ChameleonPipeline",
    "llamagen": "LlamaGenPipeline",
}
_TEMPLATE = "chat_template.json"  # where processors kept it before it had a file of its own


def load_part(folder: Path, kind: str, device: torch.device, dtype: str | torch.dtype) -> Any:
    """Return the model of a folder, of the model_type `kind`, in eval mode on the device.

    Raises ModelNotFoundError, UnsupportedModelError for another kind, ModelError.
    """
    import transformers

    _expect(folder, kind)
    model_class = getattr(transformers, f"{kind.capitalize()}ForConditionalGeneration")
    return load_weights(model_class, folder, device, dtype)


def load_processor(folder: Path) -> Any:
    """Return the text tokenizer of a folder, with the chat template of its processor.

    Raises ModelError where there is none, or one that does not load.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.chat_template is None and (folder / _TEMPLATE).is_file():
            template = json.loads((folder / _TEMPLATE).read_text(encoding="utf-8"))
            tokenizer.chat_template = template.get("chat_template")
    except Exception as error:  # a damaged tokenizer.json raises the bare class
        raise ModelError(
            f"{folder} holds no tokenizer that transformers can load ({error}); expected the "
            "files of the model's processor beside its weights. Copy them there."
        ) from error
    return tokenizer


def expect_kind(model: Any, kind: str) -> None:
    """Raise UnsupportedModelError for a model of another kind, with what draws with it."""
    result = getattr(getattr(model, "config", None), "model_type", None)
    if result != kind:
        raise UnsupportedModelError(
            f"got a {type(model).__name__} of type {result!r}; expected {kind!r}.{_advice(result)}"
        )


def mark(tokenizer: Any, attribute: str, *names: str) -> str:
    """Return a special token: the tokenizer's attribute of that name, or the first name it knows.

    Raises InputError where it knows none.
    """
    token = getattr(tokenizer, attribute, None)
    if isinstance(token, str):
        return token
    known = tokenizer.get_vocab()
    result = next((name for name in names if name in known), None)
    if result is None:
        raise InputError(
            f"got a tokenizer without {attribute}"
            + (f" and without {' or '.join(names)}" if names else "")
            + "; expected the tokenizer that the image model came with."
        )
    return result


def text_ids(tokenizer: Any, text: str, last: str) -> list[int]:
    """Return the token ids of a text, which must end with the token `last`; raises InputError."""
    ids = [int(token) for token in tokenizer(text)["input_ids"]]
    if not ids or ids[-1] != tokenizer.convert_tokens_to_ids(last):
        raise InputError(
            f"the tokenizer reads {text[-40:]!r} as ids that do not end with {last!r}; expected "
            "the tokenizer that the image model came with, to which this is one token."
        )
    return ids


def _expect(folder: Path, kind: str) -> None:
    """Raise ModelNotFoundError or UnsupportedModelError for what holds no model of the kind."""
    config = folder / "config.json"
    try:
        record = json.loads(config.read_text(encoding="utf-8"))
        result = record.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        target = (folder / "target" / "config.json").is_file()
        raise ModelNotFoundError(
            f"{folder} holds no config.json that can be read; expected the folder of a {kind!r} "
            "model of transformers." + (" Draw with ImagePipeline." if target else "")
        ) from error
    if result != kind:
        raise UnsupportedModelError(
            f"{folder} is a {result!r} model; expected {kind!r}.{_advice(result)}"
        )


def _advice(result: Any) -> str:
    return f" Draw with {PIPELINES[result]}." if result in PIPELINES else ""


@dataclass(frozen=True, slots=True, eq=False)
class PromptConditions:
    """What the images of one call are of: token ids of prompts, and of what they are guided from.

    make: makes the target of a model, these conditions and a `ImageConfig`.
    """

    prompts: list[list[int]]
    unconditional: list[list[int]]
    make: Callable[[Any, PromptConditions, ImageConfig], ImageTarget]

    def table(self, model: Any) -> ConditionTable:
        """Return what the condition ids stand for in a model."""
        return prompt_table(model, self.prompts, self.unconditional)

    def target(self, model: Any, like: ImageTarget) -> ImageTarget:
        """Return a target over another model, guided and laid out as `like`."""
        assert like.raster is not None
        image = ImageConfig(like.guidance_scale, like.guidance_interval, like.raster)
        return self.make(model, self, image)


def check_prompt_draft(target: Any, draft: Any) -> None:
    """Raise TokenizerMismatchError for a draft model of another kind, prompts or codes."""
    for what, of in (
        ("type", lambda model: model.config.model_type),
        ("text vocabulary", lambda model: model.config.get_text_config().vocab_size),
        ("code-book", lambda model: model.model.vqmodel.quantize.embedding.weight.shape[0]),
        ("tokens of codes", _code_tokens),
    ):
        ours, theirs = of(target), of(draft)
        if ours != theirs:
            got = "others" if isinstance(ours, dict) else theirs
            raise TokenizerMismatchError(
                f"got a draft model with the {what} {got}; expected "
                f"{'those' if isinstance(ours, dict) else ours} of the target. Draft with a model "
                "that shares its prompts and codes."
            )


def _code_tokens(model: Any) -> dict[int, int] | None:
    """Return the text tokens of codes, where codes are such."""
    known = getattr(model.model, "vocabulary_mapping", None)
    return None if known is None else dict(known.img2bpe)
