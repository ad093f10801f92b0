"""Rules over latents by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ragspec.errors import InputError, UnknownNameError
from ragspec.registry import unknown
from ragspec.rules.base import Rule, expect_rule
from ragspec.visual.latents.rules.aligned import Aligned
from ragspec.visual.latents.rules.cspd_paper import CspdPaper
from ragspec.visual.latents.rules.horizon import Horizon
from ragspec.visual.latents.rules.near import Near
from ragspec.visual.latents.rules.path import Path

RULES: dict[str, tuple[Callable[..., Rule], frozenset[str]]] = {
    "near": (Near, frozenset({"r"})),
    "aligned": (Aligned, frozenset()),
    "horizon": (Horizon, frozenset({"s"})),
    "path": (Path, frozenset()),
    "cspd-paper": (CspdPaper, frozenset()),
}


def make_latent_rule(name: str, **settings: Any) -> Rule:
    """Return a rule over latents by its name, None among its settings standing for the default.

    "near" takes r, "horizon" s; the others have no settings. Raises UnknownNameError, InputError
    for a setting that the rule has not.
    """
    if name not in RULES:
        raise UnknownNameError(unknown("latent rule", name, list(RULES)))
    instance, known = RULES[name]
    inputs = {key: value for key, value in settings.items() if value is not None}
    foreign = sorted(inputs.keys() - known)
    if foreign:
        raise InputError(
            f"rule {name!r} has no {', '.join(foreign)}; it takes "
            f"{', '.join(sorted(known)) or 'no settings'}."
        )
    return instance(**inputs)


def latent_rule(rule: str | Rule, settings: Mapping[str, Any]) -> tuple[Rule, str]:
    """Return a rule that is given as one, or by its name with settings, and what it is called.

    Raises what `make_latent_rule` does, and InputError for a Rule with settings.
    """
    if isinstance(rule, str):
        return make_latent_rule(rule, **settings), rule
    if settings:
        raise InputError(f"got a Rule and {', '.join(settings)}; expected settings by a name.")
    return expect_rule(rule), rule.name
