"""Relaxed acceptance: a code that looks like the model's own may stand in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.acceptance.by_name import make_rule as make_rule
    from ragspec.visual.acceptance.codebook import CodeNeighbours as CodeNeighbours
    from ragspec.visual.acceptance.codebook import CodePartition as CodePartition
    from ragspec.visual.acceptance.lantern import GSD as GSD
    from ragspec.visual.acceptance.lantern import Lantern as Lantern
    from ragspec.visual.acceptance.lantern import LanternPlus as LanternPlus
    from ragspec.visual.acceptance.tv_budget import TVBudget as TVBudget

_WHERE = {
    "CodeNeighbours": "ragspec.visual.acceptance.codebook",
    "CodePartition": "ragspec.visual.acceptance.codebook",
    "GSD": "ragspec.visual.acceptance.lantern",
    "Lantern": "ragspec.visual.acceptance.lantern",
    "LanternPlus": "ragspec.visual.acceptance.lantern",
    "TVBudget": "ragspec.visual.acceptance.tv_budget",
    "make_rule": "ragspec.visual.acceptance.by_name",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
