"""The model whose output is wanted: one forward over a tree for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.target.base import CachedSession as CachedSession
    from ragspec.target.base import StepSession as StepSession
    from ragspec.target.base import TargetSession as TargetSession
    from ragspec.target.causal import CausalTarget as CausalTarget
    from ragspec.target.constant_width import ConstantWidthTarget as ConstantWidthTarget
    from ragspec.target.open import open_target as open_target
    from ragspec.target.path_rows import PathTarget as PathTarget
    from ragspec.target.probe import probe_target as probe_target

_WHERE = {
    "CachedSession": "ragspec.target.base",
    "CausalTarget": "ragspec.target.causal",
    "ConstantWidthTarget": "ragspec.target.constant_width",
    "PathTarget": "ragspec.target.path_rows",
    "StepSession": "ragspec.target.base",
    "TargetSession": "ragspec.target.base",
    "open_target": "ragspec.target.open",
    "probe_target": "ragspec.target.probe",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
