"""Float32 masters of a model in the CPU's fast type, and checkpoints that are whole or absent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.verification.cpu_weights import available, halves

HALVES = available() and halves()
FAST = torch.bfloat16 if HALVES else torch.float32


def move_masters(
    model: Any,
    masters: dict[str, Tensor],
    optimisers: Sequence[torch.optim.Optimizer],
    rates: Sequence[float],
    factor: float,
) -> None:
    """Move the masters by the clipped gradients of the model and copy them into it.

    optimisers: over the masters, or over further parameters of their own; rates: the full rate of
    each, of which `factor` is taken.
    """
    for key, parameter in model.named_parameters():
        masters[key].grad = parameter.grad.float()
        parameter.grad = None
    torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
    for optimiser, rate in zip(optimisers, rates, strict=True):
        for group in optimiser.param_groups:
            group["lr"] = rate * factor
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(masters[key])


def save_whole(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint beside the old one, then in its place."""
    part = path.with_suffix(".new")
    torch.save(state, part)
    part.replace(path)
