"""The folders of an image generator: target, tokenizer, draft model and feature head.

A folder holds `target/` (a `LlamaGenModel`), `tokenizer/` (a diffusers `VQModel`; beside the folder
if several share it) and optionally `draft/` and `head/`. A folder that is itself a `LlamaGenModel`
is a target alone. The bundled sets have names, such as "tiles" and "emoji".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ragspec.errors import (
    InputError,
    ModelError,
    ModelNotFoundError,
    TokenizerMismatchError,
    UnsupportedModelError,
)
from ragspec.models.device import pick_device, pick_dtype
from ragspec.models.resolve import STARTER, resolve_model
from ragspec.registry import did_you_mean
from ragspec.visual.pipeline.relaxation import FILE
from ragspec.visual.pipeline.saved_setup import SETUP

if TYPE_CHECKING:
    from ragspec.visual.models.captions import Captions, TextEncoder
    from ragspec.visual.models.vq import VQTokenizer

SETS = ("emoji", "tiles", "latent-tiles", "latent-emoji", "masked-tiles")
BUNDLED = STARTER / "images"
_CONFIG = "config.json"
# The model_type of models over codes, over continuous latents and over masked latents.
CODES, LATENTS, MASKED = "llamagen", "ragspec-latents", "ragspec-masked-latents"
_PIPELINES = {CODES: "ImagePipeline", LATENTS: "LatentPipeline", MASKED: "MaskedLatentPipeline"}
_CLASSES = {
    CODES: ("ragspec.visual.models.llamagen", "LlamaGenModel"),
    LATENTS: ("ragspec.visual.latents.model", "LatentModel"),
    MASKED: ("ragspec.visual.masked.model", "MaskedModel"),
}
# Name of the target and pipeline of other models, by model_type; ImageGPT has no pipeline.
_OTHERS = {"janus": "Janus", "emu3": "Emu3", "chameleon": "Chameleon", "imagegpt": "ImageGPT"}
_UNNAMED = "LABEL_"  # transformers' prefix of classes without a name


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """The folders and files of an image generator; None for those that are missing.

    Attributes:
        relaxation: The settings of relaxed rules, `relaxation.json`.
        index: How the saved pipeline generates, `ragspec.json`.
    """

    name: str
    target: Path
    tokenizer: Path | None
    draft: Path | None
    head: Path | None
    relaxation: Path | None = None
    index: Path | None = None


def find_folder(name: str | Path, offline: bool = False) -> ImageFolder:
    """Return the parts of a bundled set such as "tiles", of a folder or of a model id.

    Args:
        offline: Never ask the hub.

    Raises:
        ModelNotFoundError: Nothing has the name; the message says what was tried.
    """
    root = BUNDLED / str(name) if str(name) in SETS else Path(name).expanduser()
    if not _is_model(root) and not _is_model(root / "target"):
        root = _elsewhere(str(name), root, offline)
    target = root / "target" if _is_model(root / "target") else root
    places = (root / "tokenizer", root.parent / "tokenizer")
    return ImageFolder(
        name=str(name),
        target=target,
        tokenizer=next((place for place in places if _is_model(place)), None),
        draft=_if_model(root / "draft"),
        head=_if_model(root / "head"),
        relaxation=root / FILE if (root / FILE).is_file() else None,
        index=root / SETUP if (root / SETUP).is_file() else None,
    )


def load_model(
    folder: Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    kind: str = CODES,
) -> Any:
    """Return the image model of a folder, in eval mode on the device.

    Args:
        kind: The model_type that its configuration must have: `CODES`, `LATENTS` or `MASKED`.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ModelError: The folder holds no such model.
        InputError: The device or dtype is not available.
    """
    module, name = _CLASSES[kind]
    if not _is_model(folder):
        raise ModelNotFoundError(f"{folder} holds no {_CONFIG}; expected a saved {name}.")
    _expect_ours(folder, kind, name)
    return load_weights(getattr(import_module(module), name), folder, pick_device(device), dtype)


def load_weights(kind: Any, folder: Path, device: torch.device, dtype: str | torch.dtype) -> Any:
    """Return a model of the class `kind` from its folder, in eval mode on the device.

    Raises:
        ModelError: The model does not load, or lacks weights.
    """
    from safetensors import SafetensorError

    try:
        model, info = kind.from_pretrained(
            folder,
            dtype=pick_dtype(dtype, device),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        raise ModelError(
            f"{folder} does not load as a {kind.__name__} ({error}); expected what its "
            "save_pretrained wrote. Copy it again."
        ) from error
    if info["missing_keys"]:  # transformers would use random ones
        lacking = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelError(f"{folder} lacks the weights {lacking}; expected all. Copy it again.")
    return model.to(device).eval()


def load_published(
    load: Callable[..., Any],
    path: Path,
    device: torch.device,
    dtype: str | torch.dtype,
    **sizes: Any,
) -> Any:
    """Return the model that `load` reads from a published file, on the device.

    Args:
        dtype: See `pick_dtype`; "auto" keeps the file's on an accelerator.
        sizes: Other arguments of `load`.
    """
    kind = pick_dtype(dtype, device)
    return load(path, dtype=kind if isinstance(kind, torch.dtype) else None, **sizes).to(device)


def kind_of(folder: Path) -> Any:
    """Return the model_type in the configuration of a folder; None without one."""
    return _read_config(folder).get("model_type")


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a folder; empty if it cannot be read."""
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def load_tokenizer(folder: ImageFolder, device: torch.device) -> VQTokenizer:
    """Return the tokenizer of an image generator on the device.

    Raises:
        ModelNotFoundError: It has none.
        ModelError: The tokenizer does not load.
    """
    from ragspec.visual.models.vq import VQTokenizer

    if folder.tokenizer is None:
        raise ModelNotFoundError(
            f"no tokenizer was found for {folder.name}: expected a diffusers VQModel in "
            f"{folder.target.parent / 'tokenizer'}, or give tokenizer=PATH."
        )
    tokenizer = VQTokenizer.from_pretrained(folder.tokenizer)
    tokenizer.model.to(device)
    return tokenizer


