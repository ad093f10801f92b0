"""What a step asks of the device: launches, copies and waits, as torch's profiler saw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ragspec.models.device import is_cuda

MARK = "probe_step"
STEPS = 2
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cuGraphLaunch")
COPIES = ("cudaMemcpy", "cuMemcpy")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def counted(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Return what one step does, the mean of a few.

    On CUDA: launches, graphs (of these), copies and waits of the host, kernels and busy_ms of the
    device (while at least one kernel or copy ran). Elsewhere the operators that were called.
    """
    activities = [ProfilerActivity.CPU]
    if is_cuda(device):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            with record_function(MARK):
                step()
    # The raw events: torch's own summary of them takes seconds for a step of thousands of kernels.
    raw = profiler.profiler.kineto_results.events()
    kind = torch.autograd.DeviceType
    host = [Event.of(event) for event in raw if event.device_type() == kind.CPU]
    ran = [
        Event.of(event)
        for event in raw
        # What is marked on the host appears among the device's events, too, as one long one.
        if event.device_type() == kind.CUDA and "annotation" not in str(event.activity_type())
    ]
    result = on_cuda(host, ran) if is_cuda(device) else {"operators": _operators(host)}
    return {name: value / STEPS for name, value in result.items()}


class Event(NamedTuple):
    """A call of the host, or what the device did: nanoseconds of its start and its end."""

    name: str
    start: int
    end: int

    @classmethod
    def of(cls, raw: Any) -> Event:
        """Return an event as the profiler holds it."""
        return cls(raw.name(), raw.start_ns(), raw.start_ns() + raw.duration_ns())


def _operators(host: Sequence[Event]) -> float:
    return float(sum(event.name.startswith("aten::") for event in host))


def on_cuda(host: Sequence[Event], ran: Sequence[Event]) -> dict[str, float]:
    """Return what the host called within the steps, and what the device did; sums of all steps."""
    marks = [event for event in host if event.name == MARK]
    within = [e.name for e in host if any(m.start <= e.start <= m.end for m in marks)]
    ran = [event for event in ran if event.name != MARK]
    moved = sum(event.name.startswith(("Memcpy", "Memset")) for event in ran)
    return {
        "launches": float(sum(name.startswith(LAUNCHES) for name in within)),
        "graphs": float(sum("GraphLaunch" in name for name in within)),
        "copies": float(sum(name.startswith(COPIES) for name in within)),
        "waits": float(sum(name.startswith(WAITS) for name in within)),
        "kernels": float(len(ran) - moved),
        "busy_ms": _union(ran) / 1e6,
    }


def _union(ran: Sequence[Event]) -> int:
    """Return the nanoseconds in which at least one of the events went on."""
    total, until = 0, 0
    for _, start, end in sorted(ran, key=lambda event: event.start):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total
