"""The folders of an image generator, the family of its model, and the settings beside it.

A folder holds `target/`, `tokenizer/` (a diffusers `VQModel`; beside the folder if several share
it) or `vae/` (an `AutoencoderKL`), and optionally `draft/` and `head/`. A folder may also be the
target itself, with `draft/` in it. The bundled sets have names, such as "tiles" and "emoji".
`ragspec.json` has the rule, the drafter, the budget and the batch size of a saved pipeline.
`relaxation.json` has the settings of relaxed rules that were measured on the model and ship with
it; the benchmark of images writes it (`--tune`).
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.errors import MissingModelError, ModelError, RagspecError, UnsupportedModelError
from ragspec.models import resolve
from ragspec.models.checks import CONFIG, check_tensors, read_config
from ragspec.registry import did_you_mean, entries, expect_known
from ragspec.visual.checks import DENOISING, check_drafters

SETS = ("emoji", "tiles", "latent-tiles", "latent-emoji", "masked-tiles")
BUNDLED = resolve.STARTER / "images"
SETUP, RELAXATION = "ragspec.json", "relaxation.json"
IMAGE_MODEL = (
    "an image model. Open a published file in Python with ImagePipeline.from_pretrained, and "
    "save_pretrained writes its folder"
)
# Files of save_pretrained beside configurations.
PARTS = (
    *("target", "tokenizer", "vae", "vq", "draft", "head", RELAXATION),
    *("model.safetensors*", "model-*-of-*.safetensors"),
)
FORMAT = 1  # of relaxation.json
AUTO, NONE = "auto", "none"
_DRAFTING = ("draft_mode", "min_expected_gain")  # apply with the saved drafter alone
_UNNAMED = "LABEL_"  # transformers' prefix of classes without a name
JACOBI, MODEL, HEAD = "jacobi", "model", "head"
NAMES = (AUTO, NONE, JACOBI, MODEL, HEAD)


@contextmanager
def expect_readable(subject: str, expected: str) -> Iterator[None]:
    """Raise ModelError, which begins with the subject, for any error of damaged files."""
    try:
        yield
    except (RagspecError, MemoryError):
        raise
    except Exception as error:  # damaged files may raise any
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{subject} ({reason}); expected {expected}") from error


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
        MissingModelError: Nothing has the name; the message says what was tried.
    """
    root = BUNDLED / str(name) if str(name) in SETS else Path(os.path.expanduser(name))
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
    text, path = str(drafter), Path(os.path.expanduser(drafter))
    if text in NAMES:
        place = None if folder is None else folder.draft if text == MODEL else folder.head
        if place is None:
            raise MissingModelError(
                f"drafter {text!r}: nothing of that kind lies with the target; expected draft/ or "
                "head/ beside it. Give the folder of a draft model, 'jacobi', or None."
            )
        return place
    if not (path.is_file() or is_model(path)):
        if path.is_dir() or isinstance(drafter, Path) or text.startswith((".", "/", "~")):
            raise MissingModelError(
                f"no draft model at {path}: it holds no {CONFIG}. Expected the folder of a smaller "
                "model of the target's kind, or of a draft head."
            )
        expect_known("image drafter", [text], NAMES)
    for file in path.glob("*.safetensors"):
        check_tensors(file)
    return path


def check_drafts(
    names: Sequence[str], folder: ImageFolder, kind: str | None, mode: str = "coupled"
) -> None:
    """Raise an error for drafters that do not fit each other, the rule's drafts or the model."""
    check_drafters(names, mode, kind not in DENOISING)
    for name in names:
        if name not in (AUTO, JACOBI):
            find_draft(name, folder)


def read_kind(folder: Path, expected: str = IMAGE_MODEL) -> str | None:
    """Return the kind of model in a folder's configuration; None if it names none.

    Args:
        expected: The model to name if there is no configuration.

    Raises:
        MissingModelError: The folder holds no config.json, or is a file.
        ModelError: The configuration cannot be read.
    """
    if not is_model(folder):
        raise MissingModelError(f"{folder} holds no {CONFIG}; expected the folder of {expected}.")
    config = read_config(folder / CONFIG)
    keys = ("model_type", "_class_name", "kind")  # of transformers, of diffusers, of heads
    return next((str(config[key]) for key in keys if config.get(key)), None)


