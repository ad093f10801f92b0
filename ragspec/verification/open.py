"""From a model to a target: its architecture is checked and probed."""

from __future__ import annotations

from typing import Any

from ragspec.models.supported import check_scope
from ragspec.verification.causal import CausalTarget
from ragspec.verification.probe import probe_target
from ragspec.verification.static.open import open_static


def open_target(model: Any, static: str = "auto") -> CausalTarget:
    """Return the target over a model, after its architecture passed the load-time probe.

    static: how its steps are taken, see `target.static`; a model that cannot be taken so is
    verified as before, its `static` says why. Raises UnsupportedModelError with the reason for
    models outside the scope, InputError for a mode that this device lacks.
    """
    check_scope(model)
    return open_static(probe_target(CausalTarget(model)).target, static)
