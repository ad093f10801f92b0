"""The LlamaGen model: a square grid of codes behind a condition, with rotary positions.

Sun et al., "Autoregressive Model Beats Diffusion" (arXiv 2406.06525): half of each head rotates
with the row of the code, half with its column; neighbouring numbers form the pairs. The rotations
of condition positions are zero, so their queries and keys vanish: every code attends to the
condition with logit 0, at any distance.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from ragspec.errors import InputError
from ragspec.models.device import input_device

SPARE = 64  # positions beyond the last code, for forwards that only measure time


def grid_rotations(config: "LlamaGenConfig") -> Tensor:
    """Return the rotations complex128 [L + side * side + SPARE, 1, width / 2] of all positions."""
    quarter = config.hidden_size // config.num_attention_heads // 4
    speeds = config.rope_theta ** (-torch.arange(quarter, dtype=torch.float64) / quarter)
    places = torch.arange(config.grid_size**2 + SPARE)
    rows = (places // config.grid_size)[:, None] * speeds
    grid = torch.cat([rows, (places % config.grid_size)[:, None] * speeds], dim=-1)
    turned = torch.polar(torch.ones_like(grid), grid)
    still = torch.zeros(config.condition_length, 2 * quarter, dtype=turned.dtype)
    return torch.cat([still, turned])[:, None]


def rotate(states: Tensor, rotation: Tensor) -> Tensor:
    """Rotate neighbouring pairs of numbers in states [B, n, heads, width] of any float dtype."""
    work = torch.promote_types(states.dtype, torch.float32)
    pairs = torch.view_as_complex(states.to(work).reshape(*states.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(states.dtype)


class LlamaGenConfig(PreTrainedConfig):  # type: ignore[misc, unused-ignore]
    """Sizes of a LlamaGen model.

    Args:
        vocab_size: Size of the code-book, V.
        grid_size: Side of the square of codes.
        condition: "class" (num_classes of them) or "features" (condition_length vectors of size
            caption_dim).
        intermediate_size: 0 gives LlamaGen's 8/3 of hidden_size rounded up to a multiple of 256.
        dropout: Dropout rate of embeddings and residual branches, in training.
    """

    model_type = "llamagen"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    vocab_size: int = 16384
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 0  # as many as there are heads
    intermediate_size: int = 0
    hidden_act: str = "silu"
    grid_size: int = 16
    condition: str = "class"
    num_classes: int = 1000
    condition_length: int = 1
    caption_dim: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    dropout: float = 0.0
    max_position_embeddings: int = 0  # follows from the others
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: object) -> None:
        hidden = self.hidden_size
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.intermediate_size = self.intermediate_size or -(-(8 * hidden // 3) // 256) * 256
        self.max_position_embeddings = self.condition_length + self.grid_size**2
        self.tie_word_embeddings = False
        super().__post_init__(**kwargs)
        width, rest = divmod(self.hidden_size, self.num_attention_heads)
        if rest or width % 4 or self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"got hidden_size {self.hidden_size} and {self.num_attention_heads} heads, of keys "
                f"{self.num_key_value_heads}; expected heads whose width is a whole multiple of 4, "
                "and as many or more of queries for each of keys. Change one of them."
            )
        if self.condition not in ("class", "features"):
            raise InputError(f"got condition {self.condition!r}; expected 'class' or 'features'.")
        if self.condition == "class" and self.condition_length != 1:
            raise InputError(
                f"got condition_length {self.condition_length} for a class; expected 1. Use "
                "condition='features' for several condition positions."
            )


class _Attention(nn.Module):
    is_causal = True

    def __init__(self, config: LlamaGenConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width = config.hidden_size // self.heads
        self.num_key_value_groups = self.heads // self.groups
        self.scaling = self.width**-0.5
        outputs = (self.heads + 2 * self.groups) * self.width
        self.qkv_proj = nn.Linear(config.hidden_size, outputs, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, states: Tensor, rotation: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        heads, groups = self.heads, self.groups
        mixed = self.qkv_proj(states).unflatten(-1, (heads + 2 * groups, self.width))
        turned = rotate(mixed[:, :, : heads + groups], rotation).transpose(1, 2)
        query, key = turned[:, :heads], turned[:, heads:]
        value = mixed[:, :, heads + groups :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, _ = attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling)
        return cast(Tensor, self.o_proj(out.flatten(2)))


class _Block(nn.Module):
    def __init__(self, config: LlamaGenConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = _Attention(config, layer_idx)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.feed_forward = Phi3MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, states: Tensor, rotation: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        added = self.attention(self.attention_norm(states), rotation, mask, cache)
        states = states + self.dropout(added)
        return cast(Tensor, states + self.dropout(self.feed_forward(self.ffn_norm(states))))


class _Caption(nn.Module):
    """Projects caption features; holds the learned features that stand for no caption."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.caption_dim, config.hidden_size, bias=False)
        self.fc2 = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.unconditional = nn.Parameter(torch.zeros(config.condition_length, config.caption_dim))

    def forward(self, features: Tensor | None = None) -> Tensor:
        # Read here: offloading hooks load a module's weights for its own forward only.
        features = self.unconditional if features is None else features
        return cast(Tensor, self.fc2(functional.gelu(self.fc1(features), approximate="tanh")))


class LlamaGenModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]
    """A LlamaGen model with its head: `forward` reads codes, `condition` embeds what precedes them.

    To train, call `forward(codes[:, :-1], condition_embeds=model.condition(labels))`. Its logits
    from position L - 1 on predict `codes`.
    """

    config_class = LlamaGenConfig
    config: LlamaGenConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ["_Block"]  # noqa: RUF012

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.condition == "class":
            # The last embedding stands for no class.
            self.class_embedding = nn.Embedding(config.num_classes + 1, config.hidden_size)
        else:
            self.caption = _Caption(config)
        self.layers = nn.ModuleList(_Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rotations: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, _Caption):
            nn.init.normal_(module.unconditional, std=self.config.caption_dim**-0.5)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rotations complex [B, n, 1, width / 2] at positions i64 [B, n].

        Args:
            dtype: Type of the states to rotate; half precision is rotated in float32.
        """
        number = torch.complex128 if dtype == torch.float64 else torch.complex64
        key = positions.device, number
        if key not in self._rotations:
            self._rotations[key] = grid_rotations(self.config).to(*key)
        return self._rotations[key][positions]

    def condition(self, inputs: Tensor) -> Tensor:
        """Return condition embeddings [B, L, hidden].

        Args:
            inputs: Class labels i64 [B] (num_classes = no class), or features [B, L, caption_dim].

        Raises:
            InputError: The labels or the shape do not fit the configuration.
        """
        config, device = self.config, input_device(self.embed_tokens)
        if config.condition == "class":
            classes = config.num_classes
            wrong = inputs.dtype != torch.int64 or inputs.ndim != 1
            if wrong or bool(((inputs < 0) | (inputs > classes)).any()):
                few = inputs.ndim == 1 and len(inputs) <= 8
                got = inputs.tolist() if few else f"of {inputs.dtype}, {list(inputs.shape)}"
                raise InputError(
                    f"got class labels {got}; expected whole numbers [B] from 0 to "
                    f"{classes - 1}, or {classes} for no class."
                )
            return cast(Tensor, self.class_embedding(inputs.to(device))[:, None])
        shape = (config.condition_length, config.caption_dim)
        if not inputs.is_floating_point() or inputs.ndim != 3 or inputs.shape[1:] != shape:
            raise InputError(
                f"got caption features of {inputs.dtype} with shape {list(inputs.shape)}; expected "
                f"floats [B, {shape[0]}, {shape[1]}]. Pad or cut the caption."
            )
        return cast(Tensor, self.caption(inputs.to(device, self.dtype)))

    def unconditional(self, rows: int) -> Tensor:
        """Return the embeddings [rows, L, hidden] that stand for no condition."""
        if self.config.condition == "class":
            return self.condition(torch.full((rows,), self.config.num_classes))
        none: Tensor = self.caption()
        return none.expand(rows, -1, -1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        condition_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, k, V] of codes i64 [B, n] (or embeddings [B, n, hidden]).

        Args:
            condition_embeds: Embeddings [B, L, hidden] to put before the codes.
            position_ids: i64 [B, n], or [1, n] for all rows; 0 .. L - 1 are condition positions.
                By default they continue after the cached ones.
            logits_to_keep: 0 for all, a number of last positions, or indices i64 [k].
            kwargs: With `output_hidden_states=True` also return `hidden_states`, one entry: the
                head's input [B, k, hidden].
        """
        cache = kwargs.get("past_key_values", cache)  # the name before transformers 5.24
        states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if condition_embeds is not None:
            states = torch.cat([condition_embeds.to(states.dtype), states], dim=1)
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(start, start + states.shape[1], device=states.device)[None]
        # By position: transformers 5.24 renamed the fourth argument.
        mask = create_causal_mask(self.config, states, attention_mask, cache, position_ids)
        states = functional.dropout(states, self.config.dropout, self.training)
        rotation = self.rotation(position_ids, states.dtype)
        for layer in self.layers:
            states = layer(states, rotation, mask, cache)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        states = self.norm(states[:, keep])
        hidden = (states,) if kwargs.get("output_hidden_states") else None
        return CausalLMOutputWithPast(None, self.lm_head(states), cache, hidden)
