"""VQ tokenizers over diffusers' `VQModel`: images to codes and back.

Published LlamaGen files are converted to that layout.

The look-up is LlamaGen's (Sun et al., arXiv 2406.06525, after Yu et al., arXiv 2110.04627): codes
and latents are normalised first, so that the nearest code is the one of largest cosine. diffusers'
own look-up does not normalise, hence the few lines here.
"""

from copy import copy, deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.errors import InputError
from ragspec.visual.checks import bounded, check_finite, side_of
from ragspec.visual.models import autoencoder
from ragspec.visual.models.published import PLACES, Tensors, WeightLayout

_ROUNDED = 4e-3  # from unit length, by rounding to 16 bits


class CodeBook:
    """The code-book of a model whose `quantize.embedding` has a row for each code."""

    model: Any
    normalised = False  # whether codes are looked up by direction alone, see `CodeNeighbours.build`

    @property
    def vocab_size(self) -> int:
        """The number of codes, V."""
        return len(self.codebook())

    def codebook(self) -> Tensor:
        """Return the code-book f32 [V, d], at unit length if `normalised`."""
        rows: Tensor = self.model.quantize.embedding.weight.detach().float()
        return functional.normalize(rows, dim=-1) if self.normalised else rows

    def grid(self, codes: Tensor) -> Tensor:
        """Return codes i64 [B, h * w] or [B, h, w] as [B, h, w]; raise InputError for others."""
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
                "256, or codes laid out as [B, h, w]."
            )
        return codes.reshape(-1, side, side)


class VQTokenizer(CodeBook, autoencoder.Autoencoder):
    """Encodes images as codes i64 [B, h * w], row by row, and decodes them; see `Autoencoder`.

    Latents, before the look-up of codes, are normalised if the code-book is.

    Args:
        normalised: False for code-books that are searched by plain Euclidean distance.

    Raises:
        UnsupportedModelError: The model lacks a code-book, encoder or decoder.
    """

    kind = "VQModel"
    example = "vq_ds16_c2i.pt"
    parts = ("encoder", "quant_conv", "quantize", "post_quant_conv", "decoder")
    sizes = ("in_channels", "block_out_channels", "norm_type")
    layout = WeightLayout(
        "LlamaGen tokenizer",
        autoencoder.CONVOLUTIONS | {"quantize.embedding.weight": 2},
        autoencoder.diffusers_names,
        dropped=r"^(?:quantize\.codebook_used|loss\.)",  # counts, and weights of the training loss
        linear=autoencoder.LINEAR,
        # The running mean first, as in LlamaGen's own script for tokenizers.
        places=("ema", *(place for place in PLACES if place != "ema")),
    )

    def __init__(self, model: nn.Module, normalised: bool = True) -> None:
        super().__init__(model)
        self.normalised = normalised

    @staticmethod
    def build(weights: Tensors, published: Tensors, settings: object) -> nn.Module:
        """Return the model for published weights; see `WeightLayout.load`."""
        from diffusers import VQModel

        book, dim = weights["quantize.embedding.weight"].shape
        sizes = autoencoder.convolution_sizes(weights)
        sizes |= {"num_vq_embeddings": book, "vq_embed_dim": dim}
        sizes["latent_channels"] = len(weights["encoder.conv_out.weight"])
        return cast(nn.Module, VQModel(**sizes, lookup_from_codebook=True))

    def save_pretrained(self, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write config and safetensors to a folder, the weights in `dtype`.

        A normalised code-book is written normalised, for tools that do not normalise themselves;
        rounded once, so that it stays the same however often it is saved.
        """
        saved = copy(self)
        saved.model = deepcopy(self.model)
        weight, book = saved.model.quantize.embedding.weight, self._book()
        unit = (weight.float().norm(dim=-1, keepdim=True) - 1.0).abs() < _ROUNDED
        weight.copy_(torch.where(unit, weight, book))
        autoencoder.Autoencoder.save_pretrained(saved, path, dtype)

    def _scaled(self, latents: Tensor) -> Tensor:
        return functional.normalize(latents, dim=-1) if self.normalised else latents

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Return codes i64 [B, h * w], row by row, of images [B, C, H, W] in [-1, 1].

        Raises:
            ModelError: The encoder or the code-book gives numbers that are not finite.
        """
        latents, book = self.latents(images), self._book().float()
        # |z - e|^2 without |z|^2, which all codes share; exact for codes of any length.
        nearness, codes = (latents @ book.T - book.square().sum(-1) / 2).max(-1)
        check_finite(nearness, "the encoder or the code-book gave numbers")
        return codes

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Return images f32 [B, C, H, W] in [-1, 1] of codes, see `grid`."""
        return self._images(self._book()[self.grid(codes).to(self._book().device)])

    def _encode(self, images: Tensor) -> Tensor:
        return torch.as_tensor(self.model.quant_conv(self.model.encoder(images)))

    def _decode(self, latents: Tensor) -> Tensor:
        spatial = latents if self.model.config.norm_type == "spatial" else None
        return torch.as_tensor(self.model.decoder(self.model.post_quant_conv(latents), spatial))

    def _book(self) -> Tensor:
        weight: Tensor = self.model.quantize.embedding.weight
        return self.codebook().to(weight.dtype) if self.normalised else weight


class ModelVQ(CodeBook):
    """The code-book and decoder of a model's `vqmodel`; Chameleon's model has no decoder."""

    flattens = False  # whether the decoder takes the codes of an image as one row

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def reduction(self) -> int:
        """Pixels per code along one side."""
        return int(2 ** (len(self.model.config.channel_multiplier) - 1))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """Return images f32 [B, 3, H, W] in [-1, 1] of codes, see `grid`."""
        codes = self.grid(codes).to(self.model.quantize.embedding.weight.device)
        return bounded(self.model.decode(codes.flatten(1) if self.flattens else codes).float())


class JanusVQ(ModelVQ):
    """Code-book and decoder of Janus, whose codes are normalised (`JanusVQVAE`)."""

    normalised = flattens = True
