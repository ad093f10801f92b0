"""MAR's diffusion head (Li et al., arXiv 2406.11838, section 3), by its published names.

A small network with adaptive layer norms that is told a noisy latent, its time and what the decoder
knows of the place; it predicts the noise and, for each number, where the variance of the step lies.
"""

from __future__ import annotations

import math

import torch
from torch import nn

_WAVES = 128  # frequencies that tell the time
_SLOWEST = 10_000.0
EPS = 1e-6  # of every norm


def _mlp(read: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(read, width), nn.SiLU(), nn.Linear(width, width))


class Still(nn.Linear):
    """A layer that training begins with at zero: it changes nothing yet."""


def _modulation(width: int, parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), Still(width, parts * width))


class _Time(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = _mlp(2 * _WAVES, width)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        """Return what is told of times f32 [n]: [n, width]."""
        rates = torch.exp(
            torch.arange(_WAVES, device=times.device) * (-math.log(_SLOWEST) / _WAVES)
        )
        angles = times.float()[:, None] * rates  # in halves 999 would lose its fast waves
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        out: torch.Tensor = self.mlp(waves.to(next(self.mlp.parameters()).dtype))
        return out


class _HeadBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPS)
        self.mlp = _mlp(width, width)
        self.adaLN_modulation = _modulation(width, 3)

    def forward(self, states: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Return states [n, width] after the block, moved by what is told [n, width]."""
        shift, scale, gate = self.adaLN_modulation(message).chunk(3, dim=-1)
        out: torch.Tensor = states + gate * self.mlp(self.in_ln(states) * (1.0 + scale) + shift)
        return out


class _Last(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=EPS)
        self.linear = Still(width, out)
        self.adaLN_modulation = _modulation(width, 2)

    def forward(self, states: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Return [n, out] of states [n, width]."""
        shift, scale = self.adaLN_modulation(message).chunk(2, dim=-1)
        out: torch.Tensor = self.linear(self.norm_final(states) * (1.0 + scale) + shift)
        return out


class NoiseHead(nn.Module):
    """Predicts noise and variance. latent_dim: D. hidden: the decoder's. width, layers: its own."""

    def __init__(self, latent_dim: int, hidden: int, width: int, layers: int) -> None:
        super().__init__()
        self.time_embed = _Time(width)
        self.cond_embed = nn.Linear(hidden, width)
        self.input_proj = nn.Linear(latent_dim, width)
        self.res_blocks = nn.ModuleList(_HeadBlock(width) for _ in range(layers))
        self.final_layer = _Last(width, 2 * latent_dim)

    def forward(
        self, noisy: torch.Tensor, times: torch.Tensor, message: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noise [n, D] and where variances lie, -1 to 1, of noisy latents [n, D].

        times [n] or [1]: of 0 to 999. told [n, width]: by `cond_embed`, which all steps share.
        """
        message = message + self.time_embed(times)
        states = self.input_proj(noisy)
        for block in self.res_blocks:
            states = block(states, message)
        noise, variance = self.final_layer(states, message).chunk(2, dim=-1)
        return noise, variance
