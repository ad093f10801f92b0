"""Launches, copies and waits of a step, counted by torch's profiler."""

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


def count_step(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Return the counts of one step, the mean of a few.

    On CUDA: launches, graph launches, copies and waits of the host, kernels of the device, and
    busy_ms, the time with a running kernel or copy. On other devices: called operators.
    """
    activities = [ProfilerActivity.CPU]
    if is_cuda(device):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            with record_function(MARK):
                step()
    # torch's summary of the raw events takes seconds for a step of thousands of kernels.
    raw = profiler.profiler.kineto_results.events()
    kind = torch.autograd.DeviceType
    host = [Event.of(event) for event in raw if event.device_type() == kind.CPU]
    ran = [
        Event.of(event)
        for event in raw
        # The marks of the host are also long events of the device.
        if event.device_type() == kind.CUDA and not event.is_user_annotation()
    ]
    totals = on_cuda(host, ran) if is_cuda(device) else {"operators": _operators(host)}
    return {name: value / STEPS for name, value in totals.items()}


class Event(NamedTuple):
    """A call of the host or work of the device, with start and end in nanoseconds."""

    name: str
    start: int
    end: int

    @classmethod
    def of(cls, raw: Any) -> Event:
        """Return an event of the profiler."""
        return cls(raw.name(), raw.start_ns(), raw.start_ns() + raw.duration_ns())


def _operators(host: Sequence[Event]) -> float:
    return float(sum(event.name.startswith("aten::") for event in host))


def on_cuda(host: Sequence[Event], ran: Sequence[Event]) -> dict[str, float]:
    """Return the counts of host and device within the steps, summed over all steps."""
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
    """Return the nanoseconds with at least one running event."""
    total, until = 0, 0
    for _, start, end in sorted(ran, key=lambda event: event.start):
        total += max(0, end - max(start, until))
        until = max(until, end)
    return total
