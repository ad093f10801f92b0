"""Linear layers whose weights are integers of 8 or 4 bits, in blocks with one scale each.

ONNX Runtime multiplies by them as they are stored, and rounds its inputs to 8 bits by blocks too.
In 8 bits a weight is s q with |q| <= 127 and s = max |w| / 127 of its block. Blocks of 32 give
weights of llama.cpp's Q8_0 back as they were stored; other models have blocks of 64, which take
less time. An input that is far larger than its neighbours would leave them few of the 255 steps, so
those that a norm returns are evened out first.

In 4 bits a weight is s (q - z) with 0 <= q, z <= 15, in blocks of 32. Rounding alone would spoil
small models. So s and z are those of the least error of the output, inputs are evened out in every
layer, as in AWQ (arXiv 2306.00978), and the output head stays in 8 bits.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.errors import ModelError
from ragspec.models.device import thread_count
from ragspec.registry import for_extra
from ragspec.types import PreTrainedModel

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

BLOCK = 32  # weights of one scale, as in Q8_0
WIDE = 64  # those of other models
CENTRE = 128  # stored for 0 in 8 bits
GROUP = 128  # inputs that the runtime's products take at once; the rest costs far more
INT8, INT4 = SMALL = ("int8", "int4")
SHRINKS = 11  # ranges of a block that are tried in 4 bits, each 4 % less
ROWS = 256  # of weights that are rounded to 4 bits at once, as caches hold them
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
OPSET, IR_VERSION = 20, 10
PACKAGES = ("onnxruntime", "onnx")
Group = tuple[Tensor, list[nn.Linear]]  # inputs [.., K], and the layers that read them
Place = Mapping[str, str]  # the external data of a weight in ONNX's format
IN_MEMORY: Place = MappingProxyType({"location": "memory"})
SETTINGS = (
    "ORT_DISABLE_TELEMETRY",  # releases from 1.29 on upload figures of use by default
    "ORT_GQA_DISABLE_FLASH_ATTENTION",  # from 1.28 on, its bits differ with the width of a forward
)


def missing_package() -> str:
    """Return a package of ONNX Runtime that is not installed, "" for none."""
    return next((name for name in PACKAGES if find_spec(name) is None), "")


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
        codes, scales = (
            torch.cat([getattr(layer, part).detach() for layer in layers])
            for part in ("codes", "scales")
        )
        zeros = [layer.zeros.detach() for layer in layers if layer.zeros is not None]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        centres, bias = (torch.cat(each) if each else None for each in (zeros, biases))
        return cls(codes, scales, centres, bias, layers[0].factors)

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


def quantized(model: PreTrainedModel, dtype: str = INT8) -> PreTrainedModel:
    """Return the model with linear weights in 8 or 4 bits, and an embedding tied to one of them.

    It is another model with other tokens. Speculative decoding is as exact for it as for any.

    Args:
        dtype: One of `SMALL`.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelError: The model cannot be quantized, or lies on an accelerator.
    """
    if model.device.type != "cpu":
        raise ModelError(
            f"got dtype={dtype!r} on {model.device}; expected a CPU. Pass a model to the engine "
            "that transformers has quantized there (quantization_config=)."
        )
    expect_package(missing_package() or PACKAGES[0])
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    floating, groups = all(each.is_floating_point() for each in model.parameters()), list[Group]()
    every = [each for each in model.modules() if floating and _fits(each)]
    wider = head, *(x for x in every if x.weight is embedding.weight)
    small = {x for x in every if dtype == INT4 and x not in wider}
    wide = {x for x in every if x not in small and _fits(x, WIDE)}
    wide = {x for x in wide if not torch.equal(BlockLinear.of(x).weight, x.weight)}  # off the grid
    try:
        groups = input_groups(model, dtype == INT4) if wide or small else []
    except Exception:  # its forward asks for other inputs; small blocks bear inputs as they are
        wide = set()
    factors = input_factors(groups, wide | small, 0.3 if small else 0.5)
    sizes = {each: x.float().square().flatten(0, -2).mean(0) for x, of in groups for each in of}

    def store(linear: nn.Linear) -> BlockLinear:
        block, shape = WIDE if linear in wide else BLOCK, linear.in_features
        measured = sizes.get(linear, torch.ones(shape)) if linear in small else None
        return BlockLinear.of(linear, block, factors.get(linear), measured)

    linears = replace_linears(model, store) if small or (every and dtype == INT8) else {}
    if not linears:
        layers = model.named_modules() if floating else ()
        odd = (f"{n} with {x.in_features}" for n, x in layers if _fits(x, 1) and not _fits(x))
        raise ModelError(
            f"{type(model).__name__} cannot be quantized; expected floating weights, and linear "
            f"layers whose inputs are a multiple of {BLOCK}, got "
            f"{next(odd, 'none of these')}. Leave dtype={dtype!r} out."
        )
    for linear, block in linears.items():
        if linear.weight is embedding.weight:
            scale = getattr(embedding, "embed_scale", 1.0)  # a buffer in Gemma
            factor = float(getattr(embedding, "scalar_embed_scale", scale))
            model.set_input_embeddings(BlockEmbedding(block, factor))
    for weight in model.parameters():
        weight.data = weight.data.clone()  # others lie in the mapped file, which is let go
    return model


def input_factors(
    groups: Iterable[Group], linears: Container[nn.Linear], alpha: float
) -> dict[nn.Linear, Tensor]:
    """Return powers of two that even out the inputs of linear layers, [K] each.

    The mean sizes of inputs and weights are brought together, as in SmoothQuant (arXiv 2211.10438).
    Powers of two commute with rounding, so that a norm's own weight may have them. The layers of a
    group share them.
    """
    factors = dict[nn.Linear, Tensor]()
    for inputs, readers in groups:
        if readers and all(each in linears for each in readers):
            weights = torch.cat([each.weight.detach() for each in readers]).float()
            ratio = weights.square().mean(0).sqrt() / inputs.float().abs().flatten(0, -2).mean(0)
            exponents = ratio.nan_to_num(1.0).clamp(1e-8, 1e8).log2()  # a dead channel has 0 / 0
            evened = exponents.mul(alpha).round().exp2().to(inputs.dtype)
            factors |= dict.fromkeys(readers, evened)
    return factors


def input_groups(model: PreTrainedModel, every: bool) -> list[Group]:
    """Return what norms return for some random tokens, and the linear layers that read it.

    Args:
        every: Return all other inputs of linear layers, too.
    """
    vocab_size, seed = len(model.get_input_embeddings().weight), torch.Generator().manual_seed(0)
    most = 256 if every else 64
    length = min(most, getattr(model.config, "max_position_embeddings", None) or most)
    ids = torch.randint(vocab_size, (1, length), generator=seed, device="cpu")
    training = [each for each in model.modules() if each.training]
    try:
        return [*_listened(model.eval(), ids, every)]
    finally:
        for module in training:
            module.training = True


def _listened(model: PreTrainedModel, ids: Tensor, every: bool) -> Iterable[Group]:
    groups = dict[int, Group]()  # by address, which views share
    recall = groups.setdefault if every else groups.get

    def note(_norm: nn.Module, _args: object, out: object) -> None:
        if isinstance(out, Tensor):
            groups[out.data_ptr()] = out, []

    def read(linear: nn.Linear, args: tuple[Tensor, ...]) -> None:
        for x in args:
            inputs, readers = recall(x.data_ptr(), (x if every else x[..., :0], []))
            if x.numel() and x.shape[-1] == inputs.shape[-1]:  # not by heads; idle experts get none
                readers.append(linear)

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            if type(module) is nn.Linear:
                hooks.enter_context(module.register_forward_pre_hook(read))
            elif getattr(getattr(module, "weight", None), "ndim", 0) == 1:
                hooks.enter_context(module.register_forward_hook(note))
        model(input_ids=ids, use_cache=False)
    return groups.values()


def replace_linears(
    module: nn.Module, store: Callable[[nn.Linear], BlockLinear] = BlockLinear.of
) -> dict[nn.Linear, BlockLinear]:
    """Store linear layers in blocks where their inputs allow it; return the new ones by the old."""
    linears = {
        name: (linear, store(linear)) for name, linear in module.named_modules() if _fits(linear)
    }
    for name, (_, block) in linears.items():
        module.set_submodule(name, block)
    return dict(linears.values())


def _fits(module: nn.Module, block: int = BLOCK) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer whose inputs are so many whole blocks."""
    return type(module) is nn.Linear and module.in_features % block == 0


