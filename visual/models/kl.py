"""KL autoencoders over diffusers' `AutoencoderKL`: images to continuous latents and back.

MAR's published KL-16 (`kl16.ckpt`; Li et al., arXiv 2406.11838, appendix A) is converted to that
layout. Its layers are those of LDM (Rombach et al., 2112.10752), with attention in the encoder's
last block alone. diffusers numbers the decoder's blocks from the widest on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError, ModelError, UnsupportedModelError
from ragspec.visual.models.vq_checkpoint import (
    convolution_sizes,
    diffusers_name,
    is_convolution,
    open_folder,
    save_folder,
    with_linear_layers,
    with_weights,
)
from ragspec.visual.models.weights_file import Tensors, check_finite, read_checkpoint

FACTOR = 0.2325  # MAR's scaling factor for the latents of KL-16
_TRAINING = ("loss.", "model_ema.")  # of a training script's file: needed for training alone
_UP = re.compile(r"^decoder\.up\.(\d+)\.")
_NEEDED = (
    "encoder.conv_in.weight",
    "encoder.down.0.block.0.conv1.weight",
    "encoder.conv_out.weight",
    "decoder.conv_in.weight",
    "decoder.conv_out.weight",
)


class KLAutoencoder:
    """Encodes images f32 [B, C, H, W] in [-1, 1] as latents f32 [B, h * w, d], and decodes them.

    Args:
        model: An `AutoencoderKL`. Latents are the means, unscaled.

    Raises:
        UnsupportedModelError: The model is of another kind.
    """

    def __init__(self, model: Any) -> None:
        if not all(hasattr(model, part) for part in ("encode", "decode", "config")) or not hasattr(
            model.config, "latent_channels"
        ):
            raise UnsupportedModelError(
                f"got a {type(model).__name__}; expected a diffusers AutoencoderKL."
            )
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, dtype: torch.dtype = torch.float32, allow_namespace: bool = False
    ) -> KLAutoencoder:
        """Load a folder in diffusers' layout (safetensors only), or a published file (`kl16.ckpt`).

        Args:
            allow_namespace: For files, see `read_checkpoint`.

        Raises:
            ModelNotFoundError: The path holds neither.
            ModelError: Weights are missing, do not fit or must not be opened.
        """
        from diffusers import AutoencoderKL

        folder = Path(path)
        if folder.is_file():
            return cls(load_kl(folder, dtype, allow_namespace))
        return cls(open_folder(AutoencoderKL, folder, dtype, "kl16.ckpt"))

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write config and safetensors to a folder, the weights in `dtype`."""
        save_folder(self.model, path, dtype)

    @property
    def width(self) -> int:
        """The size of a latent, d."""
        return int(self.model.config.latent_channels)

    @property
    def reduction(self) -> int:
        """Pixels per latent along one side."""
        return int(2 ** (len(self.model.config.block_out_channels) - 1))

    @torch.no_grad()
    def latents(self, images: Tensor) -> Tensor:
        """Return the means f32 [B, h * w, d] of the latents of images.

        Raises:
            InputError: The images have another shape, or a side is no multiple of `reduction`.
        """
        sides = images.shape[2:]
        if images.ndim != 4 or any(side % self.reduction or not side for side in sides):
            raise InputError(
                f"got pictures of shape {list(images.shape)}; expected [B, C, H, W] whose sides "
                f"are multiples of {self.reduction}."
            )
        pixels = images.to(self.model.device, self.model.dtype)
        means: Tensor = self.model.encode(pixels).latent_dist.mean
        return means.flatten(2).transpose(1, 2).float()

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Return images f32 [B, C, H, W] in [-1, 1] of latents [B, h, w, d].

        Raises:
            InputError: The latents have another shape.
        """
        if latents.ndim != 4 or latents.shape[-1] != self.width:
            raise InputError(
                f"got latents of shape {list(latents.shape)}; expected [B, h, w, {self.width}]."
            )
        laid = latents.to(self.model.device, self.model.dtype).permute(0, 3, 1, 2)
        images: Tensor = self.model.decode(laid).sample.float()
        return images.clamp(-1, 1)


def load_kl(
    path: str | Path, dtype: torch.dtype = torch.float32, allow_namespace: bool = False
) -> Any:
    """Load the `AutoencoderKL` of a published file, in eval mode on the CPU.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelError: It holds other objects, other weights or weights that are not finite.
    """
    from diffusers import AutoencoderKL

    origin = Path(path).name
    tensors, _ = read_checkpoint(path, allow_namespace)
    published = {
        name: value.to(dtype) for name, value in tensors.items() if not name.startswith(_TRAINING)
    }
    _check_kind(published, origin)
    check_finite(published, origin)
    levels = 1 + max((int(each[1]) for each in map(_UP.match, published) if each), default=0)
    names = {name: diffusers_name(_from_widest(name, levels)) for name in published}
    weights = with_linear_layers({ours: published[name] for name, ours in names.items()})
    config = convolution_sizes(weights, origin)
    width = weights["decoder.conv_in.weight"].shape[1]
    with torch.device("meta"):
        model = AutoencoderKL(**config, latent_channels=width, scaling_factor=FACTOR)
    return with_weights(model, weights, names, origin, "KL autoencoder")


def _from_widest(name: str, levels: int) -> str:
    """Return a weight's name with the decoder's blocks counted from the widest, as in diffusers."""
    block = _UP.match(name)
    return name if block is None else _UP.sub(f"decoder.up.{levels - 1 - int(block[1])}.", name)


def _check_kind(published: Tensors, origin: str) -> None:
    """Raise ModelError for weights of something else."""
    lacking = [name for name in _NEEDED if not is_convolution(published, name)]
    if lacking:
        names = ", ".join(sorted(published)[:3]) or "no tensors"
        raise ModelError(
            f"{origin} is no KL autoencoder in the published layout: it holds {names}, and no "
            f"{lacking[0]}; expected encoder and decoder under model or at the top."
        )
