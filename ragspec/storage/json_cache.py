"""A cache of JSON values that are computed once per machine. Each key has its own file.

These functions raise no error. A missing or damaged file, or one of another key, is a cache miss.
If a file cannot be written, the caller computes the value again next time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Key = Mapping[str, str | int]
"""The facts that a value depends on."""


def read(directory: Path | str, name: str, key: Key) -> dict[str, Any] | None:
    """Return the fields that `write` stored for this key, None on a cache miss."""
    with contextlib.suppress(OSError, ValueError):
        entry = json.loads(_path(directory, name, key).read_text(encoding="utf-8"))
        if isinstance(entry, dict) and entry.pop("key", None) == key:
            return entry
    return None


def write(directory: Path | str, name: str, key: Key, fields: Mapping[str, Any]) -> None:
    """Store fields, none of them called "key", in place of those stored before.

    The file is replaced atomically: concurrent readers get either the old fields or the new ones.
    """
    path = _path(directory, name, key)
    part = path.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps({"key": dict(key), **fields}), encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def _path(directory: Path | str, name: str, key: Key) -> Path:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return Path(directory) / f"{name}-{digest[:24]}.json"
