"""Linear layers whose weights are integers of 8 bits, in blocks of 32 with one scale each.

ONNX Runtime multiplies by them as they are stored, and rounds its inputs to 8 bits by blocks too. A
weight is s q with |q| <= 127 and s = max |w| / 127 of its block, so that Q8_0 of llama.cpp comes
back as it was stored. Four bits by rounding alone are not offered: SmolLM2 agreed with itself in
float32 on .65 of all tokens.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.errors import ModelError
from ragspec.registry import for_extra
from ragspec.types import PreTrainedModel

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, TensorProto

BLOCK = 32  # weights of one scale
CENTRE = 128  # stored for 0 in 8 bits
GROUP = 128  # inputs that the runtime's products take at once; the rest costs far more
INT8 = "int8"
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
OPSET, IR_VERSION = 20, 10
PACKAGES = ("onnxruntime", "onnx")
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
        codes: q + 128, u8 [N, K / 32, 32].
        scales: [N, K / 32].
    """

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.in_features, self.out_features = BLOCK * codes.shape[1], len(codes)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> BlockLinear:
        """Return a linear layer with its weights rounded."""
        return cls(*in_blocks(linear.weight.detach()), linear.bias)

    @classmethod
    def joined(cls, layers: Sequence[BlockLinear]) -> BlockLinear:
        """Return the layer whose outputs are those of several, one after the other."""
        codes, scales = (
            torch.cat([getattr(layer, part).detach() for layer in layers])
            for part in ("codes", "scales")
        )
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        return cls(codes, scales, torch.cat(biases) if biases else None)

    def padded(self) -> BlockLinear:
        """Return the layer whose inputs zeros bring to a multiple of `GROUP`."""
        more = -self.in_features % GROUP // BLOCK
        codes = functional.pad(self.codes.detach(), (0, 0, 0, more))  # of scale 0
        return BlockLinear(codes, functional.pad(self.scales.detach(), (0, more)), self.bias)

    def rows(self, index: Tensor) -> BlockLinear:
        """Return the layer of some outputs."""
        bias = None if self.bias is None else self.bias[index]
        return BlockLinear(self.codes[index], self.scales[index], bias)

    @property
    def weight(self) -> Tensor:
        """The weights as floats [N, K]."""
        return block_floats(self.codes, self.scales)

    @property
    def operands(self) -> dict[str, Tensor]:
        """The inputs of `node` beside x, by name."""
        return {"codes": self.codes.detach(), "scales": self.scales.detach()}

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
            bits=8,
            block_size=BLOCK,
            accuracy_level=4,  # inputs in 8 bits
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, [.., K] -> [.., N]."""
        if x.device.type != "cpu" or x.dtype != torch.float32 or missing_package():
            return functional.linear(x, self.weight.to(x.dtype), self.bias)
        inputs = {"x": x.detach().contiguous().numpy()}
        out = torch.from_numpy(_session(self).inner.run(None, inputs)[0])
        return out if self.bias is None else out + self.bias


class BlockEmbedding(nn.Module):
    """The embedding that is tied to an output head in blocks, times a factor."""

    def __init__(self, head: BlockLinear, factor: float = 1.0) -> None:
        super().__init__()
        self.codes, self.scales, self.scalar_embed_scale = head.codes, head.scales, factor

    @property
    def weight(self) -> Tensor:
        """The weights as floats [V, H]."""
        return block_floats(self.codes, self.scales)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, [..] -> [.., H]."""
        return block_floats(self.codes[ids], self.scales[ids]) * self.scalar_embed_scale


def in_blocks(weights: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return weights [N, K] as codes [N, K / 32, 32] and scales [N, K / 32], in a dtype."""
    blocks = weights.reshape(len(weights), -1, BLOCK)
    scales = (blocks.abs().amax(-1) / 127).to(dtype or weights.dtype)
    divisors = torch.where(scales == 0, 1.0, scales.to(weights.dtype))
    codes = (blocks / divisors[..., None]).round().clamp(-127, 127) + CENTRE
    return codes.to(torch.uint8), scales


def block_floats(codes: Tensor, scales: Tensor) -> Tensor:
    """Return weights as floats: codes [.., K / 32, 32] and scales [.., K / 32] -> [.., K]."""
    return ((codes.to(scales.dtype) - CENTRE) * scales[..., None]).flatten(-2)


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with linear weights in 8 bits, and an embedding tied to one of them.

    It is another model with other tokens. Speculative decoding is as exact for it as for any.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
        ModelError: The model cannot be quantized, or lies on an accelerator.
    """
    if model.device.type != "cpu":
        raise ModelError(
            f"got dtype='int8' on {model.device}; expected a CPU. Pass a model to the engine that "
            "transformers has quantized there (quantization_config=)."
        )
    expect_package(missing_package() or PACKAGES[0])
    embedding = model.get_input_embeddings()
    floating = all(each.is_floating_point() for each in model.parameters())
    linears = replace_linears(model) if floating else {}
    if not linears:
        raise ModelError(
            f"{type(model).__name__} cannot be quantized; expected floating weights, and linear "
            f"layers whose inputs are a multiple of {BLOCK}. Leave dtype='int8' out."
        )
    for linear, block in linears.items():
        if linear.weight is embedding.weight:
            scale = getattr(embedding, "embed_scale", 1.0)  # a buffer in Gemma
            factor = float(getattr(embedding, "scalar_embed_scale", scale))
            model.set_input_embeddings(BlockEmbedding(block, factor))
    for weight in model.parameters():
        weight.data = weight.data.clone()  # others lie in the mapped file, which is let go
    return model


def replace_linears(module: nn.Module) -> dict[nn.Linear, BlockLinear]:
    """Store linear layers in blocks where their inputs allow it; return the new ones by the old."""
    linears = {
        name: (linear, BlockLinear.of(linear))
        for name, linear in module.named_modules()
        if type(linear) is nn.Linear and linear.in_features % BLOCK == 0
    }
    for name, (_, block) in linears.items():
        module.set_submodule(name, block)
    return dict(linears.values())


def weights_of(model: nn.Module) -> str:
    """Return what a model's weights are stored in: "int8" or its dtype."""
    blocks = any(isinstance(module, BlockLinear) for module in model.modules())
    return INT8 if blocks else str(model.dtype).removeprefix("torch.")


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
        options.intra_op_num_threads = torch.get_num_threads()
        options.enable_cpu_mem_arena = False
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


def declared(name: str, tensor: Tensor, place: Place = IN_MEMORY) -> TensorProto:
    """Return the declaration of a weight that a `Session` is handed, or that lies in a file."""
    from onnx import TensorProto

    kind = TensorProto.FLOAT if tensor.is_floating_point() else TensorProto.UINT8
    proto = TensorProto(name=name, data_type=kind, dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in place.items():
        proto.external_data.add(key=key, value=value)
    return proto


SESSIONS: WeakKeyDictionary[BlockLinear, tuple[int, Session]] = WeakKeyDictionary()


def _session(layer: BlockLinear) -> Session:
    """Return the session that multiplies by a layer's weights as they are now."""
    from onnx import TensorProto, helper

    version, session = SESSIONS.get(layer, (-1, None))
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
    SESSIONS[layer] = layer.codes._version, session
    return session


def serialized(graph: GraphProto) -> bytes:
    """Return a graph in ONNX's format."""
    from onnx import helper

    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    return bytes(proto.SerializeToString())
