"""MAR's masked transformer and diffusion head (Li et al., arXiv 2406.11838), by published names.

The head (section 3) is a small network with adaptive layer norms. From a noisy latent, its time and
the decoder's state of the place, it predicts the noise and, for each number, the variance of the
step between its bounds.
"""

import math
from collections import OrderedDict
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ragspec.errors import InputError
from ragspec.sampling.settings import checked_count

_WAVES = 128  # frequencies of the time embedding
_SLOWEST = 10_000.0
EPS = 1e-6  # of every norm


def _mlp(read: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(read, width), nn.SiLU(), nn.Linear(width, width))


class Still(nn.Linear):
    """A linear layer that training starts at zero, so that it has no effect at first."""


def _modulation(width: int, parts: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), Still(width, parts * width))


class _Time(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = _mlp(2 * _WAVES, width)

    def forward(self, times: Tensor) -> Tensor:
        """Embed times f32 [n] as [n, width]."""
        places = torch.arange(_WAVES, dtype=torch.float32, device=times.device)
        rates = torch.exp(places * (-math.log(_SLOWEST) / _WAVES))
        angles = times.float()[:, None] * rates  # half precision would lose the fast waves of 999
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return cast(Tensor, self.mlp(waves.to(next(self.mlp.parameters()).dtype)))


class _HeadBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPS)
        self.mlp = _mlp(width, width)
        self.adaLN_modulation = _modulation(width, 3)

    def forward(self, states: Tensor, conditioning: Tensor) -> Tensor:
        """Return states [n, width] after the block, modulated by the conditioning [n, width]."""
        shift, scale, gate = self.adaLN_modulation(conditioning).chunk(3, dim=-1)
        return cast(Tensor, states + gate * self.mlp(self.in_ln(states) * (1.0 + scale) + shift))


class _Last(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=EPS)
        self.linear = Still(width, out)
        self.adaLN_modulation = _modulation(width, 2)

    def forward(self, states: Tensor, conditioning: Tensor) -> Tensor:
        """Project states [n, width], modulated by the conditioning [n, width], to [n, out]."""
        shift, scale = self.adaLN_modulation(conditioning).chunk(2, dim=-1)
        return cast(Tensor, self.linear(self.norm_final(states) * (1.0 + scale) + shift))


