"""Check and probe a model and open it as a target."""

from __future__ import annotations

from typing import Any

from ragspec.models.supported import check_scope
from ragspec.verification.causal import CausalTarget
from ragspec.verification.probe import probe_target
from ragspec.verification.static.open import open_static


def open_target(model: Any, static: str = "auto") -> CausalTarget:
    """Return the target over a model that passed the load-time probe.

    Args:
        static: How steps of fixed shape run, see `static.target`. If the model cannot take such
            steps, it is verified without them, and the target's `static` has the reason.

    Raises:
        UnsupportedModelError: The model is outside the scope. The message has the reason.
        InputError: The mode is unknown, or the device lacks it.
    """
    check_scope(model)
    return open_static(probe_target(CausalTarget(model)).target, static)
