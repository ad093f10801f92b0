"""What users of diffusers type on any pipeline: placing, offloading, decoding in slices.

The machinery of diffusers looks for modules by the names of the constructor's parameters and brings
them to the accelerator when their `forward` is called. Here the autoencoder hides in its wrapper,
and parts of a model are called by themselves (embeddings, heads), so that what is needed is brought
before it is used, whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from diffusers import DiffusionPipeline

from ragspec.errors import InputError

Call = TypeVar("Call", bound=Callable[..., Any])
_DECODED = 64  # images that are decoded at once
_AUTOENCODERS = ("vq", "vae")


class DiffusersMixin(DiffusionPipeline):  # type: ignore[misc, unused-ignore]
    """What image pipelines share with diffusers: where modules are, how many are decoded."""

    model_cpu_offload_seq: ClassVar[str] = "model"  # whose neighbours are hooked here
    _decoded_at_once: int = _DECODED

    def modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules that this pipeline computes with, by their names."""
        record = {name: getattr(self, name, None) for name in ("model", "draft", *_AUTOENCODERS)}
        record["text_encoder"] = getattr(getattr(self, "captions", None), "model", None)
        return {name: each for name, each in record.items() if isinstance(each, torch.nn.Module)}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move all models to a device, and target and draft model to a dtype."""
        super().to(*args, **kwargs)
        if self._is_offloaded:  # hooks know where
            return self
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

    def enable_model_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Keep the models in the memory of the CPU, each on the accelerator only while it works.

        Target and draft model work in one batch, then the autoencoder. Raises InputError where
        there is no accelerator.
        """
        _expect_accelerator("enable_model_cpu_offload", device)
        super().enable_model_cpu_offload(gpu_id, device)
        from accelerate import cpu_offload_with_hook

        before = self._all_hooks[-1] if self._all_hooks else None
        for name, module in self.modules().items():
            if name != "model":
                # Coming, an autoencoder sends the target away; a draft works beside it.
                prior = before if name in _AUTOENCODERS else None
                _, hook = cpu_offload_with_hook(module, self._offload_device, prior)
                self._all_hooks.append(hook)

    def enable_sequential_cpu_offload(
        self, gpu_id: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """Keep the weights in the memory of the CPU, each layer's copied for its own forward.

        The autoencoder, which is small, stays on the accelerator. Raises InputError where there is
        no accelerator.
        """
        _expect_accelerator("enable_sequential_cpu_offload", device)
        super().enable_sequential_cpu_offload(gpu_id, device)
        from accelerate import cpu_offload

        for name, module in self.modules().items():
            if name in _AUTOENCODERS:
                module.to(self._offload_device)
            elif name != "model":
                cpu_offload(module, self._offload_device, offload_buffers=bool(module._parameters))

    def remove_all_hooks(self) -> None:
        """Take offloading back; the models stay where they are."""
        super().remove_all_hooks()
        for module in self.modules().values():
            if hasattr(module, "_hf_hook"):
                _unhook(module)

    @property
    def _is_offloaded(self) -> bool:
        return any(hasattr(module, "_hf_hook") for module in self.modules().values())

    def _bring(self, *names: str) -> None:
        """Bring modules that are offloaded whole to the accelerator."""
        for module, hook in self._offloaded(names):
            hook.pre_forward(module)

    def _send_away(self, *names: str) -> None:
        """Send modules that are offloaded whole back to the memory of the CPU."""
        for module, hook in self._offloaded(names):
            hook.init_hook(module)

    def _offloaded(self, names: tuple[str, ...]) -> list[tuple[torch.nn.Module, Any]]:
        """Return those of the modules that are offloaded whole, each with its hook."""
        modules = self.modules()
        results = [modules[name] for name in names if name in modules]
        hooked = [(each, getattr(each, "_hf_hook", None)) for each in results]
        return [(each, hook) for each, hook in hooked if type(hook).__name__ == "CpuOffload"]

    def _decoded(
        self, decode: Callable[[torch.Tensor], torch.Tensor], grids: torch.Tensor
    ) -> torch.Tensor:
        """Return the images of grids [B, h, w, ...], some at a time, on the CPU."""
        self._bring(*_AUTOENCODERS)
        parts = torch.split(grids, self._decoded_at_once)
        return torch.cat([decode(part).cpu() for part in parts])


def frees(call: Call) -> Call:
    """Have offloaded models leave the accelerator when a call ends, by an error too."""

    @wraps(call)
    def called(self: DiffusersMixin, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        finally:
            self.maybe_free_model_hooks()

    return cast(Call, called)


def _expect_accelerator(what: str, device: torch.device | str | None) -> None:
    """Raise InputError where nobody names a device and the machine has none but its CPU."""
    if device is None and not torch.accelerator.is_available():
        raise InputError(
            f"{what} moves models between the memory of the CPU and an accelerator, and torch "
            "finds none here; expected a GPU. Leave it out: on a CPU the models are where they "
            "are needed. enable_vae_slicing() and dtype=torch.bfloat16 take less memory."
        )


def _unhook(module: torch.nn.Module) -> None:
    """Take the hooks of accelerate off a module and all that is in it."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(module, recurse=True)
