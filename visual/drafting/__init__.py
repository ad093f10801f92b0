"""Drafts of image codes and of continuous latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.drafting.jacobi import JacobiDrafter as JacobiDrafter
    from ragspec.visual.drafting.latent_model import LatentDrafter as LatentDrafter
    from ragspec.visual.drafting.masked_jacobi import MaskedJacobiDrafter as MaskedJacobiDrafter

_WHERE = {
    "JacobiDrafter": "ragspec.visual.drafting.jacobi",
    "LatentDrafter": "ragspec.visual.drafting.latent_model",
    "MaskedJacobiDrafter": "ragspec.visual.drafting.masked_jacobi",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
