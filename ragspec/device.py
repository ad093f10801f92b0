"""Where a model runs and in which numbers."""

from __future__ import annotations

import torch

from ragspec.errors import InputError

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device for a name; "auto" is the accelerator where there is one, else the CPU."""
    if isinstance(device, torch.device):
        return device
    if device != "auto":
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise InputError(
                f"device {device!r} is unknown to torch; expected 'auto', 'cpu' or an "
                "accelerator such as 'cuda:0'"
            ) from error
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """Return what to give transformers as `dtype`.

    "auto" is the checkpoint's own on an accelerator and float32 on a CPU, where it is exact to
    the last token and for small batches no slower.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in _DTYPES:
        raise InputError(
            f"dtype {dtype!r} is unknown; expected 'auto' or one of {', '.join(sorted(_DTYPES))}"
        )
    return _DTYPES[dtype]
