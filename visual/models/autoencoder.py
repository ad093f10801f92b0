"""Autoencoders over models of diffusers, and the layouts of published convolutional ones.

`KLAutoencoder` has continuous latents; `VQTokenizer` looks codes up. MAR's published KL-16
(`kl16.ckpt`; Li et al., arXiv 2406.11838, appendix A) has attention in the encoder's last block
alone. diffusers numbers the decoder's blocks from the widest on.

The layouts are LDM's (Rombach et al., arXiv 2112.10752; Chameleon's and MAR's), Janus' and
LlamaGen's. All follow Esser et al. (2012.09841). Attention's 1 x 1 convolutions are linear in
diffusers. Widths and blocks are read off the shapes; the groups of the norms are 32 everywhere.
"""

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import count, takewhile
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from ragspec.errors import InputError, ModelError, UnsupportedModelError
from ragspec.visual.checks import bounded, check_images
from ragspec.visual.loading import expect_readable, read_kind
from ragspec.visual.models.published import Tensors, WeightLayout, by_patterns

_GROUPS = 32
FACTOR = 0.2325  # MAR's scaling factor for the latents of KL-16
_UP = re.compile(r"^(decoder\.up_blocks)\.(\d+)\.")
LINEAR = r"\.attentions\.\d+\.to_(?:[qkv]|out\.0)\.weight$"
_in_order = by_patterns(
    # LlamaGen's name | Janus' name
    (r"^encoder\.(?:conv_blocks|down)\.", "encoder.down_blocks."),
    (r"^decoder\.(?:conv_blocks|up)\.", "decoder.up_blocks."),
    (r"\.(?:res|block)\.(?=\d)", ".resnets."),
    (r"\.attn\.(?=\d)", ".attentions."),
    (r"\.(down|up)sample\.conv\.", r".\1samplers.0.conv."),
    (r"\.mid\.(?:0|block_1)\.", ".mid_block.resnets.0."),
    (r"\.mid\.(?:1|attn_1)\.", ".mid_block.attentions.0."),
    (r"\.mid\.(?:2|block_2)\.", ".mid_block.resnets.1."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"coder\.norm_out\.", "coder.conv_norm_out."),
    (r"(attentions\.\d+)\.norm\.", r"\1.group_norm."),
    (r"(attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
    (r"(attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
)
CONVOLUTIONS = {  # axes of weights that determine sizes
    "encoder.conv_in.weight": 4,
    "encoder.down_blocks.0.resnets.0.conv1.weight": 4,
    "encoder.conv_out.weight": 4,
    "decoder.conv_in.weight": 4,
    "decoder.conv_out.weight": 4,
}


class Autoencoder:
    """Encodes images f32 [B, C, H, W] in [-1, 1] as latents, and back, by a diffusers model.

    Attributes:
        kind, example: The name of the model's class in diffusers, and that of a published file.
        parts, sizes: What a model must have, and its configuration.
        reduction: Pixels per latent along one side.
    """

    kind: ClassVar[str]
    example: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    sizes: ClassVar[tuple[str, ...]]
    layout: ClassVar[WeightLayout]
    build: ClassVar[Callable[..., nn.Module]]  # see `WeightLayout.load`
    model: Any
    _encode: Callable[[Tensor], Tensor]  # images to latents [B, d, h, w]
    _decode: Callable[[Tensor], Tensor]  # and back

    @classmethod
    def from_pretrained(
        cls, path: str | Path, dtype: torch.dtype = torch.float32, **settings: bool
    ) -> Self:
        """Load a folder in diffusers' layout (safetensors only) or a published file, with settings.

        Raises:
            MissingModelError: The path holds neither.
            ModelError: Weights are missing, do not fit or must not be opened.
        """
        import diffusers

        folder = Path(path)
        if folder.is_file():
            return cls(cls.layout.load(folder, cls.build, dtype), **settings)
        read_kind(folder, f"a {cls.kind}, or a published file such as {cls.example}")
        subject = f"got a {cls.kind} in {str(path)!r} that does not load"
        with expect_readable(subject, "safetensors that fit its config.json. Save it again."):
            model = getattr(diffusers, cls.kind).from_pretrained(
                folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True
            )
        return cls(model, **settings)

    def __init__(self, model: nn.Module) -> None:
        config = getattr(model, "config", None)
        missing = [part for part in self.parts if not hasattr(model, part)]
        missing += [f"config.{size}" for size in self.sizes if not hasattr(config, size)]
        if missing:
            raise UnsupportedModelError(
                f"got {type(model).__name__} without {', '.join(missing)}; expected a diffusers "
                f"{self.kind}. Convert the checkpoint to the layout of one first."
            )
        self.model = model.eval().requires_grad_(False)
        self.reduction = int(2 ** (len(self.model.config.block_out_channels) - 1))

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write config and safetensors to a folder, the weights in `dtype`."""
        # diffusers' own `to` would warn of modules to keep in float32; there are none.
        copied = torch.nn.Module.to(deepcopy(self.model), dtype)
        copied.save_pretrained(path, safe_serialization=True)

    @property
    def width(self) -> int:
        """The size of a latent, d."""
        return int(self.model.post_quant_conv.in_channels)

    @torch.no_grad()
    def latents(self, images: Tensor) -> Tensor:
        """Return the latents f32 [B, h * w, d] of images; see `check_images`."""
        check_images(images, int(self.model.config.in_channels), self.reduction)
        weight = self.model.post_quant_conv.weight
        latents = self._encode(images.to(weight.device, weight.dtype))
        return self._scaled(latents.flatten(2).transpose(1, 2).float())

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Return images f32 [B, C, H, W] of latents [B, h, w, d]; raise InputError for others."""
        fits = latents.ndim == 4 and latents.is_floating_point()
        if not fits or latents.shape[-1] != self.width:
            raise InputError(
                f"got latents of {latents.dtype} with shape {list(latents.shape)}; expected "
                f"[B, h, w, {self.width}] of floats."
            )
        return self._images(self._scaled(latents))

    def _scaled(self, latents: Tensor) -> Tensor:
        """Return latents [..., d] as the decoder reads them."""
        return latents

    def _images(self, latents: Tensor) -> Tensor:
        weight = self.model.post_quant_conv.weight
        laid = latents.to(weight.device).permute(0, 3, 1, 2).to(weight.dtype)
        return bounded(self._decode(laid).float())


def convolution_sizes(weights: Tensors) -> dict[str, object]:
    """Return the fields of a diffusers configuration for encoder and decoder, by their weights.

    Raises:
        ModelError: A width is no multiple of the groups of a norm.
    """
    block = "encoder.down_blocks.{}.resnets.{}.conv1.weight"

    def there(level: int, layer: int) -> bool:
        return getattr(weights.get(block.format(level, layer)), "ndim", 0) == 4

    levels = list(takewhile(lambda level: there(level, 0), count()))
    widths = tuple(len(weights[block.format(i, 0)]) for i in levels)
    if any(width % _GROUPS or not width for width in widths):
        raise ModelError(
            f"got weights of blocks of {widths} channels; expected multiples of {_GROUPS}, the "
            "groups of a norm in every published tokenizer."
        )

    def kinds(blocks: str, plain: str) -> tuple[str, ...]:
        attends = (f"{blocks}.{i}.attentions.0.to_q.weight" in weights for i in levels)
        return tuple(f"Attn{plain}" if there else plain for there in attends)

    return {
        "in_channels": weights["encoder.conv_in.weight"].shape[1],
        "out_channels": len(weights["decoder.conv_out.weight"]),
        "down_block_types": kinds("encoder.down_blocks", "DownEncoderBlock2D"),
        "up_block_types": kinds("decoder.up_blocks", "UpDecoderBlock2D"),
        "block_out_channels": widths,
        "layers_per_block": len(list(takewhile(lambda layer: there(0, layer), count()))),
        "norm_num_groups": _GROUPS,
    }


def diffusers_names(published: Iterable[str]) -> dict[str, str]:
    """Return diffusers' names; LDM counts the decoder's blocks from the narrowest one on."""
    names = _in_order(published)
    if "decoder.up_blocks.0.upsamplers.0.conv.weight" in names.values():
        return names
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
        diffusers_names,
        dropped=r"^(?:loss|model_ema)\.",  # of a training script's file: needed for training alone
        linear=LINEAR,
    )

    @staticmethod
    def build(weights: Tensors, published: Tensors, settings: object) -> nn.Module:
        """Return the model for published weights; see `WeightLayout.load`."""
        from diffusers import AutoencoderKL

        width = weights["decoder.conv_in.weight"].shape[1]
        sizes = convolution_sizes(weights) | {"latent_channels": width, "scaling_factor": FACTOR}
        return cast(nn.Module, AutoencoderKL(**sizes))

    def _encode(self, images: Tensor) -> Tensor:
        return torch.as_tensor(self.model.encode(images).latent_dist.mean)

    def _decode(self, latents: Tensor) -> Tensor:
        return torch.as_tensor(self.model.decode(latents).sample)