def check_model(model: Any) -> None:
    """Raise UnsupportedModelError for a model that `ImagePipeline` does not support."""
    owner = getattr(model, "model", None) if type(model).__name__.endswith("Target") else model
    kind = getattr(getattr(owner, "config", None), "model_type", None)
    if kind == CODES and owner is model:
        return
    usage = f"{_OTHERS.get(str(kind), 'Janus')}Target(model, ...)" if owner is model else "target"
    advice = (
        "Give the target's model."
        if kind == CODES
        else f"{_pipeline_of(kind)} codes of other models with Engine({usage}, None, drafter), "
        "whose targets are in ragspec.visual.models.transformers_targets."
    )
    described = type(model).__name__ + (f" of type {kind!r}" if kind else "")
    raise UnsupportedModelError(f"got a {described}; expected a LlamaGenModel. {advice}")


def _pipeline_of(kind: Any) -> str:
    name = _OTHERS.get(str(kind))
    if name in (None, "ImageGPT"):
        return "Draw the"
    return f"Draw with {name}Pipeline(model, processor), or the"


def check_tokenizer(model: Any, tokenizer: VQTokenizer) -> None:
    """Raise TokenizerMismatchError if model and tokenizer differ in the number of codes."""
    codes = int(model.config.vocab_size)
    if tokenizer.vocab_size != codes:
        raise TokenizerMismatchError(
            f"got a tokenizer with a code-book of {tokenizer.vocab_size} for a model of {codes} "
            "codes; expected the code-book that the model was trained on. Give its tokenizer."
        )


def check_draft(target: Any, draft: Any) -> None:
    """Raise TokenizerMismatchError if codes, image size or conditions differ from the target's."""
    for what in ("vocab_size", "grid_size", "condition", "condition_length"):
        ours, theirs = getattr(target.config, what), getattr(draft.config, what, None)
        if ours != theirs:
            raise TokenizerMismatchError(
                f"got a draft model with {what} {theirs}; expected {ours}, the target's. Draft "
                "with a model that was trained on the same codes and conditions."
            )
    last = "num_classes" if target.config.condition == "class" else "caption_dim"
    if getattr(target.config, last) != getattr(draft.config, last):
        raise TokenizerMismatchError(
            f"got a draft model with {last} {getattr(draft.config, last)}; expected "
            f"{getattr(target.config, last)}, the target's."
        )


