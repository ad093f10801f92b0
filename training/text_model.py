"""The two starter text models, and the training step's fast parts on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TARGET: dict[str, int] = {"hidden_size": 320, "num_hidden_layers": 6, "intermediate_size": 864}
DRAFT: dict[str, int] = {"hidden_size": 192, "num_hidden_layers": 2, "intermediate_size": 512}
SHAPES: dict[str, dict[str, int]] = {"target": TARGET, "draft": DRAFT}
VOCABULARY = 8192
POSITIONS = 2048
BLOCK = 128
HOP_LAYERS = (3, 5)


def build_model(name: str, vocabulary: int = VOCABULARY, **changes: Any) -> Any:
    """Build a Llama of the shape `name` (target or draft) with heads of 64 and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPES[name], **changes}
    heads = shape["hidden_size"] // 64
    config = LlamaConfig(
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **shape,
    )
    return LlamaForCausalLM(config)


class _BlockAttention(torch.autograd.Function):
    """Causal attention row by row in blocks of queries; twice the speed of the stock CPU kernel.

    The probabilities of a block are kept for the backward pass (half of T x T for each head).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend: q, k, v and the result are [B, heads, T, 64]."""
        q, k, v = (q * scale).contiguous(), k.contiguous(), v.contiguous()
        out = torch.empty_like(q)
        mask = torch.full((BLOCK, BLOCK), -1e9, dtype=q.dtype, device=q.device).triu_(1)
        selected = []
        for row in range(q.shape[0]):
            for start in range(0, q.shape[2], BLOCK):
                stop = min(start + BLOCK, q.shape[2])
                size = stop - start
                scores = torch.bmm(q[row, :, start:stop], k[row, :, :stop].transpose(1, 2))
                scores[..., start:stop] += mask[:size, :size]
                scores = torch.softmax(scores, -1)
                out[row, :, start:stop] = torch.bmm(scores, v[row, :, :stop])
                selected.append(scores)
        ctx.save_for_backward(q, k, v, *selected)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        """Give the gradients of q, k and v."""
        q, k, v, *selected = ctx.saved_tensors
        grad = grads[0].contiguous()
        q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        blocks = iter(selected)
        for row in range(q.shape[0]):
            for start in range(0, q.shape[2], BLOCK):
                stop = min(start + BLOCK, q.shape[2])
                probs, out_grad = next(blocks), grad[row, :, start:stop]
                v_grad[row, :, :stop] += torch.bmm(probs.transpose(1, 2), out_grad)
                slope = torch.bmm(out_grad, v[row, :, :stop].transpose(1, 2))
                slope = torch._softmax_backward_data(slope, probs, -1, probs.dtype)
                q_grad[row, :, start:stop] = torch.bmm(slope, k[row, :, :stop]) * ctx.scale
                k_grad[row, :, :stop] += torch.bmm(slope.transpose(1, 2), q[row, :, start:stop])
        return q_grad, k_grad, v_grad, None


def block_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attend causally, in the form of transformers' attention functions: [B, T, heads, 64]."""
    out: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, options["scaling"]
    )
    return out.transpose(1, 2).contiguous(), None


