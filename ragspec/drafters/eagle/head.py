"""The feature head of EAGLE (arXiv 2401.15077): the next hidden state from this one and a token.

`f(t) = layer(fc([embed(x(t)); h(t-1)]))` predicts the hidden state h(t) of the target after the
token x(t). The target's frozen output head turns it into logits. The layer is a Llama layer without
a norm before its attention, as published. Embedding and output head are the target's and not saved.
Deviations: none in the layer; files are safetensors and JSON and contain the target's fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragspec.errors import (
    InputError,
    ModelError,
    ModelNotFoundError,
    StoreError,
    UnsupportedModelError,
)
from ragspec.verification.causal import CausalTarget

if TYPE_CHECKING:
    from ragspec.verification.batch_cache import BatchCache


def frequent_tokens(texts: Sequence[Sequence[int]], size: int, vocab_size: int) -> tuple[int, ...]:
    """Return the `size` most frequent tokens of texts, in the order of their ids.

    If texts have fewer, the lowest other ids are added: they are the merges that were frequent when
    the tokenizer was trained. Ids from `vocab_size` on, which the model cannot emit, are ignored.

    Raises:
        InputError: `size` is below 1 or above `vocab_size`.
    """
    if not 1 <= size <= vocab_size:
        raise InputError(
            f"got a head's vocabulary of {size} tokens; expected 1 to {vocab_size}, all that the "
            "model has."
        )
    counts = Counter(token for token in chain.from_iterable(texts) if token < vocab_size)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    fill = (token for token in range(vocab_size) if token not in counts)
    return tuple(sorted(token for _, token in zip(range(size), chain(ranked, fill), strict=False)))


class DraftVocabulary(nn.Module):
    """The rows of the target's output head for the tokens that a feature head may draft.

    Args:
        tokens: Increasing token ids, i64 [v].

    Raises:
        UnsupportedModelError: The output head is not one linear map, or the target combines
            several rows of states (guidance).
    """

    def __init__(self, target: CausalTarget, tokens: Tensor) -> None:
        super().__init__()
        output = target.output_head
        if not isinstance(output, nn.Linear) or target.copies > 1:
            raise UnsupportedModelError(
                f"the output head of {type(target.model).__name__} is no single linear map "
                f"({type(output).__name__}, {target.copies} row(s) a text); expected one for a "
                "reduced vocabulary. Train the head without vocabulary."
            )
        tokens = tokens.to(output.weight.device)
        self.tokens, self.size = tokens, target.vocab_size
        self.rows = nn.Linear(output.in_features, len(tokens), device="meta")
        self.rows.weight = _frozen(output.weight[tokens])
        self.rows.bias = None if output.bias is None else _frozen(output.bias[tokens])

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits [..., v] of states [..., H]."""
        logits: Tensor = self.rows(states)
        return logits

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits [..., v] as [..., V], with minus infinity for all other tokens."""
        whole = logits.new_full((*logits.shape[:-1], self.size), -torch.inf)
        whole[..., self.tokens] = logits
        return whole


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)


CONFIG, WEIGHTS = "config.json", "model.safetensors"
KIND = "ragspec-feature-head"
_SAMPLED = 64
_STD = 0.02


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The sizes of a head and the fingerprint of its target.

    Attributes:
        embedding_size, hidden_size, vocab_size: E, H and V of the target.
        heads: Number of attention heads.
        intermediate_size: Width of the feed-forward part.
        target: Fingerprint of the target, see `target_print`.
        draft_vocab_size: Number of tokens that it may draft; None for all.

    Raises:
        InputError: The sizes are no whole numbers of at least 1, or do not match.
    """

    embedding_size: int
    hidden_size: int
    vocab_size: int
    heads: int
    intermediate_size: int
    target: str
    draft_vocab_size: int | None = None
    kind: str = KIND

    def __post_init__(self) -> None:
        sizes = [self.embedding_size, self.hidden_size, self.vocab_size, self.intermediate_size]
        sizes += [] if self.draft_vocab_size is None else [self.draft_vocab_size]
        if not all(isinstance(size, int) and size >= 1 for size in (*sizes, self.heads)):
            raise InputError(
                f"got {self}; expected sizes and heads in whole numbers of at least 1."
            )
        if self.hidden_size % (2 * self.heads):  # rotary: heads of even width
            raise InputError(
                f"got {self.heads} heads for a width of {self.hidden_size}; expected a number of "
                "heads whose double divides the width."
            )
        if not isinstance(self.target, str):
            raise InputError(f"got the target {self.target!r}; expected its fingerprint as text.")