class NoiseHead(nn.Module):
    """Predicts the noise and the variance of a denoising step, by decoder states of `hidden`."""

    def __init__(self, latent_dim: int, hidden: int, width: int, layers: int) -> None:
        super().__init__()
        self.time_embed = _Time(width)
        self.cond_embed = nn.Linear(hidden, width)
        self.input_proj = nn.Linear(latent_dim, width)
        self.res_blocks = nn.ModuleList(_HeadBlock(width) for _ in range(layers))
        self.final_layer = _Last(width, 2 * latent_dim)

    def forward(self, noisy: Tensor, times: Tensor, conditioning: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noise [n, D] and the variances [n, D], from -1 to 1, of noisy latents [n, D].

        Args:
            times [n] or [1]: From 0 to 999.
            conditioning [n, width]: The output of `cond_embed`, which all steps share.
        """
        conditioning = conditioning + self.time_embed(times)
        states = self.input_proj(noisy)
        for block in self.res_blocks:
            states = block(states, conditioning)
        noise, variance = self.final_layer(states, conditioning).chunk(2, dim=-1)
        return noise, variance


_STD = 0.02
_COUNTS = (
    *("latent_dim", "hidden_size", "encoder_layers", "decoder_layers", "num_attention_heads"),
    *("intermediate_size", "grid_size", "num_classes", "buffer_size", "head_width", "head_layers"),
)


class MaskedConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]
    """Configuration of a `MaskedModel`; the defaults are those of the published base model.

    Args:
        latent_dim: D.
        grid_size: Side of the square of latents.
        buffer_size: Class embeddings that the encoder reads.
        head_width, head_layers: Of the diffusion head.
        mean, deviation: Of the autoencoder's latents, D numbers or one for all. The model works
            with standardised latents.
        clip: Bound of predicted latents in deviations; None for no bound, as published.

    Raises:
        InputError: A size is below 1, or sizes contradict each other.
    """

    model_type = "ragspec-masked-latents"

    latent_dim: int = 16
    hidden_size: int = 768
    encoder_layers: int = 12
    decoder_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 0  # four times hidden_size
    grid_size: int = 16
    num_classes: int = 1000
    buffer_size: int = 64
    head_width: int = 1024
    head_layers: int = 6
    mean: float | list[float] = 0.0
    deviation: float | list[float] = 1.0
    clip: float | None = None
    condition: str = "class"

    def __post_init__(self, **kwargs: object) -> None:
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        super().__post_init__(**kwargs)
        for name in _COUNTS:
            checked_count(getattr(self, name), name)
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"got {self.num_attention_heads} attention heads for a width of "
                f"{self.hidden_size}; expected a number of heads that divides it."
            )
        for name in ("mean", "deviation"):
            values = getattr(self, name)
            if isinstance(values, list) and len(values) != self.latent_dim:
                raise InputError(
                    f"got {len(values)} numbers as {name}; expected {self.latent_dim} or one."
                )


class _MaskedAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, states: Tensor, visible: Tensor | None = None) -> Tensor:
        """Attend from all positions of states [B, n, H] to all, or to those visible bool [B, n]."""
        parts = self.qkv(states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if visible is None else visible[:, None, None]
        attended = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], mask)
        return cast(Tensor, self.proj(attended.transpose(1, 2).flatten(2)))


class _MaskedLayer(nn.Module):
    def __init__(self, config: MaskedConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=EPS)
        self.attn = _MaskedAttention(config.hidden_size, config.num_attention_heads)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=EPS)
        sizes = config.hidden_size, config.intermediate_size
        layers = {"fc1": nn.Linear(*sizes), "gelu": nn.GELU(), "fc2": nn.Linear(*sizes[::-1])}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, states: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return states [B, n, H] after the layer; they attend to those visible, None for all."""
        states = states + self.attn(self.norm1(states), visible)
        return cast(Tensor, states + self.mlp(self.norm2(states)))


class MaskedModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """A masked transformer that maps an image's known latents to head inputs for every place."""

    config_class = MaskedConfig
    config: MaskedConfig

    def __init__(self, config: MaskedConfig) -> None:
        super().__init__(config)
        hidden, self.places = config.hidden_size, config.grid_size**2
        self.class_emb = nn.Embedding(config.num_classes, hidden)
        self.fake_latent = nn.Parameter(torch.zeros(1, hidden))  # in place of a class
        self.z_proj = nn.Linear(config.latent_dim, hidden)
        self.z_proj_ln = nn.LayerNorm(hidden, eps=EPS)
        self.encoder_pos_embed_learned = _table(config.buffer_size + self.places, hidden)
        self.encoder_blocks = nn.ModuleList(map(_MaskedLayer, [config] * config.encoder_layers))
        self.encoder_norm = nn.LayerNorm(hidden, eps=EPS)
        self.decoder_embed = nn.Linear(hidden, hidden)
        self.mask_token = _table(1, hidden)
        self.decoder_pos_embed_learned = _table(config.buffer_size + self.places, hidden)
        self.decoder_blocks = nn.ModuleList(map(_MaskedLayer, [config] * config.decoder_layers))
        self.decoder_norm = nn.LayerNorm(hidden, eps=EPS)
        self.diffusion_pos_embed_learned = _table(self.places, hidden)
        head = NoiseHead(config.latent_dim, hidden, config.head_width, config.head_layers)
        self.diffloss = nn.ModuleDict({"net": head})  # as in published weights
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of classes, for which adapters of peft ask."""
        return self.class_emb

    @property
    def head(self) -> NoiseHead:
        """The diffusion head."""
        return cast(NoiseHead, self.diffloss["net"])

    def condition(self, labels: Tensor, copies: int = 1) -> Tensor:
        """Embed class labels i64 [B] as [B, H]; two copies end with no class, B times."""
        embedded: Tensor = self.class_emb(labels.to(self.fake_latent.device))
        none = self.fake_latent.expand(len(labels), -1)
        return torch.cat([embedded, none]) if copies == 2 else embedded

    def standardised(self, latents: Tensor) -> Tensor:
        """Standardise latents [..., D] of the autoencoder, as the model reads them."""
        mean, deviation = map(latents.new_tensor, (self.config.mean, self.config.deviation))
        return (latents - mean) / deviation

    def restored(self, latents: Tensor) -> Tensor:
        """Scale the model's latents [..., D] back to those of the autoencoder."""
        mean, deviation = map(latents.new_tensor, (self.config.mean, self.config.deviation))
        return latents * deviation + mean

    def states(
        self, latents: Tensor, known: Tensor, condition: Tensor, counts: Tensor | None = None
    ) -> Tensor:
        """Return the head's inputs [B, n, H] for all n places.

        Args:
            latents [B, n, D]: Standardised; the model reads those at `known`.
            known i64 [B, k]: Places whose latents are known.
            condition [B, H]: From `condition`.
            counts i64 [B]: How many places of each row of `known` are known, the rest being other
                places as padding; None for all k.
        """
        rows, buffer = len(latents), self.config.buffer_size
        real = visible = None
        if counts is not None:
            real = torch.arange(known.shape[1], device=known.device) < counts[:, None]
            visible = torch.cat([real.new_ones(rows, buffer), real], 1)
        places = known[..., None].expand(-1, -1, self.config.hidden_size)
        read = self.z_proj(latents.gather(1, known[..., None].expand(-1, -1, latents.shape[-1])))
        table = self.encoder_pos_embed_learned.expand(rows, -1, -1)
        front = condition[:, None] + table[:, :buffer]
        states = torch.cat([front, read + table[:, buffer:].gather(1, places)], 1)
        states = self.z_proj_ln(states)
        for layer in self.encoder_blocks:
            states = layer(states, visible)
        states = self.decoder_embed(self.encoder_norm(states)).to(self.mask_token.dtype)
        encoded = states[:, buffer:]
        if real is not None:
            encoded = torch.where(real[..., None], encoded, self.mask_token)
        whole = self.mask_token.expand(rows, self.places, -1).scatter(1, places, encoded)
        states = torch.cat([states[:, :buffer], whole], 1) + self.decoder_pos_embed_learned
        for layer in self.decoder_blocks:
            states = layer(states)
        out: Tensor = self.decoder_norm(states[:, buffer:])
        return out + self.diffusion_pos_embed_learned

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Still):
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=_STD)
        elif isinstance(module, nn.LayerNorm) and module.weight is not None:
            nn.init.ones_(module.weight)
        elif isinstance(module, MaskedModel):
            for table in module.parameters(recurse=False):
                nn.init.normal_(table, std=_STD)


def _table(rows: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, rows, width))
