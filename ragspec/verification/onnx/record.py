"""The records of the graphs in the cache folder, which are read without torch."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragspec.storage.filesystem import cache_directory

RECORD = "graph.json"


def cached_graphs() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders of the kept graphs and their records; that of a damaged one is empty."""
    for path in sorted((cache_directory() / "models").glob(f"*/{RECORD}")):
        try:
            yield path.parent, read_record(path.parent)
        except (OSError, ValueError):
            yield path.parent, {}


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a kept graph.

    Raises:
        OSError, ValueError: It cannot be read, or is damaged.
    """
    digest, _, text = (folder / RECORD).read_text(encoding="utf-8").partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"{RECORD} has changed")
    return dict(json.loads(text))
