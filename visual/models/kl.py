"""KL autoencoders over diffusers' `AutoencoderKL`: images to continuous latents and back.

MAR's published KL-16 (`kl16.ckpt`; Li et al., arXiv 2406.11838, appendix A) is converted to that
layout. Its layers are those of LDM (Rombach et al., 2112.10752), with attention in the encoder's
last block alone. diffusers numbers the decoder's blocks from the widest on.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ragspec.visual.models.autoencoder import (
    CONVOLUTIONS,
    LINEAR,
    Autoencoder,
    convolution_sizes,
    diffusers_names,
)
from ragspec.visual.models.published import Tensors, WeightLayout

FACTOR = 0.2325  # MAR's scaling factor for the latents of KL-16
_UP = re.compile(r"^(decoder\.up_blocks)\.(\d+)\.")


def _from_widest(published: Iterable[str]) -> dict[str, str]:
    """Return diffusers' names, which count the decoder's blocks from the widest one on."""
    names = diffusers_names(published)
    last = max((int(each[2]) for each in map(_UP.match, names.values()) if each), default=0)
    return {
        name: _UP.sub(lambda block: f"{block[1]}.{last - int(block[2])}.", ours)
        for name, ours in names.items()
    }


class KLAutoencoder(Autoencoder):
    """Encodes images as continuous latents f32 [B, h * w, d]; see `Autoencoder`.

    Args:
        model: An `AutoencoderKL`. Latents are the means, unscaled.

    Raises:
        UnsupportedModelError: The model is of another kind.
    """

    kind = "AutoencoderKL"
    example = "kl16.ckpt"
    parts = ("encode", "decode", "post_quant_conv")
    sizes = ("in_channels", "block_out_channels", "latent_channels")
    layout = WeightLayout(
        "KL autoencoder",
        CONVOLUTIONS,
        _from_widest,
        dropped=r"^(?:loss|model_ema)\.",  # of a training script's file: needed for training alone
        linear=LINEAR,
    )

    @staticmethod
    def build(weights: Tensors, published: Tensors, settings: object) -> nn.Module:
        """Return the model for published weights; see `WeightLayout.load`."""
        from diffusers import AutoencoderKL

        width = weights["decoder.conv_in.weight"].shape[1]
        model: nn.Module = AutoencoderKL(
            **convolution_sizes(weights), latent_channels=width, scaling_factor=FACTOR
        )
        return model

    @property
    def width(self) -> int:
        """The size of a latent, d."""
        return int(self.model.config.latent_channels)

    def _encode(self, images: Tensor) -> Tensor:
        return torch.as_tensor(self.model.encode(images).latent_dist.mean)

    def _decode(self, latents: Tensor) -> Tensor:
        return torch.as_tensor(self.model.decode(latents).sample)
