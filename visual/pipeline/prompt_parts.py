"""The parts of a transformers image model: weights, text tokenizer and special tokens."""

from __future__ import annotations

import json
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
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.pipeline.folder import load_weights
from ragspec.visual.pipeline.request import ImageConfig

PIPELINES = {
    "janus": "JanusPipeline",
    "emu3": "Emu3Pipeline",
    "chameleon": "ChameleonPipeline",
    "llamagen": "LlamaGenPipeline",
}
_TEMPLATE = "chat_template.json"  # the file of older processors


def load_part(folder: Path, kind: str, device: torch.device, dtype: str | torch.dtype) -> Any:
    """Return the model of a folder, of the model_type `kind`, in eval mode on the device.

    Raises:
        ModelNotFoundError: The folder holds no readable config.json.
        UnsupportedModelError: Its model is of another kind.
        ModelError: The model does not load.
    """
    import transformers

    _expect(folder, kind)
    model_class = getattr(transformers, f"{kind.capitalize()}ForConditionalGeneration")
    return load_weights(model_class, folder, device, dtype)


def load_processor(folder: Path) -> Any:
    """Return the text tokenizer of a folder, with the chat template of its processor.

    Raises:
        ModelError: The tokenizer is missing or does not load.
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
    """Raise UnsupportedModelError for a model of another kind; the message names its pipeline."""
    actual = getattr(getattr(model, "config", None), "model_type", None)
    if actual != kind:
        raise UnsupportedModelError(
            f"got a {type(model).__name__} of type {actual!r}; expected {kind!r}.{_advice(actual)}"
        )


def mark(tokenizer: Any, attribute: str, *names: str) -> str:
    """Return a special token: the tokenizer's attribute, or the first name in its vocabulary.

    Raises:
        InputError: The tokenizer has neither.
    """
    token = getattr(tokenizer, attribute, None)
    if isinstance(token, str):
        return token
    vocabulary = tokenizer.get_vocab()
    token = next((name for name in names if name in vocabulary), None)
    if token is None:
        raise InputError(
            f"got a tokenizer without {attribute}"
            + (f" and without {' or '.join(names)}" if names else "")
            + "; expected the tokenizer that the image model came with."
        )
    return token


def text_ids(tokenizer: Any, text: str, last: str) -> list[int]:
    """Return the token ids of a text.

    Raises:
        InputError: They do not end with the token `last`.
    """
    ids = [int(token) for token in tokenizer(text)["input_ids"]]
    if not ids or ids[-1] != tokenizer.convert_tokens_to_ids(last):
        raise InputError(
            f"the tokenizer reads {text[-40:]!r} as ids that do not end with {last!r}; expected "
            "the tokenizer that the image model came with, to which this is one token."
        )
    return ids


def _expect(folder: Path, kind: str) -> None:
    """Raise ModelNotFoundError or UnsupportedModelError if a folder holds no model of the kind."""
    config = folder / "config.json"
    try:
        record = json.loads(config.read_text(encoding="utf-8"))
        actual = record.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        target = (folder / "target" / "config.json").is_file()
        raise ModelNotFoundError(
            f"{folder} holds no config.json that can be read; expected the folder of a {kind!r} "
            "model of transformers." + (" Draw with ImagePipeline." if target else "")
        ) from error
    if actual != kind:
        raise UnsupportedModelError(
            f"{folder} is a {actual!r} model; expected {kind!r}.{_advice(actual)}"
        )


def _advice(kind: Any) -> str:
    return f" Draw with {PIPELINES[kind]}." if kind in PIPELINES else ""


@dataclass(frozen=True, slots=True, eq=False)
class PromptConditions:
    """The conditions of one call's images.

    Attributes:
        prompts: Token ids of each prompt.
        unconditional: Token ids that guidance leads away from, for each prompt.
        target_kind: The class of targets that takes them.
    """

    prompts: list[list[int]]
    unconditional: list[list[int]]
    target_kind: Any

    def __len__(self) -> int:
        return len(self.prompts)

    def open(self, model: Any, config: ImageConfig) -> ImageTarget:
        """Return a target over a model under these conditions."""
        scale, interval = config.guidance_scale, config.guidance_interval
        target: ImageTarget = self.target_kind(
            model,
            self.prompts,
            self.unconditional,
            scale,
            interval,
            raster=config.raster,
            fixed=config.fixed,
        )
        return target


def check_prompt_draft(target: Any, draft: Any) -> None:
    """Raise TokenizerMismatchError if type, text vocabulary or codes differ from the target's."""
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
    """Return the text token of each code, for models whose codes are text tokens."""
    mapping = getattr(model.model, "vocabulary_mapping", None)
    return None if mapping is None else dict(mapping.img2bpe)
