"""Training by several processes of one machine: each draws its own rows, gradients are averaged.

On a CPU two processes of one thread get more done than one process of two.
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import distributed, nn


def run_team(work: Callable[[int], None], workers: int) -> None:
    """Call `work(rank)` in each of `workers` processes, which end together; one needs no team."""
    if workers == 1:
        return work(0)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the members end by themselves
    try:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(
                _member, (workers, Path(folder) / "rendezvous", work), workers
            )
    finally:
        signal.signal(signal.SIGTERM, before)


def _member(rank: int, workers: int, rendezvous: Path, work: Callable[[int], None]) -> None:
    distributed.init_process_group(
        "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=workers
    )
    work(rank)
    distributed.barrier()
    distributed.destroy_process_group()


def team_size() -> int:
    """Return how many processes train together."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Put the mean of all processes' gradients in the place of each."""
    if team_size() == 1:
        return
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([grad.float().flatten() for grad in grads])
    distributed.all_reduce(flat)
    flat /= team_size()
    start = 0
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()


def agreed(value: float) -> float:
    """Return what the first process says, so that all do the same."""
    if team_size() == 1:
        return value
    message = torch.tensor([value], dtype=torch.float64)
    distributed.broadcast(message, 0)
    return float(message)
