"""The folders of an image generator, and the family of its model.

A folder holds `target/`, `tokenizer/` (a diffusers `VQModel`; beside the folder if several share
it) or `vae/` (an `AutoencoderKL`), and optionally `draft/` and `head/`. A folder may also be the
target itself, with `draft/` in it. The bundled sets have names, such as "tiles" and "emoji".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.errors import ModelNotFoundError, UnknownNameError, UnsupportedModelError
from ragspec.models.checks import CONFIG, check_tensors
from ragspec.models.resolve import STARTER, resolve_model
from ragspec.registry import did_you_mean, names, resolve, unknown
from ragspec.visual.saved import AUTO, NONE, RELAXATION, SETUP

SETS = ("emoji", "tiles", "latent-tiles", "latent-emoji", "masked-tiles")
BUNDLED = STARTER / "images"
_UNNAMED = "LABEL_"  # transformers' prefix of classes without a name
JACOBI, MODEL, HEAD = "jacobi", "model", "head"
NAMES = (AUTO, NONE, JACOBI, MODEL, HEAD)


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """The folders and files of an image generator; None for those that are missing.

    Attributes:
        target: The folder of the model, or a published file, with nothing beside it.
        relaxation: The settings of relaxed rules, `relaxation.json`.
        index: How the saved pipeline generates, `ragspec.json`.
    """

    name: str
    target: Path
    tokenizer: Path | None = None
    draft: Path | None = None
    head: Path | None = None
    relaxation: Path | None = None
    index: Path | None = None


def find_folder(name: str | Path, offline: bool = False) -> ImageFolder:
    """Return the parts of a bundled set such as "tiles", of a folder, a file or a model id.

    Args:
        offline: Never ask the hub.

    Raises:
        ModelNotFoundError: Nothing has the name; the message says what was tried.
    """
    root = BUNDLED / str(name) if str(name) in SETS else Path(name).expanduser()
    if root.is_file():
        return ImageFolder(str(name), root)
    if not is_model(root) and not is_model(root / "target"):
        root = _elsewhere(str(name), root, offline)
    target = root / "target" if is_model(root / "target") else root
    places = (target.parent / "vae", root / "tokenizer", root.parent / "tokenizer")
    return ImageFolder(
        name=str(name),
        target=target,
        tokenizer=next((place for place in places if is_model(place)), None),
        relaxation=root / RELAXATION if (root / RELAXATION).is_file() else None,
        index=root / SETUP if (root / SETUP).is_file() else None,
        **{part: root / part for part in ("draft", "head") if is_model(root / part)},
    )


def find_draft(drafter: str | Path, folder: ImageFolder | None) -> Path:
    """Return the folder or file of a draft model or head; raise an error if there is none, whole.

    Args:
        drafter: Its path, or "model" or "head" for the one beside the target.
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


def read_kind(folder: Path, expected: str = "") -> str | None:
    """Return the kind of model in a folder's configuration; None if it names none.

    Args:
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


def expect_kind(model: object, kind: str) -> None:
    """Raise UnsupportedModelError for a model of another kind; the message names its family."""
    actual = kind_of_model(model)
    if actual != kind:
        raise UnsupportedModelError(
            f"got a {type(model).__name__} of type {actual!r}; expected {kind!r}.{advice(actual)}"
        )


def kind_of_model(model: object) -> str | None:
    """Return the model_type of a model; None for other objects, targets among them."""
    from torch.nn import Module

    if not isinstance(model, Module):
        return None
    return getattr(getattr(model, "config", None), "model_type", None)


def advice(kind: str | None) -> str:
    """Return the family of a kind of model, for a message; empty if there is none."""
    every = {resolve("family", name).kind: name for name in names("family")}
    return f" Use family={every[kind]!r}." if kind in every else ""


def is_model(folder: Path) -> bool:
    """Return whether a folder holds the configuration of a model."""
    return (folder / CONFIG).is_file()


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
