"""`ragspec doctor`: the installed packages, and the device."""

import platform
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from ragspec import __version__
from ragspec.pipelines.console.terminal import Terminal
from ragspec.storage.filesystem import cache_directory


def examine() -> dict[str, object]:
    """Return all findings as JSON types; packages are those that ragspec and its extras name."""
    packages: dict[str, str | None] = {}
    missing, requirements = list[str](), list[str]()
    try:
        requirements += requires("ragspec") or ()
    except PackageNotFoundError:  # it runs from a folder
        missing.append("ragspec")
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement)[0]
        packages[name] = None
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
        if packages[name] is None and "extra ==" not in requirement:
            missing.append(name)
    return {
        "ragspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "missing": missing,
        "device": _device(),
        "cache": str(cache_directory()),
    }


def _device() -> dict[str, object]:
    import numpy  # noqa: F401 - torch would lose an interrupt while it imports this
    import torch

    from ragspec.models.device import pick_device, pick_dtype
    from ragspec.models.onnx_session import missing_package
    from ragspec.models.quantized import LEAST
    from ragspec.verification.cpu_weights import available

    device = pick_device("auto")
    module: Any = getattr(torch, device.type, None)
    name, memory = platform.processor() or platform.machine(), None
    if hasattr(module, "get_device_name") and hasattr(module, "get_device_properties"):
        name = module.get_device_name(device)
        memory = round(module.get_device_properties(device).total_memory / 2**30, 1)
    dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
    runtime, cpu = "torch", device.type == "cpu"
    if cpu and not missing_package():
        runtime = f"ONNX Runtime, from {LEAST // 10**6} million weights on in 8 bits"
    return {
        "type": device.type,
        "name": name,
        "memory_gib": memory,
        "threads": torch.get_num_threads(),
        "dtype": "the checkpoint's own" if dtype == "auto" else dtype,
        "instructions": torch.backends.cpu.get_cpu_capability() if cpu else None,
        "runtime": runtime,
        "packed_weights": cpu and available(),
    }


def show(findings: dict[str, Any], terminal: Terminal) -> None:
    """Show the findings as tables."""
    device = findings["device"]
    memory = f", {device['memory_gib']} GiB" if device["memory_gib"] else ""
    rows = [
        ("ragspec", findings["ragspec"]),
        ("Python", f"{findings['python']} at {sys.executable}"),
        ("platform", findings["platform"]),
        ("device", f"{device['type']} ({device['name']}{memory})"),
        ("threads", str(device["threads"])),
        ("dtype by default", device["dtype"]),
        ("instructions", device["instructions"] or "the accelerator's"),
        ("Llama-like models run on", device["runtime"]),
        ("packed weights of others", "oneDNN's" if device["packed_weights"] else "no"),
        ("cache", findings["cache"]),
    ]
    terminal.table("This machine", ["what", "value"], rows)
    rows = [(name, number or "not installed") for name, number in findings["packages"].items()]
    terminal.table("Packages", ["package", "version"], rows)
    if findings["missing"]:
        terminal.line(f"Missing: {', '.join(findings['missing'])}. Run: pip install ragspec", "red")