def class_names(model: Any) -> tuple[str, ...]:
    """Return the class names in a model's config, in order; empty unless every class has one."""
    config = model.config
    if config.condition != "class":
        return ()
    labels = {int(number): str(name) for number, name in (config.id2label or {}).items()}
    names = tuple(labels.get(number, "") for number in range(config.num_classes))
    unnamed = any(not name or name.startswith(_UNNAMED) for name in names)
    return () if unnamed else names


def caption_encoder(model: Any, inputs: Any = None) -> Captions | None:
    """Return the text encoder of a model; None for class labels, or if the bundled one misfits.

    Args:
        inputs: A folder or model id of a transformers text encoder, or a function of texts; None
            for the bundled encoder.

    Raises:
        InputError: The model is conditioned on classes, or on features of another width.
        ModelNotFoundError, ModelError: The encoder is missing or does not load.
    """
    from ragspec.visual.models.captions import EMBEDDER, CaptionEncoder, TextEncoder

    if inputs is not None:
        return _checked_encoder(model, inputs, TextEncoder)
    if model.config.condition == "class":
        return None
    folder = resolve_model(EMBEDDER, offline=True).folder
    encoder = CaptionEncoder.from_pretrained(folder, model.config.condition_length)
    return encoder if encoder.width == model.config.caption_dim else None


def _checked_encoder(model: Any, inputs: Any, kind: type[TextEncoder]) -> Captions:
    if model.config.condition == "class":
        raise InputError(
            "got a text_encoder for a model of classes; expected one that reads features. Leave it "
            "out, and draw with class_labels."
        )
    if isinstance(inputs, str | Path):
        length = int(model.config.condition_length)
        inputs = kind.from_pretrained(inputs, length, model.device, model.dtype)
    width = getattr(inputs, "width", model.config.caption_dim)
    if not callable(inputs) or width != model.config.caption_dim:
        got = f"one of {width} numbers a token" if callable(inputs) else repr(inputs)
        raise InputError(
            f"got text_encoder {got}; expected a name, a folder or a function of texts with "
            f"{model.config.caption_dim} numbers a token, what the image model was trained with."
        )
    encoder: Captions = inputs
    return encoder


def _expect_ours(folder: Path, ours: str, name: str) -> None:
    """Raise UnsupportedModelError if a folder's configuration names another kind of model."""
    config = _read_config(folder)  # loading reports a broken one
    keys = ("model_type", "_class_name", "kind")  # of transformers, of diffusers, of heads
    kind = next((config[key] for key in keys if config.get(key)), None)
    if kind not in (None, ours):
        other = f" Draw with {_PIPELINES[kind]}." if kind in _PIPELINES else ""
        raise UnsupportedModelError(
            f"{folder} is a {kind!r} model; expected {ours!r}, a saved {name}. Name the "
            f"folder of an image generator.{other}"
        )


def _is_model(folder: Path) -> bool:
    return (folder / _CONFIG).is_file()


def _if_model(folder: Path) -> Path | None:
    return folder if _is_model(folder) else None


def _elsewhere(name: str, tried: Path, offline: bool) -> Path:
    """Return the folder of a model id in the cache or on the hub."""
    if not tried.exists() and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return resolve_model(name, offline=offline).folder
    if name in SETS:
        raise ModelNotFoundError(f"the bundled set {name!r} is missing ({tried}); install again.")
    state = f"holds neither {_CONFIG} nor target/{_CONFIG}" if tried.is_dir() else "is no folder"
    raise ModelNotFoundError(
        f"no image model {name!r} was found.{did_you_mean(name, SETS)} {tried} {state}; expected "
        f"a bundled set ({', '.join(SETS)}) or a folder with target/ and tokenizer/."
    )
