"""Reads files of published weights without running code that they may hold.

The weights are under "model" (DDP), "module" (DeepSpeed), "state_dict", "ema" (a running mean) or
at the top (FSDP), in a torch pickle or in safetensors. Pickles are read with weights_only=True.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import ModelError, ModelNotFoundError

Tensors = dict[str, Tensor]

PLACES = ("model", "module", "state_dict", "ema")
_PREFIXES = ("_orig_mod.", "module.")  # of torch.compile and of wrappers
_REFUSED = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")


def read_checkpoint(
    path: str | Path, allow_namespace: bool = False, places: Sequence[str] = PLACES
) -> tuple[Tensors, Any]:
    """Return the weights of a file by their published names, and its training settings or None.

    Args:
        allow_namespace: Also open files of training scripts, which hold their settings as an
            argparse.Namespace (plain data, no code).
        places: Keys to look for the weights under, in this order, before the top.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelError: It cannot be read or holds other objects.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelNotFoundError(f"got {path}, which is no file; expected a .pt or .safetensors.")
    is_safe = file.suffix == ".safetensors"
    content = _open_safetensors(file) if is_safe else _open_pickle(file, allow_namespace)
    if not isinstance(content, Mapping):
        raise ModelError(f"{file.name} holds a {type(content).__name__}; expected named weights.")
    inner = next((content[p] for p in places if isinstance(content.get(p), Mapping)), content)
    weights = {}
    for name, value in inner.items():
        for prefix in _PREFIXES:
            name = str(name).removeprefix(prefix)
        if isinstance(value, Tensor):
            weights[name] = value
    return weights, content.get("args")


def check_finite(weights: Tensors, origin: str) -> None:
    """Raise ModelError for weights that are not finite floats: images would be blank."""
    wrong = [n for n, w in weights.items() if not (w.is_floating_point() and w.isfinite().all())]
    if wrong:
        raise ModelError(
            f"{origin} holds {', '.join(wrong[:3])} with values that are not finite numbers; "
            "expected floats without NaN and infinity. Copy it again, or load it in a wider dtype."
        )


def _open_safetensors(file: Path) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file.name} cannot be read as a safetensors file: {error}. Copy it again."
        ) from error


def _open_pickle(file: Path, allow_namespace: bool) -> Any:
    """Return the file's content; refuse anything but tensors and plain containers."""
    allowed: list[Any] = [argparse.Namespace] if allow_namespace else []
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a refusal, or whatever a damaged file may raise
        # Torch's own text advises how to run the file's code, so the message leaves it out.
        refused = _REFUSED.search(str(error))
        if refused is None:
            reason = str(error) if isinstance(error, OSError) else type(error).__name__
            raise ModelError(
                f"{file.name} cannot be read as a torch file of tensors ({reason}); expected what "
                "torch.save writes, whole. Copy it again, or save its weights as safetensors."
            ) from None
        what = refused.group(1)
        advice = (
            "If you trust its source, pass allow_namespace=True: it is opened as plain settings."
            if what == "argparse.Namespace"
            else "It will not be opened: such objects can run code. Save its weights alone."
        )
        raise ModelError(
            f"{file.name} holds {what}; expected tensors and plain containers. {advice}"
        ) from None
