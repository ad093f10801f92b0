"""GGUF files as folders of safetensors, converted once and kept in the cache."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ragspec.models.resolve import VERSION
from ragspec.storage.filesystem import cache_directory
from ragspec.types import PreTrainedModel, Tokenizer

RECORD = "gguf.json"
SPARE = 2**30  # bytes of the disk that stay free


def file_state(path: Path) -> tuple[str, int, int, int]:
    """Return path, size and times of a file; no program can set that of its status."""
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def converted_folder(file: Path, dtype: object) -> Path:
    """Return the folder of a GGUF file in a dtype of torch; a changed file has another one."""
    key = hashlib.sha256(repr((file_state(file), str(dtype), VERSION)).encode()).hexdigest()[:12]
    return cache_directory() / "models" / f"{shortened(file.resolve().stem, 100)}-{key}"


def shortened(name: str, most: int) -> str:
    """Return the beginning of a name, of so many bytes at most; file systems refuse long names."""
    return os.fsencode(name)[:most].decode(errors="ignore")


def keep_converted(file: Path, folder: Path, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Save a model that was read from a GGUF file; see `fill`."""

    def write(whole: Path) -> None:
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        (whole / RECORD).write_text(json.dumps({"file": str(file.resolve())}), encoding="utf-8")

    fill(folder, sum(weight.nbytes for weight in model.state_dict().values()), write)


def fill(folder: Path, size: int, write: Callable[[Path], None]) -> None:
    """Write a folder of so many bytes to the cache, unless the disk is full or read-only."""
    with contextlib.suppress(OSError, SafetensorError), part_folder(folder.parent) as part:
        if shutil.disk_usage(part).free >= size + SPARE:
            (whole := Path(part) / "whole").mkdir()
            write(whole)
            os.replace(whole, folder)  # fails if another process was faster


def part_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder; delete those that killed processes left a day ago."""
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob(".part-*"):
        with contextlib.suppress(OSError):  # another process may be faster
            if time.time() - path.stat().st_mtime > 86_400:
                shutil.rmtree(path)
    return tempfile.TemporaryDirectory(dir=parent, prefix=".part-")


def discard(folder: Path, error: Exception) -> None:
    """Delete a damaged folder of the cache, with a warning."""
    warnings.warn(f"{folder} is damaged ({error}); it is made anew.", RuntimeWarning, stacklevel=3)
    shutil.rmtree(folder, ignore_errors=True)


def converted_models() -> dict[Path, str]:
    """Return the GGUF file of each folder that one was converted to; its name if it is damaged."""
    models = dict[Path, str]()
    for record in sorted((cache_directory() / "models").glob(f"*/{RECORD}")):
        models[record.parent] = record.parent.name
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            models[record.parent] = str(json.loads(record.read_text("utf-8"))["file"])
    return models
