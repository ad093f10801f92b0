"""Checks of options that need no model and no torch, so that they come before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

from ragspec.errors import (
    DocumentError,
    InputError,
    ModelError,
    ModelNotFoundError,
    UnknownNameError,
    UnsupportedModelError,
)

GGUF_MAGIC = b"GGUF"
OPTION_OF_NEED = MappingProxyType(
    {"store": "--store or --set history=", "draft model": "--draft-model"}
)
# `drafters.method` has these too, and imports torch. `ask-long` needs no draft model for "rapid".
NEEDS = MappingProxyType({"store": ("rest",), "draft model": ("model", "fused")})
UNLISTED = ("head", "jacobi", "ngrams")  # names of drafters that are no methods
# What the first bytes of a file have if a command of ours wrote it, see `check_output`.
JSON, PAGE, TRACE = b'{\n "', b'content="ragspec"', b'"format": "ragspec-trace"'
# Beside those of texts; "plain" is that of masked models without drafts.
IMAGE_RULES = ("exact", "plain", "near", "aligned", "horizon", "path")


def checked_text(text: str, what: str = "text") -> str:
    """Return the text; raise InputError for bytes of the shell that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Expected {what} in UTF-8, got other bytes ({error}).") from error
    return text


def check_question(text: str) -> None:
    """Raise InputError if a question is empty or no text."""
    if not checked_text(text).strip():
        raise InputError(f"Expected a question, got the empty text {text!r}. Ask something.")


def check_output(path: Path | None, mark: bytes = b"") -> None:
    """Raise InputError, before any work, if a file cannot be written or lacks the mark."""
    if path is None:
        return
    reason = "" if path.parent.is_dir() else f"there is no folder {path.parent}. Make it"
    if path.is_dir():
        reason = f"{path} is a folder. Add the name of a file"
    elif not reason and not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "the system does not allow it. Give yourself the right to write"
    elif path.is_file():
        with path.open("rb") as file:
            if (start := file.read(999)) and mark not in start:
                reason = f"{path} holds something else. Remove it"
    if reason:
        raise InputError(f"{path} cannot be written: {reason}, or name another file.")


def check_paths(*paths: Path) -> None:
    """Raise DocumentError if a path leads nowhere."""
    for path in paths:
        if not path.expanduser().exists():
            raise DocumentError(f"{path} is missing; check the path.")


def check_store(path: Path | None, kind: str) -> None:
    """Raise StoreError if a folder holds no store of a kind, or one whose pointer is damaged."""
    from ragspec.storage.store import read_current

    if path is not None:
        read_current(path, kind)


def check_new_store(path: Path, kind: str) -> None:
    """Raise StoreError if a folder holds other files, or a store of another kind."""
    from ragspec.storage.store import check_writable

    if path.exists():
        check_writable(path, kind)


def check_model(name: str | None) -> None:
    """Raise an error if a model cannot be loaded for a reason that its files' names tell.

    Raises:
        ModelNotFoundError: No place has it.
        ModelError: It is a GGUF file by its name alone.
    """
    from ragspec.models.resolve import resolve_model

    if name is None:
        return
    source = resolve_model(name)
    if source.file is not None:
        with (source.folder / source.file).open("rb") as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise ModelError(
                    f"{name} does not begin with {GGUF_MAGIC.decode()}, as GGUF files do; it may "
                    "be damaged. Copy it again."
                )


def check_chat_model(name: str) -> None:
    """Raise UnsupportedModelError if a folder's tokenizer has no chat template."""
    from ragspec.models.resolve import resolve_model

    source = resolve_model(name)
    config = source.folder / "tokenizer_config.json"
    if source.file is not None or not config.is_file():
        return  # known once it is loaded
    inside = '"chat_template"' in config.read_text(encoding="utf-8", errors="replace")
    if not inside and not any(source.folder.glob("chat_template*")):
        raise UnsupportedModelError(
            f"{name} comes without a chat template; expected a chat model, such as smollm2 "
            "(`ragspec models`). Use `ragspec generate` or `ragspec ask` with this one."
        )


def check_budget(budget: str) -> None:
    """Raise InputError unless a budget is a number of nodes or "auto"."""
    if budget != "auto" and not re.fullmatch(r"\d+", budget):
        raise InputError(
            f"got budget {budget!r}, expected 'auto' or a number of draft nodes (0 = plain "
            "decoding)."
        )


def check_rule(kind: str, name: str, more: Iterable[str] = ()) -> None:
    """Raise UnknownNameError unless a rule of images is known; `more` are further names."""
    from ragspec.registry import names, unknown

    choices = {*names("rule"), *IMAGE_RULES, *more}
    if name not in choices:
        raise UnknownNameError(unknown(kind, name, choices))


def check_drafters(names: Iterable[str], more: Iterable[str] = ("none",)) -> None:
    """Raise an error if a drafter is neither a name, one of `more`, nor the folder of a head.

    Raises:
        UnknownNameError: There is no such name.
        ModelNotFoundError: There is no such folder.
    """
    from ragspec.registry import names as known
    from ragspec.registry import unknown

    choices = {*known("drafter"), *more} - {*UNLISTED}
    names = list(names)
    if "none" in names[1:] or names[:1] == ["none"] != names:
        raise InputError(f"got drafters {','.join(names)}; expected none by itself. Leave it out.")
    for name in names:
        if name in choices:
            continue
        if name and Path(name).expanduser().is_dir():
            check_head(Path(name).expanduser())
        elif "/" in name or "\\" in name:
            raise ModelNotFoundError(
                f"{name} is no folder; expected that of a head, as `ragspec train-head` writes it."
            )
        else:
            raise UnknownNameError(unknown("drafter", name, choices))


def check_head(folder: Path) -> None:
    """Raise ModelNotFoundError if a folder holds no draft head."""
    weights = any(path.suffix in (".safetensors", ".bin", ".pt") for path in folder.glob("*"))
    if not (weights and (folder / "config.json").is_file()):
        raise ModelNotFoundError(
            f"{folder} holds no draft head; expected config.json and model.safetensors, as "
            "`ragspec train-head` writes them."
        )


def check_need(need: str, drafters: Iterable[str], there: object) -> None:
    """Raise InputError if a drafter needs a store or a draft model and none is there."""
    for name in drafters:
        if name in NEEDS[need] and not there:
            raise InputError(
                f"{name} got no {need}; expected one. Give it with {OPTION_OF_NEED[need]}."
            )


def check_guesses(speculate: str) -> None:
    """Raise InputError unless a number of guesses is a number, "auto" or "off"."""
    if speculate not in ("auto", "off") and not re.fullmatch(r"\d+", speculate):
        raise InputError(f"got speculate={speculate}; expected a number, auto or off.")
