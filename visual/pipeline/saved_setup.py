"""`ragspec.json`: the rule, drafter, budget and batch size of a saved image pipeline."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.budget.policy import AutoBudget, FixedBudget
from ragspec.errors import ModelError

SETUP = "ragspec.json"
_NAMED = ("model", "head", "jacobi")  # the drafters that a name can restore
# The keys of a drafter's settings, and the attributes of `DraftSource`.
_DRAFTING = {"draft_mode": "mode", "min_expected_gain": "min_expected_gain"}
_PLAIN = (bool, int, float, str, type(None))
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a saved pipeline.

    Attributes:
        rule: Its name; "" if the rule could not be saved.
        settings: Of the rule.
        drafter: A name, or several joined by "+"; "auto" if the drafter could not be saved.
        drafting: draft_mode and min_expected_gain.
        more: Other arguments of the constructor.
    """

    rule: str
    settings: dict[str, Any]
    drafter: str | None
    drafting: dict[str, Any]
    more: dict[str, Any]


def write_setup(root: Path, pipe: Any, values: dict[str, Any]) -> None:
    """Write the settings of a pipeline, except those that are None, into its folder."""
    entries = {key: value for key, value in values.items() if value is not None}
    setup = {"pipeline": type(pipe).__name__, **entries}
    (root / SETUP).write_text(json.dumps(setup, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def pipeline_record(pipe: Any, drafter: str | None) -> dict[str, Any]:
    """Return the settings of an image pipeline to save; warn about a rule without a name."""
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
    """Return a pipeline's rule and its settings to save; warn if the rule has no name."""
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
    """Complete the arguments of a masked pipeline by the saved ones.

    If a drafter is passed, None included, the saved drafter and rule do not apply. If a rule is
    passed, the settings of the saved rule do not apply.
    """
    setup = read_setup(path)
    if setup is None:
        return settings
    saved = dict(setup.more)
    if "drafter" not in settings and setup.drafter not in (None, AUTO):
        saved["drafter"] = setup.drafter
        if "rule" not in settings and setup.rule:
            saved |= {"rule": setup.rule, **setup.settings}
    elif settings.get("drafter") is not None:
        saved.pop("iterations", None)  # those of plain decoding
    return {**saved, **settings}


def read_setup(path: Path | None) -> Setup | None:
    """Return the settings of a saved pipeline; None without a path.

    Raises:
        ModelError: The file cannot be read.
    """
    if path is None:
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record.pop("pipeline")
        rule = dict(record.pop("rule", None) or {"name": ""})
        drafting = {key: record.pop(key) for key in _DRAFTING if key in record}
        drafter = record.pop("drafter", AUTO)
        if not isinstance(drafter, str) or not isinstance(rule["name"], str):
            raise TypeError(f"drafter {drafter!r}, rule {rule!r}")
        name = rule.pop("name")
        return Setup(name, rule, None if drafter == "none" else drafter, drafting, record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{path} cannot be read ({error!r}); expected what save_pretrained wrote. Save the "
            "pipeline again, or remove the file."
        ) from error


def as_saved(
    path: Path | None, default: str, drafter: Any, rule: Any, settings: dict[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return drafter, rule and settings with the saved values in place of "auto".

    Unless the rule is "auto", no saved value applies.

    Args:
        path: The saved index; None without one.
        default: The rule in place of "auto" if none was saved.
    """
    if not (isinstance(rule, str) and rule == AUTO):
        return drafter, rule, settings
    setup = read_setup(path)
    if setup is None or not setup.rule:
        return drafter, default, settings
    saved = {**setup.settings, **setup.more}
    if isinstance(drafter, str) and drafter == AUTO:
        drafter, saved = setup.drafter, {**saved, **setup.drafting}
        if drafter is not None and "+" in drafter:
            drafter = drafter.split("+")
    return drafter, setup.rule, {**saved, **settings}
