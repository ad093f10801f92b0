"""A causal model of continuous latents: a LlamaGen trunk and a diffusion head.

MAR (Li et al., arXiv 2406.11838) in raster order: the trunk reads the latents so far, and a small
network denoises the next one, conditioned on the trunk's state by adaptive layer norms. Deviations:
the trunk is causal, so that one forward verifies many latents, and the network predicts the clean
latent, clipped, instead of the noise.
"""

import math
from dataclasses import field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ragspec.visual.checks import bounded
from ragspec.visual.models.llamagen import LlamaGenConfig, LlamaGenModel

MOST = 4.0  # limit of predicted clean latents, in deviations
_WAVES = 16  # frequencies of the time embedding


class LatentConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]
    """Sizes of a `LatentModel`.

    Args:
        latent_dim: D, the size of a latent.
        head_width, head_layers: Sizes of the diffusion head.
        steps, floor: Sampling schedule, see `NoiseSchedule`.
        trunk: Fields of the trunk's `LlamaGenConfig`, without vocab_size.
        read_width: Hidden size of the trunk's input network; 0 is a single projection.
    """

    model_type = "ragspec-latents"

    latent_dim: int = 8
    head_width: int = 128
    head_layers: int = 3
    steps: int = 16
    floor: float = 0.1
    trunk: dict[str, Any] = field(default_factory=dict)
    read_width: int = 0


class _LatentLayer(nn.Module):
    """A residual layer with an adaptive layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.told = nn.Linear(width, 3 * width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, states: Tensor, conditioning: Tensor) -> Tensor:
        shift, scale, gate = self.told(functional.silu(conditioning)).chunk(3, dim=-1)
        inner = self.norm(states) * (1.0 + scale) + shift
        return cast(Tensor, states + gate * self.second(functional.silu(self.first(inner))))


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

    def denoise(self, noisy: Tensor, times: Tensor, conditioning: Tensor) -> Tensor:
        """Return the clean latents [..., D] of noisy ones [..., D] at times [...].

        The inputs broadcast against each other, so that parts that many rows share run once. All
        steps share the conditioning, the output of `state` [..., width].
        """
        waves = torch.arange(_WAVES, dtype=torch.float32, device=noisy.device)
        scales = torch.exp(waves * (math.log(1000.0) / _WAVES))
        angles = times[..., None] * scales.to(noisy.dtype)
        conditioning = conditioning + self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        states = self.read(noisy)
        for layer in self.layers:
            states = layer(states, conditioning)
        out: Tensor = self.write(self.norm(states))
        return bounded(out, MOST)


class LatentModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """A trunk that reads standardised latents and a head that samples the next one."""

    mean: Tensor  # of the latents, [D]
    deviation: Tensor

    config_class = LatentConfig
    config: LatentConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        trunk = LlamaGenConfig(**{**config.trunk, "vocab_size": 1})  # no codes
        self.trunk = LlamaGenModel(trunk)
        width, hidden = config.read_width, trunk.hidden_size
        self.read: nn.Module = nn.Linear(config.latent_dim, width or hidden)
        if width:
            self.read = nn.Sequential(self.read, nn.SiLU(), nn.Linear(width, hidden))
        self.head = DiffusionHead(config.latent_dim, hidden, config.head_width, config.head_layers)
        self.register_buffer("mean", torch.zeros(config.latent_dim))
        self.register_buffer("deviation", torch.ones(config.latent_dim))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the trunk's embedding, for which adapters of peft ask."""
        return self.trunk.embed_tokens

    def standardised(self, latents: Tensor) -> Tensor:
        """Return latents [..., D] as the model reads them."""
        return (latents - self.mean) / self.deviation

    def restored(self, latents: Tensor) -> Tensor:
        """Return the model's latents [..., D] as the autoencoder decodes them."""
        return latents * self.deviation + self.mean

    def states(self, latents: Tensor, condition: Tensor) -> Tensor:
        """Return the trunk's states [B, n, H] before each of n latents.

        Args:
            latents: Standardised latents [B, n, D]; the last is not read.
            condition: Embeddings [B, L, H].
        """
        options = {"logits_to_keep": latents.shape[1], "output_hidden_states": True}
        read = self.read(latents[:, :-1])
        out = self.trunk(inputs_embeds=read, condition_embeds=condition, use_cache=False, **options)
        return cast(Tensor, out.hidden_states[0])
