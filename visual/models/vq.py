"""VQ tokenizers over diffusers' `VQModel`: images to codes and back.

`vq_checkpoint` converts published LlamaGen files and the `JanusVQVAE` of transformers to that
layout.

The look-up is LlamaGen's (Sun et al., arXiv 2406.06525, after Yu et al., arXiv 2110.04627): codes
and latents are normalised first, so that the nearest code is the one of largest cosine. diffusers'
own look-up does not normalise, hence the few lines here.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ragspec.errors import InputError, ModelError, UnsupportedModelError
from ragspec.visual.checks import side_of
from ragspec.visual.models.vq_checkpoint import (
    JANUS,
    from_janus,
    load_llamagen_vq,
    open_folder,
    save_folder,
)

_PARTS = ("encoder", "quant_conv", "quantize", "post_quant_conv", "decoder")
_SIZES = ("in_channels", "block_out_channels", "sample_size", "norm_type")


class VQTokenizer:
    """Encodes images f32 [B, C, H, W] in [-1, 1] as codes i64 [B, h * w], row by row, and back.

    Args:
        model: A `VQModel`, or a `JanusVQVAE`, which becomes a `VQModel` of the same weights.
        normalised: False for code-books that are searched by plain Euclidean distance.

    Raises:
        UnsupportedModelError: The model lacks a code-book, encoder or decoder.
    """

    def __init__(self, model: Any, normalised: bool = True) -> None:
        config = getattr(model, "config", None)
        if getattr(config, "model_type", None) == JANUS:
            model = from_janus(model)
            config = model.config
        missing = [part for part in _PARTS if not hasattr(model, part)]
        missing += [f"config.{size}" for size in _SIZES if not hasattr(config, size)]
        if missing:
            raise UnsupportedModelError(
                f"got {type(model).__name__} without {', '.join(missing)}; expected a diffusers "
                "VQModel or a JanusVQVAE. Convert the checkpoint to the layout of a VQModel first."
            )
        self.model = model.eval().requires_grad_(False)
        self.normalised = normalised

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        normalised: bool = True,
        allow_namespace: bool = False,
    ) -> VQTokenizer:
        """Load a folder written by `save_pretrained`, or a published file (`vq_ds16_c2i.pt`).

        A folder is in diffusers' layout, safetensors only.

        Args:
            allow_namespace: For files, as in `load_llamagen`.

        Raises:
            ModelNotFoundError: The path holds neither.
            ModelError: Weights are missing, do not fit or must not be opened.
        """
        from diffusers import VQModel

        folder = Path(path)
        if folder.is_file():
            return cls(load_llamagen_vq(folder, dtype, allow_namespace), normalised)
        return cls(open_folder(VQModel, folder, dtype, "vq_ds16_c2i.pt"), normalised)

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write config and safetensors to a folder, the weights in `dtype`.

        A normalised code-book is written normalised, for tools that do not normalise themselves.
        """
        model = deepcopy(self.model)
        model.quantize.embedding.weight.copy_(self._book())
        save_folder(model, path, dtype)

    @property
    def vocab_size(self) -> int:
        """The number of codes, V."""
        return int(self.model.quantize.embedding.num_embeddings)

    @property
    def width(self) -> int:
        """The size of a latent, d."""
        return int(self.model.quantize.embedding.embedding_dim)

    @property
    def image_size(self) -> int:
        """Side of the images that the model was trained on, in pixels."""
        return int(self.model.config.sample_size)

    @property
    def reduction(self) -> int:
        """Pixels per code along one side."""
        return int(2 ** (len(self.model.config.block_out_channels) - 1))

    def codebook(self) -> Tensor:
        """Return the code-book f32 [V, d], at unit length if `normalised`."""
        rows: Tensor = self.model.quantize.embedding.weight.float()
        return functional.normalize(rows, dim=-1) if self.normalised else rows

    @torch.no_grad()
    def latents(self, images: Tensor) -> Tensor:
        """Return the latents f32 [B, h * w, d] of images, before the look-up of codes.

        Raises:
            InputError: The images have another shape, sides that are no multiple of `reduction`, or
                values outside [-1, 1].
        """
        self._check_images(images)
        weight = self.model.quant_conv.weight
        latents = self.model.quant_conv(self.model.encoder(images.to(weight.device, weight.dtype)))
        latents = latents.flatten(2).transpose(1, 2).float()
        return functional.normalize(latents, dim=-1) if self.normalised else latents

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Return codes i64 [B, h * w], row by row, of images [B, C, H, W] in [-1, 1].

        Raises:
            InputError: See `latents`.
            ModelError: The encoder or the code-book gives numbers that are not finite.
        """
        latents, book = self.latents(images), self._book().float()
        # |z - e|^2 without |z|^2, which all codes share; exact for codes of any length.
        nearness, codes = (latents @ book.T - book.square().sum(-1) / 2).max(-1)
        if not bool(nearness.isfinite().all()):
            raise ModelError(
                "the encoder or the code-book gave numbers that are not finite; expected numbers. "
                "Its weights are damaged, or its dtype is too narrow: load it in float32."
            )
        return codes

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Return images f32 [B, C, H, W] in [-1, 1] of codes i64 [B, h * w] or [B, h, w].

        Raises:
            InputError: A code is outside the book, or h * w is no square number.
        """
        grid = self._grid(codes)
        return self._decoded(self._book()[grid.to(self._book().device)])

    @torch.no_grad()
    def decode_latents(self, latents: Tensor) -> Tensor:
        """Return images f32 [B, C, H, W] in [-1, 1] of latents [B, h, w, d] without a look-up.

        Latents are normalised if the code-book is.

        Raises:
            InputError: The latents have another shape.
        """
        if latents.ndim != 4 or latents.shape[-1] != self.width:
            raise InputError(
                f"got latents of shape {list(latents.shape)}; expected [B, h, w, {self.width}]."
            )
        return self._decoded(functional.normalize(latents, dim=-1) if self.normalised else latents)

    def _decoded(self, latents: Tensor) -> Tensor:
        """Return the images of a grid of latents [B, h, w, d]."""
        weight = self.model.post_quant_conv.weight
        laid = latents.to(weight.device).permute(0, 3, 1, 2).to(weight.dtype)
        spatial = laid if self.model.config.norm_type == "spatial" else None
        images = self.model.decoder(self.model.post_quant_conv(laid), spatial)
        return torch.as_tensor(images).float().clamp(-1, 1)

    def _book(self) -> Tensor:
        weight: Tensor = self.model.quantize.embedding.weight
        return self.codebook().to(weight.dtype) if self.normalised else weight

    def _check_images(self, images: Tensor) -> None:
        channels = int(self.model.config.in_channels)
        shape = list(getattr(images, "shape", ()))
        if (
            not isinstance(images, Tensor)
            or not images.is_floating_point()
            or images.ndim != 4
            or shape[1] != channels
            or any(side % self.reduction or not side for side in shape[2:])
        ):
            raise InputError(
                f"got pictures of {getattr(images, 'dtype', type(images))} with shape {shape}; "
                f"expected a tensor of floats [B, {channels}, H, W] whose sides are multiples of "
                f"{self.reduction}."
            )
        # Resampling may exceed the range a little; bytes (0 .. 255) and NaN are mistakes.
        if images.numel() and not bool((images.abs() <= 1.01).all()):
            raise InputError(
                f"got pictures with values from {float(images.min()):g} to "
                f"{float(images.max()):g}; expected [-1, 1]. Divide bytes by 127.5, subtract 1."
            )

    def _grid(self, codes: Tensor) -> Tensor:
        if codes.dtype != torch.int64 or codes.ndim not in (2, 3):
            raise InputError(
                f"got codes of {codes.dtype} with shape {list(codes.shape)}; expected int64 "
                "[B, h * w] or [B, h, w]."
            )
        if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >= self.vocab_size):
            raise InputError(
                f"got codes from {int(codes.min())} to {int(codes.max())}; expected 0 to "
                f"{self.vocab_size - 1}. Take condition ids off before decoding."
            )
        if codes.ndim == 3:
            return codes
        side = side_of(codes.shape[1])
        if side is None:
            raise InputError(
                f"got {codes.shape[1]} codes a picture; expected a square number of them, such as "
                f"{(self.image_size // self.reduction) ** 2}, or codes laid out as [B, h, w]."
            )
        return codes.reshape(-1, side, side)


