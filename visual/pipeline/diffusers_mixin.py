"""What users of diffusers type on any pipeline: loading, placing, decoding in slices, saving.

Keywords of loaders and savers are done as asked, or refused with what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from ragspec.errors import InputError

_DECODED = 64  # images that are decoded at once
_SPREAD = ("balanced", "balanced_low_0", "sequential")  # placements over several devices
_CACHE = "models come from the cache of huggingface_hub: set HF_HOME, HF_TOKEN or HTTPS_PROXY"
_ONE = "a folder of an image generator holds one set of weights; give the path of the folder itself"
_NO_CODE = "no code of a folder is run"
_SAFE = "weights are read from safetensors alone"
_TOGETHER = "image models are not spread over several devices"
_REFUSED = {
    **dict.fromkeys(("variant", "revision", "subfolder"), _ONE),
    **dict.fromkeys(("cache_dir", "force_download", "proxies", "token"), _CACHE),
    **dict.fromkeys(("custom_pipeline", "custom_revision", "trust_remote_code"), _NO_CODE),
    **dict.fromkeys(("use_flashpack", "disable_mmap", "use_onnx"), _SAFE),
    **dict.fromkeys(("max_memory", "offload_folder", "offload_state_dict"), _TOGETHER),
    "quantization_config": "image models are not quantised; dtype=torch.bfloat16 halves them",
}


class DiffusersMixin(DiffusionPipeline):  # type: ignore[misc, unused-ignore]
    """What image pipelines share with diffusers: where modules are, how many are decoded."""

    _decoded_at_once: int = _DECODED

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules that this pipeline computes with, by their names."""
        record = {name: getattr(self, name, None) for name in ("model", "draft", "vq", "vae")}
        record["text_encoder"] = getattr(getattr(self, "captions", None), "model", None)
        return {name: each for name, each in record.items() if isinstance(each, torch.nn.Module)}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move all models to a device, and target and draft model to a dtype."""
        super().to(*args, **kwargs)
        for name, module in self.modules().items():
            if name == "draft":
                module.to(self.device, self.dtype)
            elif name != "model":
                module.to(self.device)
        return self

    def enable_vae_slicing(self) -> None:
        """Decode one image at a time, which takes the least memory."""
        self._decoded_at_once = 1

    def disable_vae_slicing(self) -> None:
        """Decode many images at a time again."""
        self._decoded_at_once = _DECODED

    def enable_model_cpu_offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse offloading: every pass of an autoregressive model needs all of its weights.

        Raises:
            InputError: Always, with what takes less memory.
        """
        raise InputError(
            "got a request to offload; expected none: each code takes a pass over all weights, "
            "which would be copied every time. enable_vae_slicing(), dtype=torch.bfloat16 and a "
            "text_encoder function that runs elsewhere take less memory."
        )

    enable_sequential_cpu_offload = enable_model_cpu_offload

    def _decoded(self, decode: Callable[[Tensor], Tensor], grids: Tensor) -> Tensor:
        """Return the images of grids [B, h, w, ...], some at a time, on the CPU."""
        parts = torch.split(grids, self._decoded_at_once)
        return torch.cat([decode(part).cpu() for part in parts])


def check_loading(
    settings: dict[str, Any], device: str | torch.device
) -> tuple[str | torch.device, bool]:
    """Take what loaders of diffusers are told out of the settings.

    Done as asked: device_map for one device, local_files_only, use_safetensors and
    low_cpu_mem_usage where they are true, which they always are.

    Returns:
        The device, and whether the hub must not be asked.

    Raises:
        InputError: For several devices, and for what folders of image generators have not.
    """
    for name in ("use_safetensors", "low_cpu_mem_usage"):
        if settings.pop(name, None) is False:
            raise InputError(f"got {name}=False; it is always true here. Leave it out.")
    for name, instead in _REFUSED.items():
        if (value := settings.pop(name, None)) not in (None, False):
            raise InputError(f"got {name}={value!r}; expected nothing there: {instead}.")
    offline = bool(settings.pop("local_files_only", False))
    where = settings.pop("device_map", None)
    if isinstance(where, dict) and len(set(where.values())) == 1:
        where = next(iter(where.values()))
    if where is None:
        return device, offline
    if isinstance(where, str | int | torch.device) and where not in _SPREAD:
        return (where if where == "auto" else torch.device(where)), offline
    raise InputError(
        f"got device_map={where!r}; expected one device: {_TOGETHER}. "
        "Give device='cuda', or leave it out."
    )


def saving(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what `save_pretrained` of diffusers was told, as far as models of transformers go.

    Raises:
        InputError: For what is not written here.
    """
    record = {name: value for name, value in settings.items() if value is not None}
    if record.pop("safe_serialization", True) is not True:
        raise InputError(
            "got safe_serialization=False; expected True: weights are written as safetensors "
            "alone. Leave it out."
        )
    if "variant" in record:
        raise InputError(f"got variant={record['variant']!r}; expected nothing there: {_ONE}.")
    return record
