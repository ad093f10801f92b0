"""Image tokens over the verification core; this room never meets `ragspec.retrievers`.

Importing this package is light: the public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragspec.visual.checkpoints import load_llamagen as load_llamagen
    from ragspec.visual.codebook import CodeNeighbours as CodeNeighbours
    from ragspec.visual.codebook import CodePartition as CodePartition
    from ragspec.visual.foreign import ChameleonTarget as ChameleonTarget
    from ragspec.visual.foreign import Emu3Target as Emu3Target
    from ragspec.visual.foreign import ImageGPTTarget as ImageGPTTarget
    from ragspec.visual.foreign import JanusTarget as JanusTarget
    from ragspec.visual.foreign import janus_unconditional as janus_unconditional
    from ragspec.visual.image_pipeline import ImageOutput as ImageOutput
    from ragspec.visual.image_pipeline import ImagePipeline as ImagePipeline
    from ragspec.visual.image_target import ConditionTable as ConditionTable
    from ragspec.visual.image_target import ImageTarget as ImageTarget
    from ragspec.visual.jacobi import JacobiDrafter as JacobiDrafter
    from ragspec.visual.llamagen import LlamaGenConfig as LlamaGenConfig
    from ragspec.visual.llamagen import LlamaGenModel as LlamaGenModel
    from ragspec.visual.vq import VQTokenizer as VQTokenizer

_WHERE = {
    "ChameleonTarget": "foreign",
    "CodeNeighbours": "codebook",
    "CodePartition": "codebook",
    "ConditionTable": "image_target",
    "Emu3Target": "foreign",
    "ImageGPTTarget": "foreign",
    "ImageOutput": "image_pipeline",
    "ImagePipeline": "image_pipeline",
    "ImageTarget": "image_target",
    "JacobiDrafter": "jacobi",
    "JanusTarget": "foreign",
    "LlamaGenConfig": "llamagen",
    "LlamaGenModel": "llamagen",
    "VQTokenizer": "vq",
    "janus_unconditional": "foreign",
    "load_llamagen": "checkpoints",
}

__all__ = [
    "ChameleonTarget",
    "CodeNeighbours",
    "CodePartition",
    "ConditionTable",
    "Emu3Target",
    "ImageGPTTarget",
    "ImageOutput",
    "ImagePipeline",
    "ImageTarget",
    "JacobiDrafter",
    "JanusTarget",
    "LlamaGenConfig",
    "LlamaGenModel",
    "VQTokenizer",
    "janus_unconditional",
    "load_llamagen",
]

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        from importlib import import_module

        if name not in _WHERE:
            raise AttributeError(f"module 'ragspec.visual' has no attribute {name!r}")
        value = getattr(import_module(f"ragspec.visual.{_WHERE[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
