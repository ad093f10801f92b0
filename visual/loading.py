"""The folders of an image generator: target, tokenizer, draft model and draft head.

A folder holds `target/`, `tokenizer/` (a diffusers `VQModel`; beside the folder if several share
it) and optionally `draft/` and `head/`. A folder may also be the target itself, with `draft/` in
it. The bundled sets have names, such as "tiles" and "emoji".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError, ModelError, ModelNotFoundError, UnknownNameError
from ragspec.models.checks import CONFIG, check_tensors
from ragspec.models.resolve import STARTER, resolve_model
from ragspec.registry import did_you_mean, unknown
from ragspec.visual.saved import RELAXATION, SETUP

if TYPE_CHECKING:
    import torch

    from ragspec.visual.models.vq import VQTokenizer

SETS = ("emoji", "tiles", "latent-tiles", "latent-emoji", "masked-tiles")
BUNDLED = STARTER / "images"
_UNNAMED = "LABEL_"  # transformers' prefix of classes without a name
AUTO, NONE, JACOBI, MODEL, HEAD = NAMES = ("auto", "none", "jacobi", "model", "head")


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
    if not is_model(root) and not is_model(root / "target"):
        root = _elsewhere(str(name), root, offline)
    target = root / "target" if is_model(root / "target") else root
    places = (root / "tokenizer", root.parent / "tokenizer")
    return ImageFolder(
        name=str(name),
        target=target,
        tokenizer=next((place for place in places if is_model(place)), None),
        draft=_if_model(root / "draft"),
        head=_if_model(root / "head"),
        relaxation=root / RELAXATION if (root / RELAXATION).is_file() else None,
        index=root / SETUP if (root / SETUP).is_file() else None,
    )


def find_draft(drafter: str | Path, folder: ImageFolder | None) -> Path:
    """Return the folder or file of a draft model or head; raise an error if there is none, whole.

    Args:
        drafter: Its path, or "model" or "head" for the one beside the target.
        folder: Of the target.
    """
    text, path = str(drafter), Path(drafter).expanduser()
    if text in NAMES:
        place = None if folder is None else folder.draft if text == MODEL else folder.head
        if place is None:
            raise ModelNotFoundError(
                f"drafter {text!r}: nothing of that kind lies with the target; expected draft/ or "
                "head/ beside it. Give the folder of a draft model, 'jacobi', or None."
            )
        return place
    if not (path.is_file() or is_model(path)):
        if path.is_dir() or isinstance(drafter, Path) or text.startswith((".", "/", "~")):
            raise ModelNotFoundError(
                f"no draft model at {path}: it holds no {CONFIG}. Expected the folder of a smaller "
                "model of the target's kind, or of a draft head."
            )
        raise UnknownNameError(unknown("image drafter", text, NAMES))
    for file in path.glob("*.safetensors"):
        check_tensors(file)
    return path


def load_weights(kind: Any, folder: Path, device: torch.device, dtype: str | torch.dtype) -> Any:
    """Return a model of the class `kind` from its folder, in eval mode on the device.

    Raises:
        ModelError: The model does not load, or lacks weights.
    """
    from safetensors import SafetensorError

    from ragspec.models.device import pick_dtype

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
            f"{folder} does not load as a {kind.__name__} ({error}). Copy it again."
        ) from error
    if info["missing_keys"]:  # transformers would use random ones
        lacking = ", ".join(sorted(info["missing_keys"])[:3])
        raise ModelError(f"{folder} lacks the weights {lacking}; expected all. Copy it again.")
    return model.to(device).eval()


def read_kind(folder: Path, expected: str = "") -> str | None:
    """Return the kind of model in a folder's configuration; None if it names none.

    Args:
        folder: Of the model.
        expected: The kind of model to name if there is no configuration.

    Raises:
        ModelNotFoundError: The folder holds no config.json.
    """
    if not is_model(folder):
        raise ModelNotFoundError(
            f"{folder} holds no {CONFIG}; expected the folder of a {expected!r} model."
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        keys = ("model_type", "_class_name", "kind")  # of transformers, of diffusers, of heads
        return next((str(config[key]) for key in keys if config.get(key)), None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # loading reports a broken one


def class_labels(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the class names of a model's configuration, in order.

    They are empty unless every class has one, and None for a model that reads prompts.
    """
    config = config.get("trunk") or config  # of causal latents
    if config.get("condition", "class") != "class":
        return None
    labels = {int(number): str(name) for number, name in (config.get("id2label") or {}).items()}
    count = config.get("num_classes", len(labels))
    names = tuple(labels.get(number, "") for number in range(count))
    unnamed = any(not name or name.startswith(_UNNAMED) for name in names)
    return () if unnamed else names


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


def is_model(folder: Path) -> bool:
    """Return whether a folder holds the configuration of a model."""
    return (folder / CONFIG).is_file()


def _if_model(folder: Path) -> Path | None:
    return folder if is_model(folder) else None


def _elsewhere(name: str, tried: Path, offline: bool) -> Path:
    """Return the folder of a model id in the cache or on the hub."""
    if not tried.exists() and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return resolve_model(name, offline=offline).folder
    if name in SETS:
        raise ModelNotFoundError(f"the bundled set {name!r} is missing ({tried}); install again.")
    state = f"holds neither {CONFIG} nor target/{CONFIG}" if tried.is_dir() else "is no folder"
    raise ModelNotFoundError(
        f"no image model {name!r} was found.{did_you_mean(name, SETS)} {tried} {state}; expected "
        f"a bundled set ({', '.join(SETS)}) or a folder with target/ and tokenizer/."
    )
