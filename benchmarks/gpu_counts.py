"""What a step asks of the device: launches, copies and waits, as torch's profiler saw them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
    device (when at least one kernel or copy ran). Elsewhere the operators that were called.
    """
    activities = [ProfilerActivity.CPU]
    if is_cuda(device):
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            with record_function(MARK):
                step()
    found = _cuda(profiler.events()) if is_cuda(device) else _operators(profiler.events())
    return {name: value / STEPS for name, value in found.items()}


def _operators(events: Any) -> dict[str, float]:
    return {"operators": float(sum(event.name.startswith("aten::") for event in events))}


def _cuda(events: Any) -> dict[str, float]:
    """Count the host's calls within the steps, and what the device did."""
    kind = torch.autograd.DeviceType
    host = [event for event in events if event.device_type == kind.CPU]
    marks = [event.time_range for event in host if event.name == MARK]
    within = [
        event.name
        for event in host
        if any(m.start <= event.time_range.start <= m.end for m in marks)
    ]
    # What is marked on the host appears among the device's events, too, as one long one.
    ran = [event for event in events if event.device_type == kind.CUDA and event.name != MARK]
    moved = [event.name.startswith(("Memcpy", "Memset")) for event in ran]
    busy = _union((event.time_range.start, event.time_range.end) for event in ran)
    return {
        "launches": float(sum(name.startswith(LAUNCHES) for name in within)),
        "graphs": float(sum("GraphLaunch" in name for name in within)),
        "copies": float(sum(name.startswith(COPIES) for name in within)),
        "waits": float(sum(name.startswith(WAITS) for name in within)),
        "kernels": float(len(ran) - sum(moved)),
        "busy_ms": busy / 1000,
    }


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long at least one of the spans lasted."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
