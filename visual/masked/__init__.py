"""Images of continuous latents that are drawn in any order: MAR, and its published checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.masked.checkpoint import load_mar as load_mar
    from ragspec.visual.masked.model import MaskedConfig as MaskedConfig
    from ragspec.visual.masked.model import MaskedModel as MaskedModel
    from ragspec.visual.masked.sampler import MaskedSampler as MaskedSampler
    from ragspec.visual.masked.schedule import LearnedSchedule as LearnedSchedule

_WHERE = {
    "LearnedSchedule": "ragspec.visual.masked.schedule",
    "MaskedConfig": "ragspec.visual.masked.model",
    "MaskedModel": "ragspec.visual.masked.model",
    "MaskedSampler": "ragspec.visual.masked.sampler",
    "load_mar": "ragspec.visual.masked.checkpoint",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
