"""The rule `near`: a draft stays where the target's own latent, made with the same noise, is near.

It is `walk` over latents: no density is asked, and with r = 0 the image is the plain one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ragspec.errors import InputError, UnknownNameError
from ragspec.registry import unknown
from ragspec.rules.base import Rule, TargetView, Verdict, expect_rule
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.checks import is_number
from ragspec.visual.latents.rules.coupling import (
    KINDS,
    Aligned,
    CspdPaper,
    Horizon,
    Path,
    expect_latents,
    walk,
)
from ragspec.visual.latents.target import LatentView


class Near:
    """Keep a draft within r of the target's own latent, which was made with the same noise.

    r: Euclidean distance, in deviations of the latents; 0 keeps what is the same, so that the
    image is the plain one. Raises InputError for an r below 0.
    """

    name = "near"
    accepts = KINDS

    def __init__(self, r: float = 0.02) -> None:
        if not (is_number(r) and math.isfinite(r) and r >= 0.0):
            raise InputError(f"got r {r!r}; expected a distance of 0 or more, such as 0.02.")
        self.r = r
        self.label = "approximate" if r else "exact"

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the latent that follows it."""
        return walk(tree, expect_latents(self.name, target), self._emit)

    def _emit(self, view: LatentView, node: int, drafted: int, current: int) -> int:
        table = view.target.table
        if table.indices[drafted] != view.index(node):
            return current
        difference = torch.linalg.vector_norm(table.latents[drafted] - table.latents[current])
        return drafted if float(difference) <= self.r else current


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
    kind, known = RULES[name]
    inputs = {key: value for key, value in settings.items() if value is not None}
    foreign = sorted(inputs.keys() - known)
    if foreign:
        raise InputError(
            f"rule {name!r} has no {', '.join(foreign)}; it takes "
            f"{', '.join(sorted(known)) or 'no settings'}."
        )
    return kind(**inputs)


def latent_rule(rule: str | Rule, settings: Mapping[str, Any]) -> tuple[Rule, str]:
    """Return a rule that is given as one, or by its name with settings, and what it is called.

    Raises what `make_latent_rule` does, and InputError for a Rule with settings.
    """
    if isinstance(rule, str):
        return make_latent_rule(rule, **settings), rule
    if settings:
        raise InputError(f"got a Rule and {', '.join(settings)}; expected settings by a name.")
    return expect_rule(rule), rule.name
