"""What an engine is made of, and what a forward of its target costs."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragspec.budget.base import BudgetPolicy
from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.cost_measurement import Padding, cached, context_lengths
from ragspec.drafters.base import Drafter
from ragspec.rules.base import Rule
from ragspec.storage.filesystem import cache_directory
from ragspec.verification.causal import CausalTarget

LONGEST_TIMED = 8192
_NO_COST = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
)


@dataclass(frozen=True, slots=True)
class Parts:
    """What one call of an engine works with.

    cost: the target's cost curve, None where no policy asks for it. tokenizer: None for ids only.
    """

    target: CausalTarget
    drafter: Drafter | None
    rule: Rule
    budget: BudgetPolicy
    cost: CostCurve | None
    tokenizer: Any


def read_cost(
    target: CausalTarget, budget: BudgetPolicy, cache: Path | None = None
) -> CostCurve | None:
    """Return the cost curve of the target where the budget needs one; measured once, cached."""
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
    padding = Padding(target.widths, target.time_forward) if target.widths else None
    return cached(cache or cache_directory(), key, target.time_forward, lengths, padding)


def model_identity(model: Any) -> str:
    """Return a short name for what a model costs: a hash of its configuration and sizes.

    Weights do not count: two checkpoints of one architecture cost the same. Nor does what saving
    or loading writes into a configuration.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NO_COST}
    sizes = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    known = json.dumps([config, sizes], sort_keys=True, default=str)
    return hashlib.sha256(known.encode()).hexdigest()[:24]


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu {platform.processor() or platform.machine()}"
    return str(torch.get_device_module(device).get_device_name(device))
