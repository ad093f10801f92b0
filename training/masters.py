"""Shared code of trainings: float32 masters, timed steps, checkpoints, checksums of files."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from team import agreed
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


def timed_steps(seconds: float, save: Callable[[], None], every: float = 120) -> Iterator[float]:
    """Yield the seconds that are left before each step; save every few minutes and at the end.

    SIGTERM ends the steps after the current one. In a team the first process keeps the time.
    """
    end, saved, stop = time.monotonic() + seconds, time.monotonic(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while (left := agreed(0.0 if stop.is_set() else end - time.monotonic())) > 0:
        yield left
        if time.monotonic() - saved > every:
            save()
            saved = time.monotonic()
    save()


def save_whole(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint beside the old one, then in its place."""
    part = path.with_suffix(".new")
    torch.save(state, part)
    part.replace(path)


def readable(folder: Path) -> None:
    """Let all users read the files of a folder."""
    for path in folder.iterdir():
        path.chmod(0o644)


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by its path there, without cards."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".md"
    }
