"""From a prompt or a class to pictures, by diffusers' conventions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.pipeline.base import ImageOutput as ImageOutput
    from ragspec.visual.pipeline.chameleon import ChameleonPipeline as ChameleonPipeline
    from ragspec.visual.pipeline.emu3 import Emu3Pipeline as Emu3Pipeline
    from ragspec.visual.pipeline.janus import JanusPipeline as JanusPipeline
    from ragspec.visual.pipeline.latents import LatentOutput as LatentOutput
    from ragspec.visual.pipeline.latents import LatentPipeline as LatentPipeline
    from ragspec.visual.pipeline.llamagen import LlamaGenPipeline as LlamaGenPipeline
    from ragspec.visual.pipeline.masked import MaskedLatentPipeline as MaskedLatentPipeline
    from ragspec.visual.pipeline.masked import MaskedOutput as MaskedOutput
    from ragspec.visual.pipeline.pipeline import ImagePipeline as ImagePipeline

_WHERE = {
    "ChameleonPipeline": "ragspec.visual.pipeline.chameleon",
    "Emu3Pipeline": "ragspec.visual.pipeline.emu3",
    "ImageOutput": "ragspec.visual.pipeline.base",
    "ImagePipeline": "ragspec.visual.pipeline.pipeline",
    "JanusPipeline": "ragspec.visual.pipeline.janus",
    "LatentOutput": "ragspec.visual.pipeline.latents",
    "LatentPipeline": "ragspec.visual.pipeline.latents",
    "LlamaGenPipeline": "ragspec.visual.pipeline.llamagen",
    "MaskedLatentPipeline": "ragspec.visual.pipeline.masked",
    "MaskedOutput": "ragspec.visual.pipeline.masked",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
