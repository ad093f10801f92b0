"""Files of published weights: opened without running anything in them, wherever the weights lie.

The weights lie under "model" (DDP), "module" (DeepSpeed), "state_dict", "ema" (a running mean)
or at the top (FSDP), in a torch pickle or in safetensors. Pickles are opened with
weights_only=True.
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

    allow_namespace: also open files of training scripts, which hold their settings as an
    argparse.Namespace (plain data, no code). places: where weights may lie, the first that is there
    is taken; else the top. Raises ModelNotFoundError, and
    ModelError for files that cannot be read or hold other objects.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelNotFoundError(f"got {path}, which is no file; expected a .pt or .safetensors.")
    content = _open_safetensors(file) if file.suffix == ".safetensors" else None
    content = _open_pickle(file, allow_namespace) if content is None else content
    if not isinstance(content, Mapping):
        raise ModelError(f"{file.name} holds a {type(content).__name__}; expected named weights.")
    inner = next((content[p] for p in places if isinstance(content.get(p), Mapping)), content)
    record = {}
    for name, value in inner.items():
        for prefix in _PREFIXES:
            name = str(name).removeprefix(prefix)
        if isinstance(value, Tensor):
            record[name] = value
    return record, content.get("args")


def check_finite(weights: Tensors, origin: str) -> None:
    """Raise ModelError for weights that are no numbers: they would draw images of nothing."""
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
    """Return what the file holds; nothing but tensors and plain containers gets through."""
    allowed: list[Any] = [argparse.Namespace] if allow_namespace else []
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a refusal, or whatever a damaged file may raise
        # Torch's own text reports how to run what the file holds: it is shown to nobody.
        result = _REFUSED.search(str(error))
        if result is None:
            reason = str(error) if isinstance(error, OSError) else type(error).__name__
            raise ModelError(
                f"{file.name} cannot be read as a torch file of tensors ({reason}); expected what "
                "torch.save writes, whole. Copy it again, or save its weights as safetensors."
            ) from None
        what = result.group(1)
        advice = (
            "If you trust its source, pass allow_namespace=True: it is opened as plain settings."
            if what == "argparse.Namespace"
            else "It will not be opened: such objects can run code. Save its weights alone."
        )
        raise ModelError(
            f"{file.name} holds {what}; expected tensors and plain containers. {advice}"
        ) from None
