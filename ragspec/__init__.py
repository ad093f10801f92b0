"""Retrieval-augmented and multimodal speculation: the same output, sooner.

`import ragspec` is light: the public names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.drafters.model.drafter import ModelDrafter as ModelDrafter
    from ragspec.engine.engine import Engine as Engine
    from ragspec.engine.output import Generation as Generation
    from ragspec.engine.pool import Pool as Pool
    from ragspec.errors import RagspecError as RagspecError
    from ragspec.models.load import load_model as load_model
    from ragspec.reports.report import Report as Report
    from ragspec.sampling.settings import Sampling as Sampling

__version__ = "0.1.0"

_WHERE = {
    "Engine": "ragspec.engine.engine",
    "Generation": "ragspec.engine.output",
    "ModelDrafter": "ragspec.drafters.model.drafter",
    "Pool": "ragspec.engine.pool",
    "RagspecError": "ragspec.errors",
    "Report": "ragspec.reports.report",
    "Sampling": "ragspec.sampling.settings",
    "load_model": "ragspec.models.load",
}

__all__ = sorted([*_WHERE, "__version__"])

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
