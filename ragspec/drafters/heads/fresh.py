"""Draft heads to train: random ones, and copies of the target's last layer."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ragspec.drafters.heads import head as base
from ragspec.drafters.heads.checkpoint import copied_layer
from ragspec.drafters.heads.config import JOINS, HeadConfig
from ragspec.drafters.heads.medusa import prefix_layer
from ragspec.drafters.heads.parallel import MedusaHead, unset_head
from ragspec.errors import InputError
from ragspec.models.block_linear import BlockLinear
from ragspec.needs import LAST
from ragspec.verification.causal import CausalTarget
from ragspec.verification.reading import decoder_layers

FORMS = ("eagle1", "eagle3", "peagle", "dflash", "medusa", "hydra", "hydra++")
_LINEAR = (nn.Linear, BlockLinear)
_COPIED = ("llama", "mistral", "qwen2", "qwen3")


def fresh_head(
    target: CausalTarget,
    generator: torch.Generator,
    *,
    form: str = "eagle1",
    tokens: Sequence[int] | None = None,
    learns_rows: bool = True,
    slots: int = 4,
) -> base.DraftHead:
    """Return an untrained head for a target, in float32 on its device.

    A head of EAGLE-3 or P-EAGLE begins as a copy of the last layer of a Llama-like target, with its
    norm and rows of logits; Medusa and Hydra copy the rows. Other weights are random: one layer
    with the target's number of attention heads if twice that divides the hidden size, else one, and
    a feed-forward part 8/3 as wide, in steps of 32. The mask token is the vocabulary's last.

    Args:
        form: One of `FORMS`.
        tokens: Increasing ids of the tokens that it may draft; None for all.
        learns_rows: Whether a head of EAGLE-3 learns rows of logits, or has the target's.
        slots: Tokens that a head of several slots drafts in one pass.

    Raises:
        InputError: There is no such form, or it drafts all tokens.
    """
    if form not in FORMS:
        raise InputError(f"got form={form!r}; expected one of {', '.join(FORMS)}.")
    join = JOINS[form]
    if tokens is not None and join in ("state", "path"):
        raise InputError(
            f"got {len(tokens)} tokens for a head of {form}, which drafts all; expected none."
        )
    plain = isinstance(target.output_head, _LINEAR) and target.copies == 1
    plain = plain and target.model.config.get_text_config().model_type in _COPIED
    copied = join == "attend" and plain and bool(decoder_layers(target.model))
    taps = base.default_taps(target) if join in ("attend", "inject") else (LAST,)
    config = HeadConfig(
        layers=_layers(form, target, copied),
        embedding_size=base.embedding_size(target),
        target_size=base.states_size(target, taps[0]),
        vocab_size=target.vocab_size,
        form=form,
        taps=taps,
        bias=join in ("project", "path"),
        draft_vocab_size=None if tokens is None else len(tokens),
        has_output=join == "attend" and learns_rows,
        slots=1 if form in ("eagle1", "eagle3") else slots,
        mask_token=target.vocab_size - 1 if form in ("peagle", "dflash") else None,
        target=base.target_print(target),
    )
    head = unset_head(config)
    head.reset(generator)
    if tokens is not None:
        head.tokens = torch.tensor(tokens)
    if copied:
        _copy_layer(target, head)
    if isinstance(head, MedusaHead) and isinstance(target.output_head, _LINEAR):
        for rows in head.outputs:
            rows.load_state_dict({"weight": target.output_head.weight}, strict=False)
    return head.to(target.device)


def _layers(form: str, target: CausalTarget, copied: bool) -> dict[str, object]:
    """Return the configuration of the layer: the target's if it is `copied`, or a random one's."""
    text, width = target.model.config.get_text_config(), base.states_size(target)
    if form == "hydra++":
        return prefix_layer(text)
    if copied:
        return copied_layer(text)
    heads = int(getattr(text, "num_attention_heads", 0) or 1)
    heads = heads if width % (2 * heads) == 0 else 1
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": -(-width * 8 // 96) * 32,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1 << 20,  # rotary: no table, no limit of its own
    }


@torch.no_grad()
def _copy_layer(target: CausalTarget, head: base.DraftHead) -> None:
    """Let a head begin as the target's last layer, read over its last tap."""
    source: Any = decoder_layers(target.model)[-1]
    layer: Any = head.layers.layers[0]
    for name, ours in layer.state_dict().items():
        if name.startswith("hidden_norm"):
            continue
        weight = attrgetter(name)(source)
        if weight.shape == ours.shape:
            ours.copy_(weight)
        else:  # reads the embedding too, whose half stays small and random
            ours[:, -weight.shape[1] :].copy_(weight)
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
    layer.input_layernorm.weight.fill_(1.0)
    head.norm.weight.copy_(target.model.get_decoder().norm.weight)
    head.fc.weight.mul_(base.STD)
    width = head.config.hidden_size
    head.fc.weight[:, -width:] += torch.eye(width, device=head.fc.weight.device)
    if head.output is not None:
        rows: Any = target.output_head.weight
        head.output.weight.copy_(rows if head.tokens is None else rows[head.tokens])