class ModelVQ:
    """A model's own code-book and decoder; Chameleon's model in transformers has no decoder.

    Args:
        model: The model's `vqmodel`.
    """

    normalised = False  # whether codes are looked up by direction alone, see `CodeNeighbours.build`

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        """The number of codes, V."""
        return int(self.model.quantize.embedding.weight.shape[0])

    @property
    def reduction(self) -> int:
        """Pixels per code along one side."""
        return int(2 ** (len(self.model.config.channel_multiplier) - 1))

    def codebook(self) -> Tensor:
        """Return the code-book f32 [V, d]."""
        return self.model.quantize.embedding.weight.detach().float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Return images f32 [B, 3, H, W] in [-1, 1] of codes i64 [B, h, w]."""
        place = self.model.quantize.embedding.weight.device
        return self._pictures(codes.to(place)).float().clamp(-1, 1)

    def _pictures(self, codes: Tensor) -> Tensor:
        pictures: Tensor = self.model.decode(codes)
        return pictures


class JanusVQ(ModelVQ):
    """Code-book and decoder of Janus, whose codes are normalised (`JanusVQVAE`)."""

    normalised = True

    def codebook(self) -> Tensor:
        """Return the code-book f32 [V, d] at unit length."""
        return functional.normalize(super().codebook(), dim=-1)

    def _pictures(self, codes: Tensor) -> Tensor:
        latents = functional.normalize(self.model.quantize.embedding(codes), p=2, dim=-1)
        laid = latents.permute(0, 3, 1, 2).contiguous()
        pictures: Tensor = self.model.decoder(self.model.post_quant_conv(laid))
        return pictures
