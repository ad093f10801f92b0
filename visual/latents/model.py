"""A causal model of continuous latents: a LlamaGen trunk and a diffusion head.

MAR (Li et al., arXiv 2406.11838) in raster order: the trunk reads the latents so far, and a small
network denoises the next one, told of the trunk's state by adaptive layer norms. Where we deviate:
the trunk is causal, so that one forward verifies many latents, and the network predicts the clean
latent, clipped, and not the noise.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ragspec.visual.models.llamagen import LlamaGenConfig, LlamaGenModel

MOST = 4.0  # deviations beyond which no clean latent is believed
_WAVES = 16  # frequencies that tell the time


class LatentConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]
    """Sizes of a `LatentModel`.

    latent_dim: D, numbers of a latent. read_width: of the hidden layer through which latents are
    read, 0 for none: one projection. head_width, head_layers: of the diffusion head. steps,
    floor: of the schedule that it is sampled with, see `Schedule`. trunk: fields of the
    `LlamaGenConfig` below, without vocab_size.
    """

    model_type = "ragspec-latents"

    def __init__(
        self,
        latent_dim: int = 8,
        head_width: int = 128,
        head_layers: int = 3,
        steps: int = 16,
        floor: float = 0.1,
        trunk: dict[str, Any] | None = None,
        read_width: int = 0,
        **kwargs: Any,
    ) -> None:
        self.latent_dim = latent_dim
        self.read_width = read_width
        self.head_width = head_width
        self.head_layers = head_layers
        self.steps = steps
        self.floor = floor
        self.trunk = dict(trunk or {})
        super().__init__(**kwargs)

    def trunk_config(self) -> LlamaGenConfig:
        """Return the configuration of the trunk, which knows of no codes."""
        return LlamaGenConfig(**{**self.trunk, "vocab_size": 1})


class _LatentLayer(nn.Module):
    """A residual layer whose norm is moved by what it is told."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.told = nn.Linear(width, 3 * width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, states: Tensor, conditioning: Tensor) -> Tensor:
        shift, scale, gate = self.told(functional.silu(conditioning)).chunk(3, dim=-1)
        inner = self.norm(states) * (1.0 + scale) + shift
        out: Tensor = states + gate * self.second(functional.silu(self.first(inner)))
        return out


class DiffusionHead(nn.Module):
    """Predicts the clean latent from a noisy one, its time and the trunk's state."""

    def __init__(self, latent_dim: int, hidden: int, width: int, layers: int) -> None:
        super().__init__()
        self.read = nn.Linear(latent_dim, width)
        self.time = nn.Linear(2 * _WAVES, width)
        self.state = nn.Linear(hidden, width)
        self.layers = nn.ModuleList(_LatentLayer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.write = nn.Linear(width, latent_dim)

    def forward(self, noisy: Tensor, times: Tensor, states: Tensor) -> Tensor:
        """Return clean latents [N, D] of noisy ones [N, D], times [N] or [1], states [N, H]."""
        return self.denoise(noisy, times, self.state(states))

    def denoise(self, noisy: Tensor, times: Tensor, conditioning: Tensor) -> Tensor:
        """Return the same of states that `state` has read, which all steps share.

        noisy [..., D], times [...], told [..., width]: broadcast against each other, so that what
        many rows share is computed once.
        """
        scales = torch.exp(torch.arange(_WAVES, device=noisy.device) * (math.log(1000.0) / _WAVES))
        angles = times[..., None] * scales.to(noisy.dtype)
        conditioning = conditioning + self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        states = self.read(noisy)
        for layer in self.layers:
            states = layer(states, conditioning)
        out: Tensor = self.write(self.norm(states))
        return out.clamp(-MOST, MOST)


def _reader(latent_dim: int, width: int, hidden: int) -> nn.Module:
    """Return what makes a trunk's input of latents."""
    if not width:
        return nn.Linear(latent_dim, hidden)
    return nn.Sequential(nn.Linear(latent_dim, width), nn.SiLU(), nn.Linear(width, hidden))


class LatentModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """A trunk that reads latents and a head that draws the next one.

    mean, deviation [D]: of the latents; the model works with standardised ones.
    """

    config_class = LatentConfig
    config: LatentConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        trunk = config.trunk_config()
        self.trunk = LlamaGenModel(trunk)
        self.read = _reader(config.latent_dim, config.read_width, trunk.hidden_size)
        self.head = DiffusionHead(
            config.latent_dim, trunk.hidden_size, config.head_width, config.head_layers
        )
        self.register_buffer("mean", torch.zeros(config.latent_dim))
        self.register_buffer("deviation", torch.ones(config.latent_dim))
        self.post_init()

    def standardised(self, latents: Tensor) -> Tensor:
        """Return latents [..., D] as the model reads them."""
        result: Tensor = (latents - self.mean) / self.deviation
        return result

    def restored(self, latents: Tensor) -> Tensor:
        """Return what the model wrote [..., D] as the autoencoder knows it."""
        result: Tensor = latents * self.deviation + self.mean
        return result

    def states(self, latents: Tensor, condition: Tensor) -> Tensor:
        """Return what the head is told before each of n latents: [B, n, H].

        latents [B, n, D] are standardised; the last is not read. condition [B, L, H].
        """
        out = self.trunk(
            inputs_embeds=self.read(latents[:, :-1]),
            condition_embeds=condition,
            use_cache=False,
            logits_to_keep=latents.shape[1],
            output_hidden_states=True,
        )
        result: Tensor = out.hidden_states[0]
        return result
