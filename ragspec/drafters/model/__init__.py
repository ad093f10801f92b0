"""Drafts from a smaller model of the same vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.drafters.model.drafter import ModelDrafter as ModelDrafter

_WHERE = {
    "ModelDrafter": "ragspec.drafters.model.drafter",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
