"""The picture decoders that models of transformers carry within, asked in place.

Nothing is copied: a model that is moved or cast takes its decoder along. Pictures come out as from
the models' own `decode_image_tokens`, and for grids of any shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


class StarterVQ:
    """A model's own code-book and decoder. model: its `vqmodel`.

    normalised: whether codes are looked up by their directions alone, see `CodeNeighbours.build`.
    """

    normalised = False

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        """The number of codes V."""
        return int(self.model.quantize.embedding.weight.shape[0])

    @property
    def reduction(self) -> int:
        """How many pixels a code stands for along one side."""
        return int(2 ** (len(self.model.config.channel_multiplier) - 1))

    def codebook(self) -> torch.Tensor:
        """Return the codes f32 [V, d]."""
        return self.model.quantize.embedding.weight.detach().float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return pictures f32 [B, 3, H, W] in [-1, 1] of codes i64 [B, h, w]."""
        place = self.model.quantize.embedding.weight.device
        return self._pictures(codes.to(place)).float().clamp(-1, 1)

    def _pictures(self, codes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class JanusVQ(StarterVQ):
    """That of Janus, whose codes are made unit length (`JanusVQVAE`)."""

    normalised = True

    def codebook(self) -> torch.Tensor:
        """Return the codes made unit length, f32 [V, d]."""
        return functional.normalize(super().codebook(), dim=-1)

    def _pictures(self, codes: torch.Tensor) -> torch.Tensor:
        latents = functional.normalize(self.model.quantize.embedding(codes), p=2, dim=-1)
        laid = latents.permute(0, 3, 1, 2).contiguous()
        pictures: torch.Tensor = self.model.decoder(self.model.post_quant_conv(laid))
        return pictures


class Emu3VQ(StarterVQ):
    """That of Emu3 (`Emu3VQVAE`)."""

    def _pictures(self, codes: torch.Tensor) -> torch.Tensor:
        pictures: torch.Tensor = self.model.decode(codes)
        return pictures


class BookAlone(StarterVQ):
    """A code-book without a decoder, as that of Chameleon in transformers (`ChameleonVQVAE`)."""
