"""Random-weight models on a device, and the bandwidth of a copy on that device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ragspec.verification.sequence_cache import slot_bytes

ONLY_TOKEN = 7  # the token that these models always generate
Sizes = dict[str, int]


def _sizes(hidden: int, inner: int, layers: int, heads: int, groups: int, vocab: int) -> Sizes:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 65_536,
    }


TARGET = _sizes(4096, 14_336, 32, 32, 8, 128_256)  # 8.0 B
DRAFT = _sizes(2048, 8192, 16, 32, 8, 128_256)  # 1.5 B, the embedding not tied
SMALL_TARGET = _sizes(64, 128, 2, 4, 2, 512)
SMALL_DRAFT = _sizes(32, 64, 1, 2, 1, 512)


def make_model(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama of random weights that always generates `ONLY_TOKEN`.

    Embeddings set channel 0 of the residual stream to a constant, no layer writes to it, and the
    head reads it for one token. So the accepted tokens of a draft are fixed in any dtype and with
    any kernel, at the cost of a usual model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=None)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device=device).eval()
    noise = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=noise)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter[0] = 0.0
        model.get_input_embeddings().weight[:, 0] = 1.0
        model.get_output_embeddings().weight[ONLY_TOKEN, 0] = 1000.0
    # The meta device computes no buffers, so the rotary module is built again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a step reads: all but the embeddings."""
    table = model.get_input_embeddings().weight
    total = sum(each.numel() * each.element_size() for each in model.parameters())
    return int(total - table.numel() * table.element_size())


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of a step: bytes of weights and KV cache by a measured bandwidth.

    Attributes:
        bandwidth: Bytes a second.
        weights: Bytes of the weights.
        token: Bytes of one token's keys and values.
    """

    bandwidth: float
    weights: int
    token: int

    @classmethod
    def of(cls, model: Any, bandwidth: float) -> Floor:
        """Return the floor of a model's steps."""
        return cls(bandwidth, weight_bytes(model), slot_bytes(model.config, model.dtype))

    def milliseconds(self, batch: int, length: int) -> float:
        """Return the milliseconds to read the bytes of a step over `batch` sequences."""
        return 1000 * (self.weights + batch * length * self.token) / self.bandwidth


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; do nothing on the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def bandwidth(device: torch.device, size: int) -> float:
    """Return bytes per second of a copy of `size` bytes within the device, reads plus writes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    times = []
    for _ in range(12):
        synchronize(device)
        began = time.perf_counter()
        sink.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * size / median(times[2:])
