"""Pictures side by side, curves, and the Frechet distance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.visual.evaluation.curves import CurvePoint as CurvePoint
    from ragspec.visual.evaluation.curves import quality_curve as quality_curve
    from ragspec.visual.evaluation.frechet import FeatureNet as FeatureNet
    from ragspec.visual.evaluation.frechet import frechet_distance as frechet_distance
    from ragspec.visual.evaluation.grids import Cell as Cell
    from ragspec.visual.evaluation.grids import Heading as Heading
    from ragspec.visual.evaluation.grids import grid as grid
    from ragspec.visual.evaluation.pictures import comparison as comparison
    from ragspec.visual.evaluation.pictures import heat_map as heat_map
    from ragspec.visual.evaluation.pictures import sheet as sheet

_WHERE = {
    "Cell": "ragspec.visual.evaluation.grids",
    "CurvePoint": "ragspec.visual.evaluation.curves",
    "FeatureNet": "ragspec.visual.evaluation.frechet",
    "comparison": "ragspec.visual.evaluation.pictures",
    "frechet_distance": "ragspec.visual.evaluation.frechet",
    "Heading": "ragspec.visual.evaluation.grids",
    "grid": "ragspec.visual.evaluation.grids",
    "heat_map": "ragspec.visual.evaluation.pictures",
    "quality_curve": "ragspec.visual.evaluation.curves",
    "sheet": "ragspec.visual.evaluation.pictures",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
