"""From a model to a target: its architecture is checked and probed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragspec.models.supported import check_scope
from ragspec.storage.filesystem import cache_directory
from ragspec.target.causal import CausalTarget
from ragspec.target.probe import probe_target


def open_target(model: Any, cache: Path | None = None) -> CausalTarget:
    """Return the target over a model, after its architecture passed the load-time probe.

    Raises UnsupportedModelError with the reason for models outside the scope.
    """
    check_scope(model)
    target = CausalTarget(model)
    verdict = probe_target(target, cache or cache_directory())
    return verdict.target
