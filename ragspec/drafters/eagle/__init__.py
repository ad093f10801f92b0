"""The EAGLE-1 head: drafts from the target's own hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.drafters.eagle.drafter import HeadDrafter as HeadDrafter
    from ragspec.drafters.eagle.head import FeatureHead as FeatureHead
    from ragspec.drafters.eagle.head import HeadConfig as HeadConfig
    from ragspec.drafters.eagle.training import HeadTraining as HeadTraining
    from ragspec.drafters.eagle.training import train_head as train_head

_WHERE = {
    "FeatureHead": "ragspec.drafters.eagle.head",
    "HeadConfig": "ragspec.drafters.eagle.head",
    "HeadDrafter": "ragspec.drafters.eagle.drafter",
    "HeadTraining": "ragspec.drafters.eagle.training",
    "train_head": "ragspec.drafters.eagle.training",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