def use_block_attention(model: Any) -> None:
    """Switch a model to `block_attention` (whole packed rows only: no padding, no cache)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("training_blocks", block_attention)
    AttentionMaskInterface.register("training_blocks", lambda *args, **options: None)
    model.set_attn_implementation("training_blocks")


class _HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy over the output head, in slices that stay in the cache.

    The gradients are made during the forward pass, so that the logits of a slice are touched once
    and never stored.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the losses; hidden [M, H], head [V, H], targets [M]."""
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        total = torch.zeros((), dtype=torch.float32, device=head.device)
        for start in range(0, hidden.shape[0], 512):
            part = slice(start, start + 512)
            logits = (hidden[part] @ head.T).float()
            log_total = torch.logsumexp(logits, dim=-1, keepdim=True)
            picked = targets[part, None]
            total += ((log_total - logits.gather(1, picked))[:, 0] * weights[part]).sum()
            grad = logits.sub_(log_total).exp_()
            grad.scatter_add_(1, picked, -torch.ones_like(log_total))
            slope = grad.mul_(weights[part, None]).to(hidden.dtype)
            hidden_grad[part] = slope @ head
            head_grad += slope.T @ hidden[part]
        ctx.save_for_backward(hidden_grad, head_grad.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        """Scale the stored gradients."""
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * grads[0], head_grad * grads[0], None, None


class Hints(nn.Module):
    """Training-time heads that say early layers what to carry to where; never exported.

    To find an evidence line takes three hops: a passage's token must know how its sentence begins
    and which passage it is in, a question's token must fetch that from its match, and the last
    token must gather it. Each alone earns nothing, so the first two are asked for directly.
    """

    def __init__(self, width: int) -> None:
        """Make, for either hop, a map to the embedding space and one to passage numbers."""
        super().__init__()
        self.starts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.numbers = nn.ModuleList(nn.Linear(width, 10, bias=False) for _ in range(2))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def loss(
        self, states: tuple[Tensor, ...], hints: Tensor, tokens: Tensor, head: Tensor
    ) -> Tensor:
        """Give the mean loss of both hops; states [B, T, H] by layer, hints [B, T, 3]."""
        total = torch.zeros((), device=head.device)
        for hop, layer in enumerate(HOP_LAYERS, start=1):
            chosen = (hints[..., 0] == hop).nonzero()
            chosen = chosen[:: 5 if hop == 1 else 1]
            if not len(chosen):
                continue
            rows, places = chosen.unbind(1)
            state = states[layer][rows, places]
            state = nn.functional.rms_norm(state, state.shape[-1:])
            selection = hints[rows, places]
            mean = torch.full((len(chosen),), 1.0 / len(chosen))
            total = total + _HeadLoss.apply(  # type: ignore[no-untyped-call]
                self.starts[hop - 1](state), head, selection[:, 1], mean
            )
            numbers = self.numbers[hop - 1](state).float()
            total = total + nn.functional.cross_entropy(numbers, selection[:, 2])
        return total


class PreviousToken(nn.Module):
    """Training-time head of the draft: its first layer shall carry the token before.

    A model of two layers can copy only if it does, and finds that out late by itself.
    """

    def __init__(self, width: int) -> None:
        """Make the map to the embedding space."""
        super().__init__()
        self.before = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.before.weight)

    def loss(
        self, states: tuple[Tensor, ...], hints: Tensor, tokens: Tensor, head: Tensor
    ) -> Tensor:
        """Give the mean loss of the token before at every sixth place."""
        state = states[1][:, 1::6]
        state = self.before(nn.functional.rms_norm(state, state.shape[-1:])).flatten(0, 1)
        selection = tokens[:, :-1:6].flatten()
        mean = torch.full((len(selection),), 1.0 / len(selection))
        loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            state, head, selection, mean
        )
        return loss


def weighted_loss(
    model: Any, tokens: Tensor, weights: Tensor, hints: Tensor | None = None, heads: Any = None
) -> tuple[Tensor, Tensor]:
    """Sum the weighted next-token losses of rows [B, T + 1]; also give the loss of the hints.

    weights are [B, T + 1], hints [B, T + 1, 3] as in `text_answering.Sample`.
    """
    output = model.model(
        input_ids=tokens[:, :-1], use_cache=False, output_hidden_states=heads is not None
    )
    hidden = output.last_hidden_state
    selection = weights[:, 1:] > 0
    loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden[selection], model.lm_head.weight, tokens[:, 1:][selection], weights[:, 1:][selection]
    )
    extra = torch.zeros(())
    if heads is not None and hints is not None:
        extra = heads.loss(
            output.hidden_states, hints[:, :-1], tokens[:, :-1], model.lm_head.weight
        )
    return loss, extra


def repeat_accuracy(model: Any, rows: int, span: int, seed: int) -> float:
    """Measure greedy next-token accuracy on the second half of repeated random tokens."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(1, model.config.vocab_size, (rows, span), generator=generator)
    tokens = torch.cat([half, half], dim=1)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    # The first token of the second half cannot be known: the repeat has not begun.
    guesses = logits[:, span:-1].argmax(-1)
    return float((guesses == tokens[:, span + 1 :]).float().mean())
