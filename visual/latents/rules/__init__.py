"""Rules over latents: a drafted one is kept where the target might as well have drawn it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.latents.rules.aligned import Aligned as Aligned
    from ragspec.visual.latents.rules.by_name import latent_rule as latent_rule
    from ragspec.visual.latents.rules.by_name import make_latent_rule as make_latent_rule
    from ragspec.visual.latents.rules.cspd_paper import CspdPaper as CspdPaper
    from ragspec.visual.latents.rules.horizon import Horizon as Horizon
    from ragspec.visual.latents.rules.near import Near as Near
    from ragspec.visual.latents.rules.path import Path as Path

_WHERE = {
    "Aligned": "ragspec.visual.latents.rules.aligned",
    "CspdPaper": "ragspec.visual.latents.rules.cspd_paper",
    "Horizon": "ragspec.visual.latents.rules.horizon",
    "Near": "ragspec.visual.latents.rules.near",
    "Path": "ragspec.visual.latents.rules.path",
    "latent_rule": "ragspec.visual.latents.rules.by_name",
    "make_latent_rule": "ragspec.visual.latents.rules.by_name",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
