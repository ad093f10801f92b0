"""Linear layers whose weights are integers of 8 or 4 bits, in blocks of 32 with one scale each.

ONNX Runtime multiplies by them as they are stored, and rounds its inputs to 8 bits by blocks too. A
weight in 8 bits is s q with |q| <= 127 and s = max |w| / 127 of its block: Q8_0 of llama.cpp comes
back as it was stored. One in 4 bits is s (q - z) with 0 <= q <= 15 and a whole zero z.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.errors import ModelError
from ragspec.registry import for_extra

BLOCK = 32  # weights of one scale
CENTRE = 128  # stored for 0 in 8 bits
BITS = {"int8": 8, "int4": 4}
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
OPSET, IR_VERSION = 20, 10
PACKAGES = ("onnxruntime", "onnx")
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"  # releases from 1.29 on upload figures of use by default


def onnx_runtime() -> Any:
    """Return the module of ONNX Runtime, which sends nothing."""
    os.environ.setdefault(NO_TELEMETRY, "1")
    return importlib.import_module("onnxruntime")


def missing_packages() -> str:
    """Return the packages of ONNX Runtime that are not installed, and what to do; "" for none."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    return f"{' and '.join(missing)} is not installed (pip install 'ragspec[onnx]')" * bool(missing)


class BlockLinear(nn.Module):
    """A linear layer over the integers of another one's weights [N, K].

    On a CPU it runs on ONNX Runtime. Elsewhere the weights are made floats for every call.

    Attributes:
        bits: Of an integer, 8 or 4.
        codes: u8 [N, K / 32, 4 bits], of two integers of 4 bits in a byte the first one low.
        scales: [N, K / 32].
        zeros: u8 [N, ceil(K / 64)] in 4 bits, packed as the codes are; None in 8 bits, for 128.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        self.bits, self.bias = bits, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        parts = (_in_8_bits if bits == 8 else _in_4_bits)(linear.weight.detach())
        for name, part in zip(("codes", "scales", "zeros"), parts, strict=True):
            held = None if part is None else nn.Parameter(part, requires_grad=False)
            self.register_parameter(name, held)

    @property
    def weight(self) -> Tensor:
        """The weights as floats [N, K]."""
        return self.rows(slice(None))

    @property
    def operands(self) -> dict[str, Tensor]:
        """The inputs of `node` beside x, by name."""
        parts = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}
        return {name: part.detach() for name, part in parts.items() if part is not None}

    def rows(self, rows: Tensor | slice) -> Tensor:
        """Return rows of the weights as floats [.., K]."""
        codes, scales = self.codes[rows], self.scales[rows]
        if self.zeros is None:
            whole = codes.to(scales.dtype) - CENTRE
        else:
            zeros = _unpacked(self.zeros[rows])[..., : scales.shape[-1], None]
            whole = _unpacked(codes).to(scales.dtype) - zeros
        return (whole * scales[..., None]).flatten(-2)

    def node(self, x: str, operands: list[str], name: str) -> Any:
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
            block_size=BLOCK,
            accuracy_level=4,  # inputs in 8 bits
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [.., K] -> [.., N]."""
        if x.device.type != "cpu" or x.dtype != torch.float32 or missing_packages():
            return functional.linear(x, self.weight.to(x.dtype), self.bias)
        inputs = {"x": x.detach().contiguous().numpy()}
        out = torch.from_numpy(_session(self).inner.run(None, inputs)[0])
        return out if self.bias is None else out + self.bias