def class_labels(config: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the class names of a configuration, in order; raise ModelError for a damaged one.

    They are empty unless every class has one, and None for a model that reads prompts.
    """
    expected = "a number as num_classes, and names in id2label. Copy the file again."
    with expect_readable(f"the classes in the model's {CONFIG} cannot be read", expected):
        config = config.get("trunk") or config  # of causal latents
        if config.get("condition", "class") != "class":
            return None
        labels = {int(number): str(name) for number, name in (config.get("id2label") or {}).items()}
        names = tuple(labels.get(n, "") for n in range(config.get("num_classes", len(labels))))
    return () if any(not name or name.startswith(_UNNAMED) for name in names) else names


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
    every = {each.kind: name for name, each in entries("family")}
    return f" Use family={every[kind]!r}." if kind in every else ""


def is_model(folder: Path) -> bool:
    """Return whether a folder holds the configuration of a model."""
    return (folder / CONFIG).is_file()


def _elsewhere(name: str, tried: Path, offline: bool) -> Path:
    """Return the folder of a model id in the cache or on the hub."""
    if not tried.exists() and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return resolve.resolve_model(name, offline=offline).folder
    if name in SETS:
        raise MissingModelError(f"the bundled set {name!r} is missing ({tried}); install again.")
    state = f"holds neither {CONFIG} nor target/{CONFIG}" if tried.is_dir() else "is no folder"
    if name in (*resolve.BUNDLED, *resolve.PUBLISHED):
        state = "is a model of text, which learns from texts and does not draw"
    raise MissingModelError(
        f"no image model {name!r} was found.{did_you_mean(name, SETS)} {tried} {state}; expected "
        f"a bundled set ({', '.join(SETS)}) or a folder with target/ and tokenizer/."
    )


def as_saved(
    path: Path | None, drafter: Any, rule: Any, settings: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return drafter, rule and settings with the saved values in place of "auto".

    If a rule is passed, no saved value applies. If a drafter is passed, the saved one does not.

    Raises:
        ModelError: The file cannot be read.
    """
    if path is None or not (isinstance(rule, str) and rule == AUTO):
        return drafter, rule, settings
    expected = "what save_pretrained wrote. Save the pipeline again, or remove the file."
    with expect_readable(f"{path} cannot be read", expected):
        saved = json.loads(path.read_text(encoding="utf-8"))
        more = dict(saved.pop("rule", None) or {"name": ""})
        name, usual = more.pop("name"), saved.pop("drafter", AUTO)
        if not isinstance(usual, str) or not isinstance(name, str):
            raise TypeError(f"drafter {usual!r}, rule {name!r}")
    saved = {**more, **saved}
    if drafter in (AUTO, [AUTO], (AUTO,)):
        drafter = usual.split("+") if "+" in usual else usual
    else:  # the saved iterations may be those of plain decoding
        saved = {key: saved[key] for key in saved.keys() - {*_DRAFTING, "iterations"}}
    passed = {key: value for key, value in settings.items() if value is not None}
    return drafter, name or AUTO, {**saved, **passed}


def relaxation_of(path: Path | None, rule: str) -> dict[str, float]:
    """Return a rule's measured settings, {} without a file; raise ModelError for a damaged one."""
    if path is None or not path.is_file():
        return {}
    expected = "what the benchmark of images writes (--tune). Write it again, or remove it."
    with expect_readable(f"{path} holds no settings of relaxed rules", expected):
        record = json.loads(path.read_text(encoding="utf-8"))
        settings = dict(record["rules"].get(rule, {}).get("settings", {}))
        numbers = all(isinstance(value, int | float) for value in settings.values())
        if record["format"] != FORMAT or not numbers:
            raise ValueError(f"format {record['format']}, settings {settings} of {rule!r}")
    return settings
