"""What loaders and savers of diffusers are told: done as asked, or refused with what to do."""

from __future__ import annotations

from typing import Any

import torch

from ragspec.errors import InputError

_SPREAD = ("balanced", "balanced_low_0", "sequential")  # placements over several devices
_ALWAYS = {  # what loaders of diffusers may be told that is so in any case
    "use_safetensors": "weights are read from safetensors alone, as other files may hold code",
    "low_cpu_mem_usage": "weights are always read into their places, without a second copy",
}
_ONE = "a folder of an image generator holds one set of weights"
_CACHE = "models come from the cache of huggingface_hub, which HF_HOME moves"
_REFUSED = {
    "variant": f"{_ONE}; dtype asks for other numbers (dtype=torch.float16)",
    "revision": f"{_ONE}; fetch another revision with huggingface_hub and give its folder",
    "subfolder": f"{_ONE}; give the path of the folder itself",
    "cache_dir": _CACHE,
    "force_download": f"{_CACHE}; delete it there to fetch it again",
    "proxies": f"{_CACHE}; HTTPS_PROXY names a proxy",
    "token": f"{_CACHE}; log in with `hf auth login`, or set HF_TOKEN",
    "custom_pipeline": "the class that is called is the pipeline",
    "custom_revision": "the class that is called is the pipeline",
    "trust_remote_code": "no code of a folder is run",
    "quantization_config": "image models are not quantised; dtype=torch.bfloat16 halves them",
    "max_memory": "image models are not spread over several devices",
    "offload_folder": "image models are not spread over several devices",
    "offload_state_dict": "image models are not spread over several devices",
    "use_flashpack": "weights are read from safetensors alone",
    "disable_mmap": "weights are mapped into memory",
    "use_onnx": "weights are read from safetensors alone",
}


def check_loading(
    settings: dict[str, Any], device: str | torch.device
) -> tuple[str | torch.device, bool]:
    """Take what loaders of diffusers are told out of the settings; returns device and offline.

    Done as asked: device_map for one device, local_files_only, use_safetensors and
    low_cpu_mem_usage where they are true, which they always are. Raises InputError for several
    devices, and for what folders of image generators have not.
    """
    for name, reason in _ALWAYS.items():
        if settings.pop(name, None) is False:
            raise InputError(f"got {name}=False; {reason}. Leave it out.")
    for name, instead in _REFUSED.items():
        if (inputs := settings.pop(name, None)) not in (None, False):
            raise InputError(f"got {name}={inputs!r}; expected nothing there: {instead}.")
    offline = bool(settings.pop("local_files_only", False))
    where = settings.pop("device_map", None)
    if isinstance(where, dict) and len(set(where.values())) == 1:
        where = next(iter(where.values()))
    if where is None:
        return device, offline
    if isinstance(where, str | int | torch.device) and where not in _SPREAD:
        return (where if where == "auto" else torch.device(where)), offline
    raise InputError(
        f"got device_map={where!r}; expected one device: image models are not spread over several. "
        "Give device='cuda', or leave it out; enable_sequential_cpu_offload() draws with models "
        "that are larger than an accelerator's memory."
    )


def saving(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what `save_pretrained` of diffusers was told, as far as models of transformers go.

    Raises InputError for what is not written here.
    """
    record = {name: value for name, value in inputs.items() if value is not None}
    if record.pop("safe_serialization", True) is not True:
        raise InputError(
            "got safe_serialization=False; expected True: weights are written as safetensors "
            "alone. Leave it out."
        )
    if "variant" in record:
        raise InputError(f"got variant={record['variant']!r}; {_REFUSED['variant']}.")
    return record
