"""Images of continuous latents: a causal model whose every latent comes out of a diffusion head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.latents.model import LatentConfig as LatentConfig
    from ragspec.visual.latents.model import LatentModel as LatentModel
    from ragspec.visual.latents.rules.horizon import Horizon as Horizon
    from ragspec.visual.latents.rules.near import Near as Near
    from ragspec.visual.latents.schedule import Schedule as Schedule
    from ragspec.visual.latents.target import LatentTarget as LatentTarget

_WHERE = {
    "Horizon": "ragspec.visual.latents.rules.horizon",
    "LatentConfig": "ragspec.visual.latents.model",
    "LatentModel": "ragspec.visual.latents.model",
    "LatentTarget": "ragspec.visual.latents.target",
    "Near": "ragspec.visual.latents.rules.near",
    "Schedule": "ragspec.visual.latents.schedule",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