def weights_of(model: nn.Module) -> str:
    """Return what a model's weights are stored in: "int8", "int4" or its dtype."""
    bits = {module.bits for module in model.modules() if isinstance(module, BlockLinear)}
    return f"int{min(bits)}" if bits else str(model.dtype).removeprefix("torch.")


def count_weights(model: PreTrainedModel) -> int:
    """Return the number of a model's weights, also where a byte holds two."""
    blocks = [each for each in model.modules() if isinstance(each, BlockLinear)]
    return int(model.num_parameters()) + sum(x.codes.numel() for x in blocks if x.bits == 4)


LEAST = 100_000_000  # weights of a model that `stored_small` quantizes


def stored_small(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model in 8 bits if it is large and in float32 on a CPU."""
    weights = [*model.parameters()]
    unfit = (
        sum(each.numel() for each in weights) < LEAST
        or any(each.device.type != "cpu" or each.dtype != torch.float32 for each in weights)
        or missing_package()
    )
    return model if unfit else quantized(model)


def expect_package(package: str) -> None:
    """Raise MissingExtraError, which names the extra, unless a package is installed."""
    if find_spec(package) is None:
        raise for_extra(ModuleNotFoundError(name=package))


def onnx_runtime() -> ModuleType:
    """Return the package onnxruntime, without telemetry and with equal bits in all widths."""
    for name in SETTINGS:
        os.environ.setdefault(name, "1")
    return importlib.import_module("onnxruntime")


class Session:
    """A graph of ONNX Runtime over weights in memory.

    Args:
        proto: The graph, in ONNX's format, or the file of one with its weights in files beside it.
        weights: Its external weights by name, contiguous and on the CPU.
        save: Where the graph is written, and its weights as the runtime packs them beside it.
    """

    def __init__(
        self,
        proto: bytes | str,
        weights: Mapping[str, Tensor] = MappingProxyType({}),
        save: Path | None = None,
    ) -> None:
        runtime = onnx_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = thread_count()
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False  # it holds one for every size of inputs, and takes time
        # Its threads wait busily within a run; after it they would slow torch and other sessions.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.value: Callable[[Any], Any] = runtime.OrtValue.ortvalue_from_numpy
        self._held = [self.value(weight.numpy()) for weight in weights.values()]  # read in place
        if weights:
            options.add_external_initializers(list(weights), self._held)
        if save is not None:
            options.optimized_model_filepath = str(save)
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            name = "session.optimized_model_external_initializers_file_name"
            options.add_session_config_entry(name, f"{save.stem}.bin")
            name = "session.save_external_prepacked_constant_initializers"
            options.add_session_config_entry(name, "1")
        self.inner = runtime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def declared(name: str, tensor: Tensor, place: Place | None = None) -> TensorProto:
    """Return the declaration of a weight that a `Session` is handed, or that lies in a file."""
    from onnx import TensorProto

    kind = TensorProto.FLOAT if tensor.is_floating_point() else TensorProto.UINT8
    proto = TensorProto(name=name, data_type=kind, dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (place or IN_MEMORY).items():
        proto.external_data.add(key=key, value=value)
    return proto


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


def serialized(graph: GraphProto) -> bytes:
    """Return a graph in ONNX's format."""
    from onnx import helper

    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(proto.SerializeToString())
