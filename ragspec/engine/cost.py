"""The measured cost curve of a target, cached by the model's configuration and the machine."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from ragspec.budget.base import BudgetPolicy
from ragspec.budget.cost_curve import CostCurve, cached, context_lengths
from ragspec.storage.filesystem import cache_directory
from ragspec.verification.causal import CausalTarget

LONGEST_TIMED = 8192
_NO_COST = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
)


def read_cost(
    target: CausalTarget, budget: BudgetPolicy, cache: Path | None = None
) -> CostCurve | None:
    """Return the target's cost curve, measured once and cached; None if the budget needs none."""
    if not budget.needs_cost:
        return None
    key: dict[str, str | int] = {
        "model": model_identity(target.model),
        "device": _device_name(target.device),
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "steps": target.static.split(":")[0],
    }
    lengths = context_lengths(min(target.max_length or LONGEST_TIMED, LONGEST_TIMED))
    return cached(
        cache or cache_directory(), key, target.time_forward, lengths, tuple(target.widths)
    )


def model_identity(model: Any) -> str:
    """Return a hash of a model's configuration and sizes, which is a key for its cost.

    Weights do not count, as two checkpoints of one architecture cost the same. Nor do the entries
    that saving or loading writes into a configuration.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NO_COST}
    sizes = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    text = json.dumps([config, sizes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu {platform.processor() or platform.machine()}"
    return str(torch.get_device_module(device).get_device_name(device))
