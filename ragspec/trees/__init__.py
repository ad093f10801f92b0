"""Draft trees: what they are, and what is derived from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.trees.draft_tree import ROOT as ROOT
    from ragspec.trees.draft_tree import DraftKind as DraftKind
    from ragspec.trees.draft_tree import DraftTree as DraftTree

_WHERE = {
    "DraftKind": "ragspec.trees.draft_tree",
    "DraftTree": "ragspec.trees.draft_tree",
    "ROOT": "ragspec.trees.draft_tree",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
