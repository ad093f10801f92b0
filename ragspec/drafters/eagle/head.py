"""The feature head of EAGLE (arXiv 2401.15077): the next hidden state from this one and a token.

`f(t) = layer(fc([embed(x(t)); h(t-1)]))` guesses the state h(t) that the target's output head will
read after the token x(t); that head, frozen, makes it logits. One Llama layer without a norm before
its attention, as published; embedding and output head stay the target's own and are not saved.
Deviations: none in the layer; files are safetensors and JSON, and say which target they are for."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
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
    from ragspec.verification.kv_cache import SlotCache


def frequent_tokens(texts: Sequence[Sequence[int]], size: int, vocab_size: int) -> tuple[int, ...]:
    """Return the `size` most frequent tokens of texts, in the order of their ids.

    Where texts hold fewer, the lowest ids fill up: merges come first that were frequent when the
    tokenizer was made. Ids that can be read but not written do not count. Raises InputError where
    the vocabulary has not so many.
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
    """The rows of a target's output head that belong to the tokens of a head.

    tokens i64 [v]: increasing ids. Raises UnsupportedModelError for an output head that is not
    one linear map, and for a target that combines several rows of states (guidance).
    """

    def __init__(self, target: CausalTarget, tokens: Tensor) -> None:
        super().__init__()
        output = target.output_head
        if not isinstance(output, nn.Linear) or target.copies > 1:
            raise UnsupportedModelError(
                f"the output head of {type(target.model).__name__} is no single linear map "
                f"({type(output).__name__}, {target.copies} row(s) a text); expected one for a "
                "reduced vocabulary. Train the head without --vocabulary."
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
        """Return logits [..., v] as [..., V]; minus infinity for all other tokens."""
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
    """The sizes of a head, and the target that it is for.

    embedding_size, hidden_size, vocab_size: E, H and V of the target. heads: of the attention.
    intermediate_size: of the feed-forward part. target: fingerprint of the target, see
    `target_print`. draft_vocab_size: how many tokens it may draft, see `vocabulary`; None: all.
    Raises InputError for sizes that make no head.
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

    tokens i64 [v]: those that it may draft, increasing; None: all of the target's.
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

        It has the target's number of attention heads where that divides the width, and a
        feed-forward part of 8/3 of the width in steps of 32. tokens: those that it may draft,
        increasing; None: all.
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
        """Draw all weights again; a fresh head repeats the state that it is given."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() > 1:
                    initial = torch.randn(weight.shape, generator=generator) * _STD
                    weight.copy_(initial)
                elif name.endswith("bias"):
                    weight.zero_()
            width = self.config.hidden_size
            self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device)

    def forward(
        self,
        embedded: Tensor,
        states: Tensor,
        positions: Tensor | None = None,
        cache: SlotCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the guessed states [R, n, H] after n tokens.

        embedded [R, n, E]: the tokens; states [R, n, H]: those before each of them. positions i64
        [1, n] or [R, n], increasing; None counts from 0. cache: takes the keys and values. mask
        bool [1, 1, n, n]: what each sees; None: all before it.
        """
        read = self.fc(torch.cat([embedded, states], -1).to(self.fc.weight.dtype))
        if positions is not None and cache is None and mask is None:
            # transformers takes a gap between positions for the border of another text.
            n = read.shape[1]
            mask = torch.ones(1, 1, n, n, dtype=torch.bool, device=read.device).tril()
        guessed: Tensor = self.layer(
            inputs_embeds=read,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return guessed

    def save(self, folder: Path | str, dtype: torch.dtype | None = None) -> None:
        """Write the head's weights and configuration to a folder; dtype None keeps theirs.

        Raises StoreError where they cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        folder = Path(folder)
        weights = {
            name: _as(dtype, value.detach()).contiguous()
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

        Raises ModelNotFoundError where there is none, ModelError where it is damaged.
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
            head = cls(_read_config(folder / CONFIG))
            head.load_state_dict(load_file(folder / WEIGHTS))
            head._check_tokens()
        except (ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise ModelError(
                f"{folder} holds no feature head that can be read ({error}); train it again with "
                "`ragspec train-head`."
            ) from error
        return head.eval()

    def _check_tokens(self) -> None:
        """Raise ValueError for tokens that are not increasing ids of the vocabulary."""
        if self.tokens is not None:
            bounds = torch.tensor([-1]), torch.tensor([self.config.vocab_size])
            if not bool((torch.cat([bounds[0], self.tokens, bounds[1]]).diff() > 0).all()):
                raise ValueError("its tokens are no increasing ids of the vocabulary")


def target_print(target: CausalTarget) -> str:
    """Return a SHA-256 of a target's sizes and of values of its embedding and output head.

    Values are rounded to bfloat16, so that one checkpoint loaded in another dtype stays the same.
    """
    digest = hashlib.sha256()
    for module in (target.model.get_input_embeddings(), target.output_head):
        for name, weight in sorted(module.named_parameters()):
            values = _sampled(weight).to(torch.bfloat16).float().tolist()
            digest.update(f"{name} {tuple(weight.shape)} {values}".encode())
    return digest.hexdigest()


def _sampled(weight: Tensor) -> Tensor:
    """Return values from all over a weight, on the CPU."""
    flat = weight.detach().reshape(-1)
    places = torch.arange(_SAMPLED) * flat.numel() // _SAMPLED
    return flat[places.to(flat.device)].cpu()


def check_head(head: FeatureHead, target: CausalTarget) -> None:
    """Raise UnsupportedModelError, with what differs, where a head is of another target."""
    config = head.config
    size = _states_size(target)
    if (config.hidden_size, config.vocab_size) != (size, target.vocab_size):
        raise UnsupportedModelError(
            f"the head is for a target of hidden size {config.hidden_size} and "
            f"{config.vocab_size} tokens, this one has {size} and {target.vocab_size}; use a head "
            "that `ragspec train-head` made for this target."
        )
    result = target_print(target)
    if config.target != result:
        raise UnsupportedModelError(
            f"the head was trained for another target (fingerprint {config.target[:12]}, this "
            f"one's is {result[:12]}); use a head that `ragspec train-head` made for this target."
        )


def _as(dtype: torch.dtype | None, value: Tensor) -> Tensor:
    """Return a value in another dtype, if it is no index."""
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _states_size(target: CausalTarget) -> int:
    """Return H, the width of what the output head reads."""
    head: Any = target.output_head
    width = getattr(head, "in_features", None) or target.model.config.get_text_config().hidden_size
    return int(width)


def _read_config(path: Path) -> HeadConfig:
    config = HeadConfig(**json.loads(path.read_text(encoding="utf-8")))
    if config.kind != KIND:
        raise ValueError(f"its kind is {config.kind!r}, expected {KIND!r}")
    return config
