"""`ragspec.json`: how a saved image pipeline draws: its rule, drafter, budget and batch size."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.budget.policy import AutoBudget, FixedBudget
from ragspec.errors import ModelError

SETUP = "ragspec.json"
_NAMED = ("model", "head", "jacobi")  # drafters that can be told by a word
_DRAFTING: dict[str, str] = {
    "draft_mode": "mode",
    "min_expected_gain": "min_expected_gain",
}  # names of a source's
_PLAIN = (bool, int, float, str, type(None))
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setup:
    """How a saved pipeline draws.

    rule: its name and settings; "" where nothing was saved. drafter: a word, or several joined by
    "+", "auto" where it could not be told by a word. more: other arguments of the constructor.
    """

    rule: str
    settings: dict[str, Any]
    drafter: str | None
    drafting: dict[str, Any]
    more: dict[str, Any]


def write_setup(root: Path, pipe: Any, values: dict[str, Any]) -> None:
    """Write how a pipeline draws; values of None are left out."""
    known = {key: value for key, value in values.items() if value is not None}
    setup = {"pipeline": type(pipe).__name__, **known}
    (root / SETUP).write_text(json.dumps(setup, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def pipeline_record(pipe: Any, drafter: str | None) -> dict[str, Any]:
    """Return what an image pipeline's index says of how it draws; warns of what it cannot say."""
    record: dict[str, Any] = {"batch_size": pipe.batch_size, **rule_record(pipe)}
    if isinstance(pipe.budget, FixedBudget):
        record["budget"] = pipe.budget.nodes
    elif isinstance(pipe.budget, AutoBudget):
        record["budget"] = AUTO
    if drafter is None or all(name in _NAMED for name in drafter.split("+")):
        record["drafter"] = drafter or "none"
    for key, name in _DRAFTING.items():
        if (value := getattr(pipe.source, name, None)) is not None:
            record[key] = value
    return record


def rule_record(pipe: Any) -> dict[str, Any]:
    """Return what an index says of a pipeline's rule; warns of one that it cannot name."""
    if all(isinstance(value, _PLAIN) for value in pipe.settings.values()) and pipe.rule_is_named:
        return {"rule": {"name": pipe.rule_name, **pipe.settings}}
    warnings.warn(
        f"the rule {pipe.rule_name!r} was given as an object, which is not saved: what is "
        "loaded will draw by the default rule. Name the rule and its numbers to keep them.",
        UserWarning,
        stacklevel=4,
    )
    return {}


def masked_as_saved(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a masked pipeline with what its index tells where nothing is given.

    Where a drafter is named, or None for plain drawing, that which was saved is not taken; a rule
    that is named comes without the numbers of the saved one.
    """
    result = read_setup(path)
    if result is None:
        return settings
    saved = dict(result.more)
    if "drafter" not in settings and result.drafter not in (None, AUTO):
        saved["drafter"] = result.drafter
        if "rule" not in settings and result.rule:
            saved |= {"rule": result.rule, **result.settings}
    elif settings.get("drafter") is not None:
        saved.pop("iterations", None)  # those of plain drawing
    return {**saved, **settings}


def read_setup(path: Path | None) -> Setup | None:
    """Return how a saved pipeline draws; None without a file.

    Raises ModelError for one that cannot be read.
    """
    if path is None:
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        result.pop("pipeline")
        return setup_of(result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{path} cannot be read ({error!r}); expected what save_pretrained wrote. Save the "
            "pipeline again, or remove the file."
        ) from error


def setup_of(record: dict[str, Any]) -> Setup:
    """Return the setup that an index tells."""
    rule = dict(record.pop("rule", None) or {"name": ""})
    drafting = {key: record.pop(key) for key in _DRAFTING if key in record}
    drafter = record.pop("drafter", AUTO)
    if not isinstance(drafter, str) or not isinstance(rule["name"], str):
        raise TypeError(f"drafter {drafter!r}, rule {rule!r}")
    name = str(rule.pop("name"))
    return Setup(name, rule, None if drafter == "none" else drafter, drafting, record)


def as_saved(
    path: Path | None, default: str, drafter: Any, rule: Any, settings: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return drafter, rule and settings with what was saved in the place of "auto".

    path: of the index. Where a rule is named, nothing that was saved is taken.
    """
    if not (isinstance(rule, str) and rule == AUTO):
        return drafter, rule, settings
    result = read_setup(path)
    if result is None or not result.rule:
        return drafter, default, settings
    saved = {**result.settings, **result.more}
    if isinstance(drafter, str) and drafter == AUTO:
        drafter, saved = result.drafter, {**saved, **result.drafting}
        if drafter is not None and "+" in drafter:
            drafter = drafter.split("+")
    return drafter, result.rule, {**saved, **settings}
