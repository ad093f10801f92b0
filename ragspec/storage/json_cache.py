"""What is computed once a machine and kept as JSON: a file for every key, written as a whole.

Nothing here fails: what is missing, damaged or of another key is as good as not kept, and where
nothing can be written the answer is computed again next time.
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
"""All that an answer is valid for."""


def read(directory: Path | str, name: str, key: Key) -> dict[str, Any] | None:
    """Return the fields that `write` kept for this key; None where there is nothing sound."""
    with contextlib.suppress(OSError, ValueError):
        entry = json.loads(_path(directory, name, key).read_text(encoding="utf-8"))
        if isinstance(entry, dict) and entry.pop("key", None) == key:
            return entry
    return None


def write(directory: Path | str, name: str, key: Key, fields: Mapping[str, Any]) -> None:
    """Keep fields, none of them called "key", in the place of those that were kept before.

    The caller that reads meanwhile finds the ones or the others.
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
    known = json.dumps(dict(key), sort_keys=True).encode()
    return Path(directory) / f"{name}-{hashlib.sha256(known).hexdigest()[:24]}.json"
