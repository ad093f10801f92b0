"""Draft heads, and the one that predicts the target's next hidden state from its states so far.

That head reads pairs of a token and the state before it, and drafts by reading its own output as
the next state. One module covers the forms of EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), HASS
(2408.15766), EAGLE-3 (2503.01840) and multi-token prediction (DeepSeek-V3, 2412.19437), which
differ in `HeadConfig` alone. Embedding and output head are the target's unless a file has others.
"""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ragspec.drafters.heads.config import HeadConfig
from ragspec.drafters.heads.vocabulary import output_rows
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.supported import cache_argument
from ragspec.needs import LAST
from ragspec.types import Cache, PreTrainedConfig, PreTrainedModel
from ragspec.verification.batch import Batch
from ragspec.verification.causal import CausalTarget
from ragspec.verification.reading import usual_taps

_SAMPLED = 64  # evenly spaced values of a weight
STD = 0.02


class HeadStates(NamedTuple):
    """The output of a head after n tokens.

    Attributes:
        read: What the output head reads [R, n, H].
        fed: What the head reads as the next states [R, n, H].
    """

    read: Tensor
    fed: Tensor


class WideLayer(nn.Module):
    """The first layer of EAGLE-3: its attention reads a token and the state before it side by side.

    What it attends to is added to the state, as it came or normed.

    Args:
        layer: A decoder layer of transformers, whose modules it takes.
    """

    def __init__(self, layer: Any, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.hidden_norm = norm_like(layer.input_layernorm, config.hidden_size)
        self.residual_norm = config.residual_norm
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = self.self_attn.get_submodule(name)
            bias = narrow.bias is not None
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=bias)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, embedded: Tensor, **options: object) -> Tensor:
        """Return the states [R, n, H] after tokens with these embeddings and states before them."""
        normed = self.hidden_norm(hidden_states)
        pair = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, _ = self.self_attn(hidden_states=pair, **options)
        states = (normed if self.residual_norm else hidden_states) + attended
        return cast(Tensor, states + self.mlp(self.post_attention_layernorm(states)))


class DraftHead(nn.Module):
    """The parts of heads of all forms: the vocabulary, and any logits and embeddings.

    Attributes:
        tokens: Increasing ids of the tokens that it may draft, i64 [v]; None for all.
        layers, fc: What a forward runs, and what projects its inputs, which Medusa's lacks.
        norm: The norm of its output, if there is one.
    """

    tokens: Tensor | None
    layers: Any
    fc: Any
    norm: Any

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.draft_vocab_size or config.vocab_size
        width, size = config.hidden_size, config.draft_vocab_size
        self.output = nn.Linear(width, rows, bias=False) if config.has_output else None
        self.embedding = None
        if config.has_embedding:
            self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.register_buffer("tokens", None if size is None else torch.arange(size))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its states."""
        return next(each.dtype for each in self.parameters() if each.is_floating_point())

    def reset(self, generator: torch.Generator) -> None:
        """Initialize all weights; a head that projects then roughly repeats its input state."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * STD)
                elif name.endswith("bias"):
                    weight.zero_()
            if isinstance(fc := dict(self.named_children()).get("fc"), nn.Linear):
                width = self.config.hidden_size
                last = min(fc.in_features, width)
                fc.weight[:, -last:] += torch.eye(width, last, device=fc.weight.device)

    def project(self, taps: Tensor) -> Tensor:
        """Return the states [R, n, H] that the head reads, from the target's taps side by side."""
        return taps

    def read(self, embedded: Tensor, states: Tensor, batch: Batch) -> HeadStates:
        """Return the head's output after n tokens, inside `tree_view(batch)`.

        If the head drafts several tokens in one pass, these are the states [R, K, H] of its slots.

        Args:
            embedded: Embeddings of the tokens, and of mask tokens behind them.
            states: States before each of the tokens.
        """
        raise NotImplementedError

    def rows(self, target: CausalTarget) -> nn.Module | None:
        """Return the map from states to logits of `tokens`; None for the target's output head."""
        if self.output is not None or self.tokens is None:
            return self.output
        return output_rows(target, self.tokens)

    def embed(self, target: CausalTarget, tokens: Tensor) -> Tensor:
        """Return the embeddings [copies * B, n, E] of tokens i64 [B, n]."""
        if self.embedding is None:
            return target.embed(tokens)
        return cast(Tensor, self.embedding(tokens))

    def logits_after(
        self, target: CausalTarget, paths: Sequence[Sequence[int]], logits: Tensor, fed: Tensor
    ) -> Tensor:
        """Return the logits [n, v] after n paths of one to K tokens, the root first.

        Args:
            logits, fed: Logits [K, v] of the slots, and what `read` returned beside them.
        """
        return logits[[len(path) - 1 for path in paths]]


