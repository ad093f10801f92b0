"""Image models as targets, their tokenizers and their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.models.captions import CaptionEncoder as CaptionEncoder
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
    from ragspec.visual.models.transformers_targets import (
        janus_unconditional as janus_unconditional,
    )
    from ragspec.visual.models.vq import VQTokenizer as VQTokenizer

_WHERE = {
    "CaptionEncoder": "ragspec.visual.models.captions",
    "ChameleonTarget": "ragspec.visual.models.transformers_targets",
    "ConditionTable": "ragspec.visual.models.target",
    "Emu3Target": "ragspec.visual.models.transformers_targets",
    "ImageGPTTarget": "ragspec.visual.models.transformers_targets",
    "ImageTarget": "ragspec.visual.models.target",
    "JanusTarget": "ragspec.visual.models.transformers_targets",
    "KLAutoencoder": "ragspec.visual.models.kl",
    "LlamaGenConfig": "ragspec.visual.models.llamagen",
    "LlamaGenModel": "ragspec.visual.models.llamagen",
    "VQTokenizer": "ragspec.visual.models.vq",
    "janus_unconditional": "ragspec.visual.models.transformers_targets",
    "load_llamagen": "ragspec.visual.models.llamagen_checkpoint",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
