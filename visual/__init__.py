"""Image tokens over the verification core; this room never meets `ragspec.retrievers`.

Importing this package is light: the public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.acceptance.codebook import CodeNeighbours as CodeNeighbours
    from ragspec.visual.acceptance.codebook import CodePartition as CodePartition
    from ragspec.visual.drafting.jacobi import JacobiDrafter as JacobiDrafter
    from ragspec.visual.masked.checkpoint import load_mar as load_mar
    from ragspec.visual.models.kl import KLAutoencoder as KLAutoencoder
    from ragspec.visual.models.llamagen import LlamaGenConfig as LlamaGenConfig
    from ragspec.visual.models.llamagen import LlamaGenModel as LlamaGenModel
    from ragspec.visual.models.llamagen_checkpoint import load_llamagen as load_llamagen
    from ragspec.visual.models.target import ConditionTable as ConditionTable
    from ragspec.visual.models.target import ImageTarget as ImageTarget
    from ragspec.visual.models.transformers_targets import ChameleonTarget as ChameleonTarget
    from ragspec.visual.models.transformers_targets import Emu3Target as Emu3Target
    from ragspec.visual.models.transformers_targets import ImageGPTTarget as ImageGPTTarget
    from ragspec.visual.models.transformers_targets import JanusTarget as JanusTarget
    from ragspec.visual.models.vq import VQTokenizer as VQTokenizer
    from ragspec.visual.pipeline.base import ImageOutput as ImageOutput
    from ragspec.visual.pipeline.chameleon import ChameleonPipeline as ChameleonPipeline
    from ragspec.visual.pipeline.emu3 import Emu3Pipeline as Emu3Pipeline
    from ragspec.visual.pipeline.janus import JanusPipeline as JanusPipeline
    from ragspec.visual.pipeline.latents import LatentPipeline as LatentPipeline
    from ragspec.visual.pipeline.llamagen import LlamaGenPipeline as LlamaGenPipeline
    from ragspec.visual.pipeline.masked import MaskedLatentPipeline as MaskedLatentPipeline
    from ragspec.visual.pipeline.pipeline import ImagePipeline as ImagePipeline

_WHERE = {
    "ChameleonPipeline": "ragspec.visual.pipeline.chameleon",
    "ChameleonTarget": "ragspec.visual.models.transformers_targets",
    "CodeNeighbours": "ragspec.visual.acceptance.codebook",
    "CodePartition": "ragspec.visual.acceptance.codebook",
    "ConditionTable": "ragspec.visual.models.target",
    "Emu3Pipeline": "ragspec.visual.pipeline.emu3",
    "Emu3Target": "ragspec.visual.models.transformers_targets",
    "ImageGPTTarget": "ragspec.visual.models.transformers_targets",
    "ImageOutput": "ragspec.visual.pipeline.base",
    "ImagePipeline": "ragspec.visual.pipeline.pipeline",
    "ImageTarget": "ragspec.visual.models.target",
    "JacobiDrafter": "ragspec.visual.drafting.jacobi",
    "JanusPipeline": "ragspec.visual.pipeline.janus",
    "JanusTarget": "ragspec.visual.models.transformers_targets",
    "KLAutoencoder": "ragspec.visual.models.kl",
    "LatentPipeline": "ragspec.visual.pipeline.latents",
    "LlamaGenConfig": "ragspec.visual.models.llamagen",
    "LlamaGenModel": "ragspec.visual.models.llamagen",
    "LlamaGenPipeline": "ragspec.visual.pipeline.llamagen",
    "MaskedLatentPipeline": "ragspec.visual.pipeline.masked",
    "VQTokenizer": "ragspec.visual.models.vq",
    "load_llamagen": "ragspec.visual.models.llamagen_checkpoint",
    "load_mar": "ragspec.visual.masked.checkpoint",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