class RecurrentHead(DraftHead):
    """A head of EAGLE or of multi-token prediction, which reads its own output as the next state.

    With several slots it is P-EAGLE's: tokens of `mask_token` follow, with `mask_taps` as taps.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, taps = config.hidden_size, len(config.taps)
        size, layers = taps * config.target_size, decoder_of(config)
        first, norm = layers.layers[0], layers.norm
        self.norm = nn.Identity() if config.form == "eagle1" else norm
        self.tap_norms = nn.ModuleList()
        self.embedding_norm: nn.Module = nn.Identity()
        self.state_norm: nn.Module = nn.Identity()
        if config.join == "attend":
            layers.layers[0] = WideLayer(first, config)
            self.fc = nn.Linear(size, width, bias=config.bias)
            count = {"none": 0, "all": 1, "each": taps}[config.tap_norm]
            self.tap_norms.extend(norm_like(norm, size // count) for _ in range(count))
        else:
            self.fc = nn.Linear(config.embedding_size + width, width, bias=config.bias)
            if config.form == "mtp":
                self.embedding_norm = norm_like(norm, config.embedding_size)
                self.state_norm = norm_like(norm, width)
            else:
                first.input_layernorm = nn.Identity()
        self.mask_taps = None if config.recurrent else nn.Parameter(torch.zeros(1, 1, size))
        layers.norm = nn.Identity()
        self.layers, self.cache_argument = layers, cache_argument(layers)

    def project(self, taps: Tensor) -> Tensor:
        """Return the states [R, n, H] that the head reads, from the target's taps side by side."""
        if self.config.join == "project":
            return taps
        taps = taps.to(self.dtype)
        if len(self.tap_norms):
            parts = taps.chunk(len(self.tap_norms), -1)
            normed = [norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)]
            taps = torch.cat(normed, -1)
        return cast(Tensor, self.fc(taps))

    def forward(
        self,
        embedded: Tensor,
        states: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        keys: "Cache | None" = None,
    ) -> HeadStates:
        """Return the head's output after n tokens.

        Args:
            embedded: Embeddings of the tokens [R, n, E].
            states: States before each of them [R, n, H], projected or fed.
            positions: Increasing positions, i64 [1, n]; None counts from 0.
            mask: Tokens that each one attends to, bool [1, 1, n, m]; None for all up to itself.
        """
        dtype, options = self.dtype, dict[str, Any]()
        embedded, states = embedded.to(dtype), states.to(dtype)
        if self.config.join == "attend":
            read, options["embedded"] = states, embedded
        else:
            pair = self.embedding_norm(embedded), self.state_norm(states)
            read = self.fc(torch.cat(pair[::-1] if self.config.state_first else pair, -1))
        options |= {self.cache_argument: keys, "use_cache": keys is not None}
        out: Tensor = self.layers(
            inputs_embeds=read, attention_mask=mask, position_ids=positions, **options
        ).last_hidden_state
        normed: Tensor = self.norm(out)
        return HeadStates(normed, normed if self.config.feeds_norm else out)

    def read(self, embedded: Tensor, states: Tensor, batch: Batch) -> HeadStates:
        """Return the head's output after n tokens, see `DraftHead.read`."""
        from ragspec.verification.model_cache import ModelCache  # imports transformers

        if self.mask_taps is not None:
            more = self.project(self.mask_taps).expand(len(states), self.config.masks, -1)
            states = torch.cat([states.to(self.dtype), more], 1)
        output: HeadStates = self(embedded, states, batch.positions, keys=ModelCache(batch))
        if self.config.recurrent:
            return output
        return HeadStates(output.read[:, -self.config.slots :], output.fed)


def decoder_of(config: HeadConfig) -> "PreTrainedModel":
    """Return a model of transformers with a head's layers, whose weights are not set."""
    from transformers import AutoConfig, AutoModel

    ids = {f"{name}_token_id": None for name in ("pad", "bos", "eos")}
    model = AutoModel.from_config(AutoConfig.for_model(**config.layers | ids | {"vocab_size": 1}))
    model.embed_tokens = nn.Identity()
    return model


