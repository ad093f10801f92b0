"""What proposes tokens, and drafters made of drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.drafters.base import DraftContext as DraftContext
    from ragspec.drafters.base import Drafter as Drafter
    from ragspec.drafters.base import DraftRequest as DraftRequest
    from ragspec.drafters.base import DraftSession as DraftSession
    from ragspec.drafters.base import Feedback as Feedback
    from ragspec.drafters.base import KnownStates as KnownStates
    from ragspec.drafters.base import LearningSession as LearningSession
    from ragspec.drafters.base import Prefill as Prefill
    from ragspec.drafters.base import SourceText as SourceText
    from ragspec.drafters.build import build_drafter as build_drafter
    from ragspec.drafters.eagle.drafter import HeadDrafter as HeadDrafter
    from ragspec.drafters.fuse import Fuse as Fuse
    from ragspec.drafters.model.drafter import ModelDrafter as ModelDrafter

_WHERE = {
    "DraftContext": "ragspec.drafters.base",
    "DraftRequest": "ragspec.drafters.base",
    "DraftSession": "ragspec.drafters.base",
    "Drafter": "ragspec.drafters.base",
    "Feedback": "ragspec.drafters.base",
    "Fuse": "ragspec.drafters.fuse",
    "HeadDrafter": "ragspec.drafters.eagle.drafter",
    "KnownStates": "ragspec.drafters.base",
    "LearningSession": "ragspec.drafters.base",
    "ModelDrafter": "ragspec.drafters.model.drafter",
    "Prefill": "ragspec.drafters.base",
    "SourceText": "ragspec.drafters.base",
    "build_drafter": "ragspec.drafters.build",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