class BlockEmbedding(nn.Module):
    """The embedding that is tied to an output head in blocks."""

    def __init__(self, head: BlockLinear) -> None:
        super().__init__()
        self._head = [head]  # in a list, so that its weights are counted once

    @property
    def weight(self) -> Tensor:
        """The weights as floats [V, H]."""
        return self._head[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, [..] -> [.., H]."""
        return self._head[0].rows(ids)


def quantized(model: Any, how: str) -> Any:
    """Return the model with quantized linear weights, and an embedding tied to one of them.

    It is another model with other tokens. Speculative decoding is as exact for it as for any.

    Args:
        how: "int8", a quarter of the memory of float32; or "int4". The output head has 8 bits in any
            case, as it bears fewer badly.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelError: The model cannot be quantized, or lies on an accelerator.
    """
    if model.device.type != "cpu":
        raise ModelError(
            f"got dtype={how!r} on {model.device}; expected a CPU. Pass a model to the engine that "
            "transformers has quantized there (quantization_config=)."
        )
    for package in PACKAGES:
        expect_package(package)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module.in_features % BLOCK == 0
    ]
    if not names or any(not each.is_floating_point() for each in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} cannot be quantized; expected floating weights, and linear "
            f"layers whose inputs are a multiple of {BLOCK}. Leave dtype={how!r} out."
        )
    for name in names:
        linear = model.get_submodule(name)
        block = BlockLinear(linear, 8 if linear is head else BITS[how])
        model.set_submodule(name, block)
        if linear.weight is embedding.weight:
            model.set_input_embeddings(BlockEmbedding(block))
    for weight in model.parameters():
        weight.data = weight.data.clone()  # others lie in the mapped file, which is let go
    return model


def weights_of(model: nn.Module) -> str:
    """Return what a model's weights are stored in: "int8", "int4" or its dtype."""
    bits = [module.bits for module in model.modules() if isinstance(module, BlockLinear)]
    return f"int{min(bits)}" if bits else str(model.dtype).removeprefix("torch.")


LEAST = 100_000_000  # weights of a model that `stored_small` quantizes
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # with a graph in `verification.onnx`


def stored_small(model: Any) -> Any:
    """Return a model in 8 bits if it is large, in float32 on a CPU and of a family with a graph."""
    weights = [*model.parameters()]
    small = (
        model.config.model_type not in FAMILIES
        or sum(each.numel() for each in weights) < LEAST
        or any(each.device.type != "cpu" or each.dtype != torch.float32 for each in weights)
        or missing_packages()
    )
    return model if small else quantized(model, "int8")


def expect_package(package: str) -> None:
    """Raise MissingExtraError, which names the extra, unless a package is installed."""
    if find_spec(package) is None:
        raise for_extra(ModuleNotFoundError(name=package))


class Session:
    """A graph of ONNX Runtime over weights in memory.

    Args:
        proto: The graph, in ONNX's format.
        weights: Its external weights by name, contiguous and on the CPU.
    """

    def __init__(self, proto: bytes, weights: Mapping[str, Tensor]) -> None:
        runtime = onnx_runtime()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.enable_cpu_mem_arena = False
        self.value: Callable[[Any], Any] = runtime.OrtValue.ortvalue_from_numpy
        self._held = [self.value(weight.numpy()) for weight in weights.values()]  # read in place
        options.add_external_initializers(list(weights), self._held)
        self.inner = runtime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def declared(name: str, tensor: Tensor) -> Any:
    """Return the declaration of a weight that a `Session` is handed."""
    from onnx import TensorProto

    kind = TensorProto.FLOAT if tensor.is_floating_point() else TensorProto.UINT8
    proto = TensorProto(name=name, data_type=kind, dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    proto.external_data.add(key="location", value="memory")
    return proto


_SESSIONS: WeakKeyDictionary[BlockLinear, tuple[int, Session]] = WeakKeyDictionary()


def forget_sessions() -> None:
    """Free the sessions of single layers; the next product opens the one that it needs."""
    _SESSIONS.clear()


def _session(layer: BlockLinear) -> Session:
    """Return the session that multiplies by a layer's weights as they are now."""
    from onnx import TensorProto, helper

    version, session = _SESSIONS.get(layer, (-1, None))
    if session is not None and version == layer.codes._version:
        return session
    info, weights = helper.make_tensor_value_info, layer.operands
    graph = helper.make_graph(
        [layer.node("x", list(weights), "out")],
        "linear",
        [info("x", TensorProto.FLOAT, None)],
        [info("out", TensorProto.FLOAT, None)],
        [declared(name, weight) for name, weight in weights.items()],
    )
    session = Session(serialized(graph), weights)
    _SESSIONS[layer] = layer.codes._version, session
    return session


def serialized(graph: Any) -> bytes:
    """Return a graph in ONNX's format."""
    from onnx import helper

    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(proto.SerializeToString())


def _in_8_bits(weight: Tensor) -> tuple[Tensor, Tensor, None]:
    blocks = weight.reshape(len(weight), -1, BLOCK)
    scales = blocks.abs().amax(-1) / 127
    codes = (blocks / _divisor(scales)).round() + CENTRE
    return codes.to(torch.uint8), scales, None


def _in_4_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks = weight.reshape(len(weight), -1, BLOCK)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / _divisor(scales)[..., 0]).round()
    codes = (blocks / _divisor(scales)).round() + zeros[..., None]
    return _packed(codes.clamp(0, 15)), scales, _packed(zeros)


def _divisor(scales: Tensor) -> Tensor:
    """Return the scales by which blocks are divided; those of empty blocks are 1."""
    return torch.where(scales == 0, 1.0, scales)[..., None]


def _packed(whole: Tensor) -> Tensor:
    """Return integers of 4 bits in pairs, [.., n] -> u8 [.., ceil(n / 2)]."""
    whole = functional.pad(whole.to(torch.uint8), (0, whole.shape[-1] % 2))
    return whole[..., 0::2] | (whole[..., 1::2] << 4)


def _unpacked(pairs: Tensor) -> Tensor:
    """Return the integers of 4 bits of pairs, u8 [.., n] -> u8 [.., 2 n]."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