class FeatureHead(nn.Module):
    """The trained part of the head: `fc` and one layer.

    Attributes:
        tokens: Increasing ids of the tokens that it may draft, i64 [v]; None for all.
    """

    tokens: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        self.config = config
        hidden = config.hidden_size
        settings = LlamaConfig(
            vocab_size=1,
            hidden_size=hidden,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            max_position_embeddings=1 << 20,  # rotary: no table, no limit of its own
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):  # weights are set by `reset` or from a file
            self.fc = nn.Linear(config.embedding_size + hidden, hidden)
            self.layer = LlamaModel(settings)
        self.layer.embed_tokens = nn.Identity()
        self.layer.norm = nn.Identity()
        self.layer.layers[0].input_layernorm = nn.Identity()
        size = config.draft_vocab_size
        self.register_buffer("tokens", None if size is None else torch.arange(size))

    @classmethod
    def fresh(
        cls,
        target: CausalTarget,
        generator: torch.Generator,
        *,
        tokens: Sequence[int] | None = None,
    ) -> FeatureHead:
        """Return an untrained head for a target, in float32 on its device.

        It has the target's number of attention heads if twice that divides the hidden size, else
        one. Its feed-forward part is 8/3 as wide as the hidden size, rounded up in steps of 32.

        Args:
            tokens: Increasing ids of the tokens that it may draft; None for all.
        """
        config = target.model.config.get_text_config()
        hidden = _states_size(target)
        heads = int(getattr(config, "num_attention_heads", 0) or 1)
        first = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
        head = cls(
            HeadConfig(
                embedding_size=target.embed(first).shape[-1],
                hidden_size=hidden,
                vocab_size=target.vocab_size,
                heads=heads if hidden % (2 * heads) == 0 else 1,
                intermediate_size=-(-hidden * 8 // 96) * 32,
                target=target_print(target),
                draft_vocab_size=None if tokens is None else len(tokens),
            )
        )
        head.reset(generator)
        if tokens is not None:
            head.tokens = torch.tensor(tokens)
        return head.to(target.device)

    def reset(self, generator: torch.Generator) -> None:
        """Initialize all weights; the head then roughly repeats its input state."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() > 1:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * _STD)
                elif name.endswith("bias"):
                    weight.zero_()
            width = self.config.hidden_size
            self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device)

    def forward(
        self,
        embedded: Tensor,
        states: Tensor,
        positions: Tensor | None = None,
        cache: BatchCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the predicted hidden states [R, n, H] after n tokens.

        Args:
            embedded: Embeddings of the tokens [R, n, E].
            states: Hidden states before each of them [R, n, H].
            positions: Increasing positions, i64 [1, n] or [R, n]; None counts from 0.
            cache: Stores keys and values.
            mask: Tokens that each one attends to, bool [1, 1, n, n]; None for all up to itself.
        """
        from ragspec.verification.model_cache import ModelCache  # imports transformers

        read = self.fc(torch.cat([embedded, states], -1).to(self.fc.weight.dtype))
        if positions is not None and cache is None and mask is None:
            # Without a mask, transformers treats a gap in positions as the start of another text.
            n = read.shape[1]
            mask = torch.ones(1, 1, n, n, dtype=torch.bool, device=read.device).tril()
        guessed: Tensor = self.layer(
            inputs_embeds=read,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None if cache is None else ModelCache(cache),
            use_cache=cache is not None,
        ).last_hidden_state
        return guessed

    def save(self, folder: Path | str, dtype: torch.dtype | None = None) -> None:
        """Write the head's weights and configuration to a folder.

        Args:
            dtype: Dtype of the saved weights; None for their own.

        Raises:
            StoreError: The files cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        folder = Path(folder)
        weights = {
            name: value.to(dtype=dtype if value.is_floating_point() else None).contiguous()
            for name, value in self.state_dict().items()
        }
        text = json.dumps(asdict(self.config), indent=2)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
            (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
        except (OSError, SafetensorError) as error:  # the latter for a full disk
            raise StoreError(
                f"the head cannot be written to {folder} ({error}); expected a folder on a disk "
                "with room."
            ) from error

    @classmethod
    def load(cls, folder: Path | str) -> FeatureHead:
        """Return the head in a folder, in float32.

        Raises:
            ModelNotFoundError: The folder has no head.
            ModelError: The files are damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
            raise ModelNotFoundError(
                f"{folder} holds no feature head; expected {CONFIG} and {WEIGHTS}, as `ragspec "
                "train-head` writes them."
            )
        try:
            config = HeadConfig(**json.loads((folder / CONFIG).read_text(encoding="utf-8")))
            if config.kind != KIND:
                raise ValueError(f"its kind is {config.kind!r}, expected {KIND!r}")
            head = cls(config)
            head.load_state_dict(load_file(folder / WEIGHTS))
            ids = [] if head.tokens is None else head.tokens.tolist()
            if any(a >= b for a, b in pairwise([-1, *ids, config.vocab_size])):
                raise ValueError("its tokens are no increasing ids of the vocabulary")
        except (ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise ModelError(
                f"{folder} holds no feature head that can be read ({error}); train it again with "
                "`ragspec train-head`."
            ) from error
        return head.eval()


def target_print(target: CausalTarget) -> str:
    """Return a SHA-256 of the sizes and of sampled values of a target's embedding and output head.

    Values are rounded to bfloat16, so the dtype of a loaded checkpoint does not change it.
    """
    digest = hashlib.sha256()
    for module in (target.model.get_input_embeddings(), target.output_head):
        for name, weight in sorted(module.named_parameters()):
            values = _sampled(weight).to(torch.bfloat16).float().tolist()
            digest.update(f"{name} {tuple(weight.shape)} {values}".encode())
    return digest.hexdigest()


def _sampled(weight: Tensor) -> Tensor:
    """Return evenly spaced values of a weight, on the CPU."""
    flat = weight.detach().reshape(-1)
    places = torch.arange(_SAMPLED) * flat.numel() // _SAMPLED
    return flat[places.to(flat.device)].cpu()


def check_head(head: FeatureHead, target: CausalTarget) -> None:
    """Raise UnsupportedModelError, naming the difference, if a head is for another target."""
    config = head.config
    size = _states_size(target)
    if (config.hidden_size, config.vocab_size) != (size, target.vocab_size):
        raise UnsupportedModelError(
            f"the head is for a target of hidden size {config.hidden_size} and "
            f"{config.vocab_size} tokens, this one has {size} and {target.vocab_size}; use a head "
            "that `ragspec train-head` made for this target."
        )
    fingerprint = target_print(target)
    if config.target != fingerprint:
        raise UnsupportedModelError(
            f"the head was trained for another target (fingerprint {config.target[:12]}, got "
            f"{fingerprint[:12]}); use a head that `ragspec train-head` made for this target."
        )


def _states_size(target: CausalTarget) -> int:
    """Return H, the input size of the output head."""
    head: Any = target.output_head
    width = getattr(head, "in_features", None) or target.model.config.get_text_config().hidden_size
    return int(width)
