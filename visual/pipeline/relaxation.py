"""Settings of relaxed rules that were measured on a model and ship with it.

`relaxation.json` is in the folder that holds `target/`, or in the folder that is the target. The
benchmark of images writes it (`--tune`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ragspec.errors import ModelError

FILE = "relaxation.json"
FORMAT = 1
_PLAIN = (int, float)


def settings_of(path: Path | None, rule: str) -> dict[str, Any]:
    """Return a rule's settings from a model's file; empty without a file or without an entry.

    Raises:
        ModelError: The file cannot be read.
    """
    if path is None or not path.is_file():
        return {}
    record = dict(_read(path)["rules"].get(rule, {}).get("settings", {}))
    if not all(isinstance(value, _PLAIN) for value in record.values()):
        raise _unreadable(path, f"settings {record} of {rule!r}")
    return record


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    rules = record.get("rules") if isinstance(record, dict) else None
    whole = isinstance(rules, dict) and all(isinstance(each, dict) for each in rules.values())
    if not whole or record.get("format") != FORMAT:
        raise _unreadable(path, f"no rules in format {FORMAT}")
    return dict(record)


def _unreadable(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path} holds no settings of relaxed rules ({reason}); expected what the benchmark of "
        "images writes (--tune). Write it again, or remove it."
    )
