"""The settings of relaxed rules that a model ships with: measured on it, and named by the rule.

`relaxation.json` lies beside `target/` (or in the folder that is the target); the benchmark of
images writes it (`--tune`).
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
    """Return the settings that a model's file holds for a rule; none where it holds none.

    Raises ModelError for a file that cannot be read.
    """
    if path is None:
        return {}
    record = dict(_read(path)["rules"].get(rule, {}).get("settings", {}))
    if not all(isinstance(value, _PLAIN) for value in record.values()):
        raise _unreadable(path, f"settings {record} of {rule!r}")
    return record


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    rules = result.get("rules") if isinstance(result, dict) else None
    whole = isinstance(rules, dict) and all(isinstance(each, dict) for each in rules.values())
    if not whole or result.get("format") != FORMAT:
        raise _unreadable(path, f"no rules in format {FORMAT}")
    return dict(result)


def _unreadable(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path} holds no settings of relaxed rules ({reason}); expected what the benchmark of "
        "images writes (--tune). Write it again, or remove it."
    )
