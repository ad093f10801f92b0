"""The common interface of diffusers pipelines: loading, device moves, sliced decoding, saving.

Keywords of diffusers' loaders and savers take effect, or raise `InputError` with an alternative.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from ragspec.errors import InputError
from ragspec.visual.checks import class_number

_DECODED = 64  # images in one batch of the decoder
_SPREAD = ("balanced", "balanced_low_0", "sequential")  # device maps over several devices
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
    """Gives image pipelines diffusers' methods for devices, sliced decoding and offloading."""

    image_processor: Any
    _decoded_at_once: int = _DECODED
    _interrupt: bool = False  # a callback may set it to end the call

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the pipeline's torch modules by name, the text encoder included."""
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
        """Decode up to 64 images at a time, the default."""
        self._decoded_at_once = _DECODED

    def enable_model_cpu_offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse offloading: every forward of an autoregressive model needs all of its weights.

        Raises:
            InputError: Always, with other ways to save memory.
        """
        raise InputError(
            "got a request to offload; expected none: each code takes a pass over all weights, "
            "which would be copied every time. enable_vae_slicing(), dtype=torch.bfloat16 and a "
            "text_encoder function that runs elsewhere take less memory."
        )

    enable_sequential_cpu_offload = enable_model_cpu_offload

    def decode(self, codes: Tensor, output_type: str = "pil") -> Any:
        """Decode codes or latents [B, h, w, ...] into images of an output_type; see `ImageOutput`.

        Raises:
            ModelError: The pipeline has no decoder.
        """
        self._check_decoder(output_type)
        if output_type == "latent":
            return codes
        parts = torch.split(codes, self._decoded_at_once)
        images = torch.cat([self._pixels(part).cpu() for part in parts])
        return self.image_processor.postprocess(images, output_type)

    def _check_decoder(self, output_type: str) -> None:
        """Raise ModelError if the output_type needs a decoder and there is none."""

    def _pixels(self, codes: Tensor) -> Tensor:
        """Decode a slice of codes or latents [b, h, w, ...] into images f32 [b, 3, H, W]."""
        raise NotImplementedError


class ClassPipeline(DiffusersMixin):
    """The base of pipelines whose models may take class labels.

    Attributes:
        class_names: Of all classes in order; empty if the model has none.
    """

    class_names: tuple[str, ...]

    @property
    def trunk(self) -> Any:
        """The transformer that reads conditions, and codes or latents."""
        return self.model

    def label_of(self, inputs: int | str) -> int:
        """Return the number of a class that is given by number or by name.

        Raises:
            InputError: The model has no such class.
        """
        return class_number(inputs, self.class_names, int(self.trunk.config.num_classes))


def check_loading(
    settings: dict[str, Any], device: str | torch.device
) -> tuple[str | torch.device, bool]:
    """Remove the keywords of diffusers' loaders from the settings, and apply them.

    The loader accepts device_map for one device and local_files_only. use_safetensors and
    low_cpu_mem_usage are always true.

    Returns:
        The device, and whether to stay offline.

    Raises:
        InputError: device_map names several devices, or a keyword is unsupported.
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
    """Return the keywords of diffusers' `save_pretrained` that transformers' models accept.

    Raises:
        InputError: safe_serialization is false, or a variant is set.
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
