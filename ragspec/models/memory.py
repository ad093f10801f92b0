"""How much memory something will take, told before it is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import InputError
from ragspec.models.packed import free_memory

_GIGABYTE = 1e9
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of the numbers of safetensors
_OTHERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what takes them."""

    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return sum(self.parts.values())

    def summary(self) -> str:
        """Return one line for people, in GB of 10^9 bytes."""
        told = [f"{name} {size / _GIGABYTE:.2f}" for name, size in self.parts.items()]
        return f"{self.total / _GIGABYTE:.2f} GB ({', '.join(told)})"


def free_on(device: torch.device) -> int:
    """Return the free bytes of a device; 0 where it does not tell."""
    if device.type == "cpu":
        return free_memory()
    ask = getattr(torch.accelerator, "get_memory_info", None)  # of newer releases
    try:
        return 0 if ask is None else int(ask(device)[0])
    except (RuntimeError, ValueError):  # a device that does not tell
        return 0


def expect_room(
    needed: Memory, device: torch.device, what: str, advice: str, share: float = 1.0
) -> None:
    """Raise InputError where more than this share of a device's free memory is needed.

    what: what it is for. advice: what to do instead.
    """
    free = free_on(device)
    if free and needed.total > share * free:
        raise InputError(
            f"no room for {what}, which takes {needed.summary()}; {free / _GIGABYTE:.2f} GB are "
            f"free on {device}: {advice}"
        )


def weight_bytes(folder: Path, dtype: torch.dtype | str = "auto") -> int:
    """Return the bytes of the weights in a folder's safetensors, loaded in a dtype.

    "auto" keeps the files' own. Only their heads are read. What cannot be read counts nothing:
    loading tells of it.
    """
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else None
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        for told in _head(file).values():
            kind = str(told.get("dtype"))
            size = _FLOATS.get(kind) or _OTHERS.get(kind, 0)
            size = itemsize if itemsize and kind in _FLOATS else size
            total += size * prod(told.get("shape", [0]))
    return total


def _head(file: Path) -> dict[str, dict[str, Any]]:
    """Return what a safetensors file says of its tensors, by their names."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size:
                return {}
            found = json.loads(stream.read(length))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    found.pop("__metadata__", None)
    return {name: told for name, told in found.items() if isinstance(told, dict)}
