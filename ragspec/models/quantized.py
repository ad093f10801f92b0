"""Linear layers whose weights are integers of 8 bits, in blocks with one scale each.

ONNX Runtime multiplies by them as they are stored, and rounds its inputs to 8 bits by blocks too. A
weight is s q with |q| <= 127 and s = max |w| / 127 of its block. Blocks of 32 give weights of
llama.cpp's Q8_0 back as they were stored; other models have blocks of 64, which take less time. An
input that is far larger than its neighbours would leave them few of the 255 steps, so those that a
norm returns are evened out first. Four bits by rounding alone are not offered: SmolLM2 agreed with
itself in float32 on .65 of all tokens.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

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
        codes: q + 128, u8 [N, K / B, B].
        scales: [N, K / B].
        factors: Powers of two by which inputs are multiplied first, [K]; None for 1.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = codes[0].numel(), len(codes)
        self.codes, self.scales = (nn.Parameter(x, requires_grad=False) for x in (codes, scales))
        self.bias, self.factors = (
            None if x is None else nn.Parameter(x, requires_grad=False) for x in (bias, factors)
        )

    @classmethod
    def of(
        cls, linear: nn.Linear, block: int = BLOCK, factors: Tensor | None = None
    ) -> BlockLinear:
        """Return a linear layer with its weights rounded."""
        weight = linear.weight.detach()
        weight = weight if factors is None else weight / factors
        return cls(*in_blocks(weight, block), linear.bias, factors)

    @classmethod
    def joined(cls, layers: Sequence[BlockLinear]) -> BlockLinear:
        """Return the layer whose outputs are those of several, one after the other."""
        codes, scales = (
            torch.cat([getattr(layer, part).detach() for layer in layers])
            for part in ("codes", "scales")
        )
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        return cls(codes, scales, torch.cat(biases) if biases else None, layers[0].factors)

    def padded(self) -> BlockLinear:
        """Return the layer whose inputs, by its factors, zeros bring to a multiple of `GROUP`."""
        more = -self.in_features % GROUP // self.codes.shape[2]
        codes = functional.pad(self.codes.detach(), (0, 0, 0, more))  # of scale 0
        return BlockLinear(codes, functional.pad(self.scales.detach(), (0, more)), self.bias)

    def rows(self, index: Tensor) -> BlockLinear:
        """Return the layer of some outputs."""
        bias = None if self.bias is None else self.bias[index]
        return BlockLinear(self.codes[index], self.scales[index], bias, self.factors)

    @property
    def weight(self) -> Tensor:
        """The weights as floats [N, K]."""
        return block_floats(self.codes, self.scales, self.factors)

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
            block_size=self.codes.shape[2],
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


def block_floats(codes: Tensor, scales: Tensor, factors: Tensor | None = None) -> Tensor:
    """Return weights as floats: codes [.., K / B, B] and scales [.., K / B] -> [.., K]."""
    weights = ((codes.to(scales.dtype) - CENTRE) * scales[..., None]).flatten(-2)
    return weights if factors is None else weights * factors


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
    wide = {each for each in model.modules() if floating and _fits(each, WIDE) and _off_grid(each)}
    try:
        factors = input_factors(model, wide) if wide else {}
    except Exception:  # its forward asks for other inputs; small blocks bear inputs as they are
        wide, factors = set(), {}

    def store(linear: nn.Linear) -> BlockLinear:
        return BlockLinear.of(linear, WIDE if linear in wide else BLOCK, factors.get(linear))

    linears = replace_linears(model, store) if floating else {}
    if not linears:
        layers = model.named_modules() if floating else ()
        odd = (f"{n} with {x.in_features}" for n, x in layers if type(x) is nn.Linear)
        raise ModelError(
            f"{type(model).__name__} cannot be quantized; expected floating weights, and linear "
            f"layers whose inputs are a multiple of {BLOCK}, got "
            f"{next(odd, 'none of these')}. Leave dtype='int8' out."
        )
    for linear, block in linears.items():
        if linear.weight is embedding.weight:
            scale = getattr(embedding, "embed_scale", 1.0)  # a buffer in Gemma
            factor = float(getattr(embedding, "scalar_embed_scale", scale))
            model.set_input_embeddings(BlockEmbedding(block, factor))
    for weight in model.parameters():
        weight.data = weight.data.clone()  # others lie in the mapped file, which is let go
    return model


def input_factors(model: PreTrainedModel, linears: Container[nn.Linear]) -> dict[nn.Linear, Tensor]:
    """Return powers of two that even out what linear layers read from a norm, [K] each.

    The mean sizes of both for some random tokens are brought together, as in SmoothQuant with an
    alpha of 1/2 (arXiv 2211.10438). Powers of two commute with rounding, so that a norm's own
    weight may have them. The layers that read a norm share them.
    """
    vocab_size, seed = len(model.get_input_embeddings().weight), torch.Generator().manual_seed(0)
    length = min(64, getattr(model.config, "max_position_embeddings", None) or 64)
    ids = torch.randint(vocab_size, (1, length), generator=seed, device="cpu")
    training = [each for each in model.modules() if each.training]
    try:
        heard = _readers_of_norms(model.eval(), ids)
    finally:
        for module in training:
            module.training = True
    factors = dict[nn.Linear, Tensor]()
    for out, readers in heard:
        if readers and all(each in linears for each in readers):
            weights = torch.cat([each.weight.detach() for each in readers]).float()
            ratio = weights.square().mean(0).sqrt() / out.float().abs().flatten(0, -2).mean(0)
            ratio = ratio.nan_to_num(1.0).clamp(1e-8, 1e8)  # a dead channel has 0 / 0
            factors |= dict.fromkeys(readers, ratio.log2().div(2).round().exp2().to(out.dtype))
    return factors


def _readers_of_norms(
    model: PreTrainedModel, ids: Tensor
) -> Iterable[tuple[Tensor, list[nn.Linear]]]:
    """Return what each norm returns for some tokens, and the linear layers that read it."""
    normed = dict[int, tuple[Tensor, list[nn.Linear]]]()  # by address, which views share

    def note(_norm: nn.Module, _args: object, out: object) -> None:
        if isinstance(out, Tensor):
            normed[out.data_ptr()] = out, []

    def read(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        for x in args:
            out, readers = normed.get(x.data_ptr(), (x[..., :0], []))
            if isinstance(linear, nn.Linear) and x.shape[-1] == out.shape[-1]:  # not by heads
                readers.append(linear)

    hooks = list[RemovableHandle]()
    for module in model.modules():
        if type(module) is nn.Linear:
            hooks.append(module.register_forward_pre_hook(read))
        elif getattr(getattr(module, "weight", None), "ndim", 0) == 1:
            hooks.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return normed.values()


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


def _off_grid(linear: nn.Linear) -> bool:
    """Return whether blocks of 32 change a layer's weights."""
    return not torch.equal(BlockLinear.of(linear).weight, linear.weight)


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


def declared(name: str, tensor: Tensor, place: Place = IN_MEMORY) -> TensorProto:
    """Return the declaration of a weight that a `Session` is handed, or that lies in a file."""
    from onnx import TensorProto

    kind = TensorProto.FLOAT if tensor.is_floating_point() else TensorProto.UINT8
    proto = TensorProto(name=name, data_type=kind, dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in place.items():
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