def norm_like(norm: nn.Module, size: int) -> nn.Module:
    """Return a fresh norm of the same class and epsilon, over `size` numbers."""
    other = copy.deepcopy(norm)
    other.weight = nn.Parameter(torch.ones(size))
    return other


def taps_of(config: HeadConfig, target: CausalTarget) -> tuple[int, ...]:
    """Return the target's states that a head reads, as `Needs.hidden_states` numbers them."""
    count = int(text_of(target).num_hidden_layers)
    return tuple(LAST if tap == count else tap for tap in config.taps)


def default_taps(target: CausalTarget | None) -> tuple[int, ...]:
    """Return EAGLE-3's taps of a target, see `usual_taps` and `text_of`."""
    return usual_taps(int(text_of(target).num_hidden_layers))


def text_of(target: CausalTarget | None) -> "PreTrainedConfig":
    """Return the configuration of a target's layers.

    Raises:
        InputError: There is no target.
    """
    if target is None:
        raise InputError("its file names no taps or no layers; expected the target beside it.")
    return target.config.get_text_config()


def target_print(target: CausalTarget) -> str:
    """Return a SHA-256 of the sizes and of sampled values of a target's embedding and output head.

    Values are rounded to bfloat16, so the dtype of a loaded checkpoint does not change it.
    """
    digest = hashlib.sha256()
    for module in (target.loaded.get_input_embeddings(), target.output_head):
        for name, weight in sorted(module.named_parameters()):
            flat = weight.detach().reshape(-1)
            places = torch.arange(_SAMPLED, device=flat.device) * flat.numel() // _SAMPLED
            values = flat[places].to(torch.bfloat16).float().tolist()
            digest.update(f"{name} {tuple(weight.shape)} {values}".encode())
    return digest.hexdigest()


def check_head(config: HeadConfig, target: CausalTarget) -> None:
    """Raise UnsupportedModelError, naming the difference, if a head is for another target.

    A quantised target may be the one that it was trained for: its sizes alone are compared.
    """
    for difference in _differences(config, target):
        raise UnsupportedModelError(f"the head {difference}. Use one trained for this target.")
    if not config.recurrent and target.copies > 1:
        raise UnsupportedModelError(
            f"the head drafts {config.slots} token(s) in one pass, and the target has "
            f"{target.copies} rows a text (guidance); expected one row a text. Use --guidance 1 "
            "(guidance_scale=1), or a head of eagle1 or eagle3."
        )


def _differences(config: HeadConfig, target: CausalTarget) -> Iterator[str]:
    sizes = {states_size(target, tap) for tap in taps_of(config, target)}
    if (sizes, target.vocab_size) != ({config.target_size}, config.vocab_size):
        yield (
            f"is for a target of hidden size {config.target_size} and {config.vocab_size} tokens, "
            f"this one has {' and '.join(map(str, sorted(sizes)))} and {target.vocab_size}"
        )
    layers, tap = int(text_of(target).num_hidden_layers), max(config.taps)
    if tap > layers:
        name = type(target.loaded).__name__
        yield f"reads the input of layer {tap}; got {name} with {layers} layers"
    size = target.input_size
    if (config.has_embedding or config.markov_rank) and config.vocab_size < size:
        yield f"has tables of {config.vocab_size} tokens, and the target reads {size} (conditions)"
    if config.mask_token is not None and not 0 <= config.mask_token < size:
        yield f"reads the mask token {config.mask_token}; expected one of {size} with embeddings"
    alone = config.has_embedding or config.join == "state"  # which reads none
    inputs = config.embedding_size if alone else embedding_size(target)
    outputs = config.hidden_size if config.has_output else states_size(target)
    if (config.embedding_size, config.hidden_size) != (inputs, outputs):
        yield (
            f"reads embeddings of {config.embedding_size} and gives states of "
            f"{config.hidden_size}; those of the target have {inputs} and {outputs}"
        )
    floating = all(weight.is_floating_point() for weight in target.output_head.parameters())
    if floating and config.target and config.target != (other := target_print(target)):
        yield f"is for another target (fingerprint {config.target[:12]}, got {other[:12]})"


def embedding_size(target: CausalTarget) -> int:
    """Return E, the width of a target's embeddings."""
    return target.embed(torch.zeros(1, 1, dtype=torch.int64, device=target.device)).shape[-1]


def states_size(target: CausalTarget, tap: int = LAST) -> int:
    """Return the width of a state, see `Needs.hidden_states`: H for that of the output head."""
    head: Any = target.output_head if tap == LAST else None
    return int(getattr(head, "in_features", None) or text_of(target).hidden_size)
