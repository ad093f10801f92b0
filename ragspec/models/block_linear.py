"""Linear layers whose weights are integers of 8 or 4 bits, in blocks with one scale each.

ONNX Runtime multiplies by them as they are stored, and rounds its inputs to 8 bits by blocks too.
In 8 bits a weight is s q with |q| <= 127 and s = max |w| / 127 of its block. Blocks of 32 give
weights of llama.cpp's Q8_0 back as they were stored. In 4 bits a weight is s (q - z) with
0 <= q, z <= 15, in blocks of 32; s and z are those of the least error of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.models.onnx_session import MICROSOFT, Session, declared, missing_package, serialized
from ragspec.types import PreTrainedModel

if TYPE_CHECKING:
    from onnx import NodeProto

BLOCK = 32  # weights of one scale, as in Q8_0
CENTRE = 128  # stored for 0 in 8 bits
GROUP = 128  # inputs that the runtime's products take at once; the rest costs far more
SHRINKS = 11  # ranges of a block that are tried in 4 bits, each 4 % less
ROWS = 256  # of weights that are rounded to 4 bits at once, as caches hold them


class BlockLinear(nn.Module):
    """A linear layer over the integers of another one's weights [N, K].

    On a CPU it runs on ONNX Runtime. Elsewhere the weights are made floats for every call.

    Attributes:
        codes: q + 128, u8 [N, K / B, B]; in 4 bits q, two in a byte, u8 [N, K / B, B / 2].
        scales: [N, K / B].
        zeros: z, two in a byte, u8 [N, ceil(K / 2 B)]; None in 8 bits.
        factors: Powers of two by which inputs are multiplied first, [K]; None for 1.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.bits = 8 if zeros is None else 4
        self.block = codes.shape[2] * 8 // self.bits
        self.in_features, self.out_features = self.block * codes.shape[1], len(codes)
        self.codes, self.scales = (nn.Parameter(x, requires_grad=False) for x in (codes, scales))
        self.zeros, self.bias, self.factors = (
            None if x is None else nn.Parameter(x, requires_grad=False)
            for x in (zeros, bias, factors)
        )

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        block: int = BLOCK,
        factors: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> BlockLinear:
        """Return a linear layer with its weights rounded to 8 bits.

        Args:
            sizes: Mean squares of the inputs, by which they are rounded to 4 bits, [K].
        """
        weight = linear.weight.detach()
        weight = weight if factors is None else weight / factors
        if sizes is None:
            return cls(*in_blocks(weight, block), None, linear.bias, factors)
        sizes = sizes if factors is None else sizes * factors.square()
        parts = [in_four_bits(rows, sizes) for rows in torch.split(weight, ROWS)]
        codes, scales, zeros = map(torch.cat, zip(*parts, strict=True))
        return cls(codes, scales, zeros, linear.bias, factors)

    @classmethod
    def joined(cls, layers: Sequence[BlockLinear]) -> BlockLinear:
        """Return the layer whose outputs are those of several, one after the other."""
        names = ("codes", "scales", "zeros", "bias")  # all layers have the last two, or none has
        parts = ([getattr(layer, name) for layer in layers] for name in names)
        joined: Iterable[Any] = (None if each[0] is None else torch.cat(each) for each in parts)
        codes, scales, zeros, bias = joined
        return cls(codes, scales, zeros, bias, layers[0].factors)

    def padded(self) -> BlockLinear:
        """Return the layer whose inputs, by its factors, zeros bring to a multiple of `GROUP`."""
        more = -self.in_features % GROUP // self.block
        codes = functional.pad(self.codes.detach(), (0, 0, 0, more))  # of scale 0
        scales, zeros = functional.pad(self.scales.detach(), (0, more)), None
        if self.zeros is not None:
            zeros = functional.pad(self.zeros, (0, -(-scales.shape[1] // 2) - self.zeros.shape[1]))
        return BlockLinear(codes, scales, zeros, self.bias)

    def rows(self, index: Tensor) -> BlockLinear:
        """Return the layer of some outputs."""
        zeros, bias = (None if each is None else each[index] for each in (self.zeros, self.bias))
        return BlockLinear(self.codes[index], self.scales[index], zeros, bias, self.factors)

    @property
    def weight(self) -> Tensor:
        """The weights as floats [N, K]."""
        return block_floats(self.codes, self.scales, self.factors, self.zeros)

    @property
    def operands(self) -> dict[str, Tensor]:
        """The inputs of `node` beside x, by name."""
        parts = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}
        return {name: part.detach() for name, part in parts.items() if part is not None}

    def node(self, x: str, operands: list[str], name: str) -> NodeProto:
        """Return the node of a graph that multiplies by the weights, without the bias."""
        from onnx import helper

        return helper.make_node(
            "MatMulNBits",
            [x, *operands],
            [name],
            domain=MICROSOFT,
            K=self.in_features,
            N=self.out_features,
            bits=self.bits,
            block_size=self.block,
            accuracy_level=4,  # inputs in 8 bits
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [.., K] -> [.., N]."""
        if x.device.type != "cpu" or x.dtype != torch.float32 or missing_package():
            return functional.linear(x, self.weight.to(x.dtype), self.bias)
        x = x if self.factors is None else x * self.factors
        inputs = {"x": x.detach().contiguous().numpy()}
        out = torch.from_numpy(_session(self).inner.run(None, inputs)[0])
        return out if self.bias is None else out + self.bias


class BlockEmbedding(nn.Module):
    """The embedding that is tied to an output head in blocks, times a factor."""

    def __init__(self, head: BlockLinear, factor: float = 1.0) -> None:
        super().__init__()
        self.codes, self.scales, self.factors = head.codes, head.scales, head.factors
        self.scalar_embed_scale = factor

    @property
    def weight(self) -> Tensor:
        """The weights as floats [V, H]."""
        return block_floats(self.codes, self.scales, self.factors)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, [..] -> [.., H]."""
        rows = block_floats(self.codes[ids], self.scales[ids], self.factors)
        return rows * self.scalar_embed_scale


def in_blocks(
    weights: Tensor, block: int = BLOCK, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights [N, K] as codes [N, K / B, B] and scales [N, K / B], in a dtype."""
    blocks = weights.reshape(len(weights), -1, block)
    scales = (blocks.abs().amax(-1) / 127).to(dtype or weights.dtype)
    divisors = torch.where(scales == 0, 1.0, scales.to(weights.dtype))
    codes = (blocks / divisors[..., None]).round().clamp(-127, 127) + CENTRE
    return codes.to(torch.uint8), scales


def in_four_bits(weights: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [N, K] as codes, scales and zeros of 4 bits; see `BlockLinear`.

    Args:
        sizes: Mean squares of the inputs [K], which weigh the errors.
    """
    blocks, sizes = weights.reshape(len(weights), -1, BLOCK), sizes.reshape(-1, BLOCK)
    low, high = blocks.amin(-1, True).clamp(max=0), blocks.amax(-1, True).clamp(min=0)
    widest = torch.where(high > low, (high - low) / 15, 1.0)
    zeros, scales, least = (-low / widest).round(), widest, torch.full_like(widest, torch.inf)
    codes = zeros
    for shrink in range(SHRINKS):
        tried = widest * (1 - 0.04 * shrink)
        rounded = (blocks / tried + zeros).round().clamp(0, 15)
        errors = (((rounded - zeros) * tried - blocks).square() * sizes).sum(-1, True)
        better = errors < least
        codes, scales = torch.where(better, rounded, codes), torch.where(better, tried, scales)
        least = torch.minimum(errors, least)
    pairs = functional.pad(zeros[..., 0], (0, zeros.shape[1] % 2))
    return _in_bytes(codes), scales[..., 0], _in_bytes(pairs)


def _in_bytes(numbers: Tensor) -> Tensor:
    """Store two numbers of 4 bits in a byte, [.., 2 n] -> u8 [.., n]."""
    numbers = numbers.to(torch.uint8)
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def _of_bytes(numbers: Tensor) -> Tensor:
    return torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2)


def block_floats(
    codes: Tensor, scales: Tensor, factors: Tensor | None = None, zeros: Tensor | None = None
) -> Tensor:
    """Return weights as floats, [.., K], of parts of a `BlockLinear`."""
    centre: Tensor | int = CENTRE
    if zeros is not None:
        codes, centre = _of_bytes(codes), _of_bytes(zeros)[..., : codes.shape[-2], None]
    weights = ((codes.to(scales.dtype) - centre) * scales[..., None]).flatten(-2)
    return weights if factors is None else weights * factors


def weights_of(model: nn.Module) -> str:
    """Return what a model's weights are stored in: "int8", "int4" or its dtype."""
    bits = {module.bits for module in model.modules() if isinstance(module, BlockLinear)}
    return f"int{min(bits)}" if bits else str(model.dtype).removeprefix("torch.")


def count_weights(model: PreTrainedModel) -> int:
    """Return the number of a model's weights, also where a byte holds two."""
    blocks = [each for each in model.modules() if isinstance(each, BlockLinear)]
    return int(model.num_parameters()) + sum(x.codes.numel() for x in blocks if x.bits == 4)


SESSIONS: WeakKeyDictionary[BlockLinear, tuple[tuple[int, ...], Session]] = WeakKeyDictionary()


def _session(layer: BlockLinear) -> Session:
    """Return the session of a layer's weights; it misses changes that torch does not count."""
    from onnx import TensorProto, helper

    codes, scales = layer.codes, layer.scales  # by address and version, as a sum takes longer
    state = codes.data_ptr(), codes._version, scales.data_ptr(), scales._version
    if (known := SESSIONS.get(layer)) is not None and known[0] == state:
        return known[1]
    info, weights = helper.make_tensor_value_info, layer.operands
    graph = helper.make_graph(
        [layer.node("x", list(weights), "out")],
        "linear",
        [info("x", TensorProto.FLOAT, None)],
        [info("out", TensorProto.FLOAT, None)],
        [declared(name, weight) for name, weight in weights.items()],
    )
    session = Session(serialized(graph), weights)
    SESSIONS[layer] = state, session
    return session
