"""Checks of options that need no model and no torch, so that they come before any work."""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from types import MappingProxyType

from ragspec import registry
from ragspec.errors import DocumentError, InputError, MissingModelError, UnsupportedModelError
from ragspec.models.checks import check_head_files, check_language_model, check_tokenizer
from ragspec.models.resolve import resolve_model
from ragspec.storage.filesystem import check_folder
from ragspec.storage.store import check_writable, expect_none, read_current

# Remedies of `check_need`.
GIVE_STORE, OTHER = "Give it with --store or --set history=.", "Name another drafter."
# The files of the drafters have these too, and import torch.
NEEDS = MappingProxyType({"store": ("rest",), "draft model": ("model", "fused", "rapid")})
STORED = ("suffix", "rest", "select", "hierarchy", "rasd", "auto")  # which use a store
UNLISTED = ("head", "jacobi", "next-tokens", "ngrams")  # names of drafters that are no methods
# The first bytes of files that our commands write, see `check_output`.
JSON, PAGE, TRACE = b'{\n "', b'content="ragspec"', b'"format": "ragspec-trace"'


def checked_text(text: str) -> str:
    """Return the text; raise InputError for bytes of the shell that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"Expected text in UTF-8, got other bytes ({error}).") from error
    return text


def check_output(path: Path | None, mark: bytes = b"") -> None:
    """Raise InputError, before any work, if a file cannot be written or lacks the mark."""
    if path is None:
        return
    reason = "" if path.parent.is_dir() else f"there is no folder {path.parent}. Make it"
    if str(path).startswith("-"):
        reason = f"it looks like an option. Write ./{path} if it is a file"
    elif path.is_dir():
        reason = f"{path} is a folder. Add the name of a file"
    elif not reason and not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "the system does not allow it. Give yourself the right to write"
    elif path.is_file():
        with path.open("rb") as file:
            if (start := file.read(999)) and mark not in start:
                reason = f"{path} holds something else. Remove it"
    if reason:
        raise InputError(f"{path} cannot be written: {reason}, or name another file.")


def filled_path(text: str) -> Path:
    """Return a path; raise InputError for an empty text, which would be the working folder."""
    if not text:
        raise InputError("expected a path, got an empty text. Is a variable of the shell unset?")
    return Path(text)


def check_paths(*paths: Path) -> None:
    """Raise DocumentError if a path leads nowhere."""
    for path in paths:
        if not Path(os.path.expanduser(path)).exists():
            raise DocumentError(f"{path} is missing; check the path.")


def check_store(path: Path | None, kind: str) -> None:
    """Raise StoreError if a folder holds no store of a kind, or one whose pointer is damaged."""
    if path is not None:
        read_current(path, kind)


def check_new_store(path: Path, kind: str, *, replace: bool = True) -> None:
    """Raise StoreError if a folder cannot hold a new store, InputError to keep an old one."""
    if path.exists():
        check_writable(path, kind)
    check_folder(path)
    if not replace:
        expect_none(path, kind)


def check_model(name: str) -> None:
    """Raise ModelError if no place has a language model and its tokenizer, whole."""
    source = resolve_model(name)
    check_language_model(source)
    check_tokenizer(source)


def check_chat_model(name: str) -> None:
    """Raise UnsupportedModelError if a folder's tokenizer has no chat template."""
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
            f"got budget {budget!r}, expected 'auto' or a number of draft nodes (0: plain)."
        )


def check_drafters(names: Iterable[str], more: Iterable[str] = ("none",)) -> None:
    """Raise an error if a drafter is neither a name, one of `more`, nor the folder of a head."""
    choices = {*registry.names("drafter"), *more} - {*UNLISTED}
    names = list(names)
    if "none" in names[1:] or names[:1] == ["none"] != names:
        raise InputError(f"got drafters {','.join(names)}; expected none by itself. Leave it out.")
    for name in names:
        if name and name not in choices and Path(os.path.expanduser(name)).is_dir():
            check_head_files(Path(os.path.expanduser(name)))
        elif name not in choices and ("/" in name or "\\" in name):
            raise MissingModelError(
                f"{name} is no folder; expected that of a head, as `ragspec train-head` writes it."
            )
        else:
            registry.expect_known("drafter", [name], choices)


def check_need(need: str, drafters: Iterable[str], there: object, remedy: str = OTHER) -> None:
    """Raise InputError if a drafter needs a store or a draft model and none is there."""
    for name in drafters:
        if name in NEEDS[need] and not there:
            raise InputError(f"drafter {name} got no {need}; expected one. {remedy}")


def check_stored(drafters: Collection[str], stored: Collection[str] = STORED) -> None:
    """Raise InputError if there is a store and none of the drafters, as far as known, uses it."""
    if not drafters or "none" in drafters:
        raise InputError("got a store and --drafter none; expected one: leave the other out.")
    foreign = stored is STORED and not {*drafters} <= {*registry.NAMES["drafter"], "plain"}
    if not foreign and not set(stored) & set(drafters):
        raise InputError(
            f"got a store, but {', '.join(drafters)} does not draft from stores; expected one of "
            f"{', '.join(sorted(stored))}. Use auto, or leave the store out."
        )


def check_guesses(speculate: str) -> None:
    """Raise InputError unless a number of guesses is a number, "auto" or "off"."""
    if speculate not in ("auto", "off") and not re.fullmatch(r"\d+", speculate):
        raise InputError(f"got speculate={speculate}; expected a number, auto or off.")
