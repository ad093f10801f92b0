"""A tokenizer in the published LlamaGen layout: random weights, and plain layers over them.

Nothing of the library is used here, so that the two can be compared.
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from tests.support import image_models

WIDTHS, LATENT, DIM, CODES = (32, 32, 64), 16, 8, image_models.BOOK
BLOCKS = 2  # of a level of the encoder; the decoder has one more
Weights = dict[str, torch.Tensor]


class Maker:
    """Makes random float64 weights by the names of the published files."""

    def __init__(self) -> None:
        self.dice = torch.Generator().manual_seed(0)
        self.weights: Weights = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.dice, dtype=torch.float64)

    def conv(self, name: str, inner: int, outer: int, kernel: int = 3) -> None:
        values = self.random(outer, inner, kernel, kernel) / math.sqrt(inner * kernel**2)
        self.weights[f"{name}.weight"] = values
        self.weights[f"{name}.bias"] = 0.1 * self.random(outer)

    def norm(self, name: str, width: int) -> None:
        self.weights[f"{name}.weight"] = 1 + 0.2 * self.random(width)
        self.weights[f"{name}.bias"] = 0.2 * self.random(width)

    def residual(self, name: str, inner: int, outer: int) -> None:
        self.norm(f"{name}.norm1", inner)
        self.conv(f"{name}.conv1", inner, outer)
        self.norm(f"{name}.norm2", outer)
        self.conv(f"{name}.conv2", outer, outer)
        if inner != outer:
            self.conv(f"{name}.nin_shortcut", inner, outer, kernel=1)

    def attention(self, name: str, width: int) -> None:
        self.norm(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            self.conv(f"{name}.{part}", width, width, kernel=1)

    def half(self, name: str, ends: tuple[int, int], widths: tuple[int, ...], blocks: int) -> None:
        """Make an encoder or a decoder; attention lies at the level of the fewest pixels."""
        fewest = len(widths) - 1 if name == "encoder" else 0
        self.conv(f"{name}.conv_in", ends[0], widths[0])
        width = widths[0]
        for level, wide in enumerate(widths):
            place = f"{name}.conv_blocks.{level}"
            for block in range(blocks):
                self.residual(f"{place}.res.{block}", width, wide)
                width = wide
                if level == fewest:
                    self.attention(f"{place}.attn.{block}", width)
            if level < len(widths) - 1:
                sample = "downsample" if name == "encoder" else "upsample"
                self.conv(f"{place}.{sample}.conv", width, width)
        self.residual(f"{name}.mid.0", widths[fewest], widths[fewest])
        self.attention(f"{name}.mid.1", widths[fewest])
        self.residual(f"{name}.mid.2", widths[fewest], widths[fewest])
        self.norm(f"{name}.norm_out", width)
        self.conv(f"{name}.conv_out", width, ends[1])


def published() -> Weights:
    """Return the weights of a tokenizer of three levels, by the names of the published files."""
    maker = Maker()
    maker.half("encoder", (3, LATENT), WIDTHS, BLOCKS)
    maker.half("decoder", (LATENT, 3), WIDTHS[::-1], BLOCKS + 1)
    maker.conv("quant_conv", LATENT, DIM, kernel=1)
    maker.conv("post_quant_conv", DIM, LATENT, kernel=1)
    book = maker.random(CODES, DIM) * torch.linspace(0.2, 3, CODES)[:, None]
    maker.weights["quantize.embedding.weight"] = book
    maker.weights["quantize.codebook_used"] = torch.zeros(65536)
    maker.weights["decoder.conv_out.weight"] *= 0.3  # few pixels beyond the range
    return maker.weights


class Plain:
    """The published layers, computed by the names of their weights alone."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def conv(self, name: str, x: torch.Tensor, **how: int) -> torch.Tensor:
        return functional.conv2d(
            x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **how
        )

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale, shift = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        grouped = x.reshape(len(x), 32, -1, *x.shape[2:])
        variance, mean = torch.var_mean(grouped, (2, 3, 4), correction=0, keepdim=True)
        even = ((grouped - mean) / (variance + 1e-6).sqrt()).flatten(1, 2)
        scaled: torch.Tensor = even * scale[:, None, None] + shift[:, None, None]
        return scaled

    def residual(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(f"{name}.conv1", functional.silu(self.norm(f"{name}.norm1", x)), padding=1)
        y = self.conv(f"{name}.conv2", functional.silu(self.norm(f"{name}.norm2", y)), padding=1)
        short = f"{name}.nin_shortcut"
        return y + (self.conv(short, x) if f"{short}.weight" in self.weights else x)

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", normed).flatten(2) for part in "qkv")
        share = torch.einsum("bci,bcj->bij", q, k).div(math.sqrt(q.shape[1])).softmax(-1)
        result = torch.einsum("bij,bcj->bci", share, v).view_as(x)
        return x + self.conv(f"{name}.proj_out", result)

    def middle(self, name: str, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(f"{name}.mid.1", self.residual(f"{name}.mid.0", x))
        return self.residual(f"{name}.mid.2", x)

    def levels(
        self, name: str, x: torch.Tensor, between: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        for level in range(len(WIDTHS)):
            place, block = f"{name}.conv_blocks.{level}", 0
            while f"{place}.res.{block}.conv1.weight" in self.weights:
                x = self.residual(f"{place}.res.{block}", x)
                if f"{place}.attn.{block}.q.weight" in self.weights:
                    x = self.attention(f"{place}.attn.{block}", x)
                block += 1
            if level < len(WIDTHS) - 1:
                x = between(place, x)
        return x

    def up(self, place: str, x: torch.Tensor) -> torch.Tensor:
        larger = x.repeat_interleave(2, -1).repeat_interleave(2, -2)
        return self.conv(f"{place}.upsample.conv", larger, padding=1)

    def down(self, place: str, x: torch.Tensor) -> torch.Tensor:
        return self.conv(f"{place}.downsample.conv", functional.pad(x, (0, 1, 0, 1)), stride=2)

    def end(self, name: str, x: torch.Tensor) -> torch.Tensor:
        lively = functional.silu(self.norm(f"{name}.norm_out", x))
        return self.conv(f"{name}.conv_out", lively, padding=1)

    def book(self) -> torch.Tensor:
        rows = self.weights["quantize.embedding.weight"]
        return rows / rows.square().sum(-1, keepdim=True).sqrt()

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return images [B, 3, H, W] of codes [B, h, w]."""
        return self.decoded(self.book()[codes])

    def decoded(self, latents: torch.Tensor) -> torch.Tensor:
        """Return images [B, 3, H, W] of latents [B, h, w, d]."""
        x = self.conv("post_quant_conv", latents.permute(0, 3, 1, 2))
        x = self.middle("decoder", self.conv("decoder.conv_in", x, padding=1))
        return self.end("decoder", self.levels("decoder", x, self.up))

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Return codes [B, h * w] of images [B, 3, H, W]."""
        return torch.einsum("bnc,vc->bnv", self.encoded(images), self.book()).argmax(-1)

    def encoded(self, images: torch.Tensor) -> torch.Tensor:
        """Return latents [B, h * w, d] of images [B, 3, H, W]."""
        x = self.conv("encoder.conv_in", images, padding=1)
        x = self.middle("encoder", self.levels("encoder", x, self.down))
        return self.conv("quant_conv", self.end("encoder", x)).flatten(2).mT
