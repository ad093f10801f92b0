"""The settings beside a model: how a saved pipeline draws, and measured settings of relaxed rules.

`ragspec.json` has the rule, the drafter, the budget and the batch size of a saved pipeline.
`relaxation.json` has the settings of relaxed rules that were measured on the model and ship with
it; the benchmark of images writes it (`--tune`). Both are in the folder that holds `target/`, or in
the folder that is the target.
"""

import json
import warnings
from pathlib import Path
from typing import Any

from ragspec.errors import ModelError

SETUP, RELAXATION = "ragspec.json", "relaxation.json"
FORMAT = 1  # of relaxation.json
AUTO, NONE = "auto", "none"
_PLAIN = (bool, int, float, str, type(None))
_DRAFTING = ("draft_mode", "min_expected_gain")  # apply with the saved drafter alone


def write_setup(
    root: Path, rule: str | None, settings: dict[str, object], more: dict[str, object]
) -> None:
    """Write the settings of a pipeline, except those that are None, into its folder.

    Args:
        rule: Its name; None for a Rule without one, which is not saved, with a warning.
        more: Drafter, budget and further arguments.
    """
    record = {key: value for key, value in more.items() if value is not None}
    if rule is not None and all(isinstance(value, _PLAIN) for value in settings.values()):
        record["rule"] = {"name": rule, **settings}
    else:
        warnings.warn(
            "the rule is an object, which is not saved: the loaded pipeline will draw by the "
            "default rule. Name the rule and its numbers to keep them.",
            UserWarning,
            stacklevel=3,
        )
    text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    (root / SETUP).write_text(text, encoding="utf-8")


def as_saved(
    path: Path | None, drafter: Any, rule: Any, settings: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return drafter, rule and settings with the saved values in place of "auto".

    If a rule is passed, no saved value applies. If a drafter is passed, the saved one does not.

    Raises:
        ModelError: The file cannot be read.
    """
    if path is None or not (isinstance(rule, str) and rule == AUTO):
        return drafter, rule, settings
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        more = dict(saved.pop("rule", None) or {"name": ""})
        name, usual = more.pop("name"), saved.pop("drafter", AUTO)
        if not isinstance(usual, str) or not isinstance(name, str):
            raise TypeError(f"drafter {usual!r}, rule {name!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{path} cannot be read ({error!r}); expected what save_pretrained wrote. Save the "
            "pipeline again, or remove the file."
        ) from error
    saved = {**more, **saved}
    if isinstance(drafter, str) and drafter == AUTO:
        drafter = usual.split("+") if "+" in usual else usual
    else:  # the saved iterations may be those of plain decoding
        saved = {key: saved[key] for key in saved.keys() - {*_DRAFTING, "iterations"}}
    passed = {key: value for key, value in settings.items() if value is not None}
    return drafter, name or AUTO, {**saved, **passed}


def relaxation_of(path: Path | None, rule: str) -> dict[str, float]:
    """Return a rule's measured settings, {} without a file; raise ModelError for a damaged one."""
    if path is None or not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings = dict(record["rules"].get(rule, {}).get("settings", {}))
        numbers = all(isinstance(value, int | float) for value in settings.values())
        if record["format"] != FORMAT or not numbers:
            raise ValueError(f"format {record['format']}, settings {settings} of {rule!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} holds no settings of relaxed rules ({error!r}); expected what the benchmark "
            "of images writes (--tune). Write it again, or remove it."
        ) from error
    return settings
