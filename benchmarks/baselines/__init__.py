"""Published forms of relaxed rules for comparison: biased, or weaker than ours."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from baselines.cool_sd import Cool
from baselines.even import Even
from baselines.lantern_published import LanternPlusRejection, LanternRejection
from ragspec.visual.rules.by_name import default_settings
from ragspec.visual.rules.codebook import CodeNeighbours

BASELINES = MappingProxyType(
    {rule.name: rule for rule in (Cool, Even, LanternRejection, LanternPlusRejection)}
)


def make_baseline(name: str, codebook: Any, **settings: Any) -> Any:
    """Return a published rule with defaults for a code-book [V, d].

    Args:
        name: A name of `BASELINES`.
        codebook: Vectors of the target's codes.
        settings: Settings of the rule; `neighbours` is a number of near codes.
    """
    size = len(codebook)
    usual = default_settings(name, size)
    if name != Cool.name:
        fewest = max(1, size // 6) if name == Even.name else usual["neighbours"]
        near = int(settings.pop("neighbours", fewest))
        settings["neighbours"] = CodeNeighbours.build(codebook, near, True)
    if name == LanternRejection.name:
        settings.setdefault("delta", usual["delta"])
    if name == LanternPlusRejection.name:
        settings.setdefault("lam", usual["lam"])
    return BASELINES[name](**settings)
