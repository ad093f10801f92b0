"""A Llama-like model as one ONNX graph over its own weights.

The operators are those into which ONNX Runtime fuses such a model: GroupQueryAttention, which turns
queries and keys and extends a cache in place, SkipSimplifiedLayerNormalization, and products with
weights as torch stores them. A tree is verified by a bias on its scores.

The operator reads a head of keys anew for each of its heads of queries. For few positions a folded
one has as many heads of queries as of keys: the rest are further rows, whose slots nobody sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor, nn

from ragspec.models.block_linear import GROUP, BlockLinear
from ragspec.models.onnx_session import MICROSOFT, Place, declared, serialized
from ragspec.types import PreTrainedConfig, PreTrainedModel
from ragspec.verification.onnx.form import FOLDED, TABLES, ModelForm
from ragspec.verification.reading import usual_taps

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm


@dataclass(slots=True)
class Graph:
    """Nodes and weights of a graph.

    Attributes:
        plain: The attention operators of each layer for any positions, one for each sequence of a
            forward; the tokens of sequences follow each other.
        folded: Those for few positions.
        trees: Whether a bias is added to the scores of each sequence, another one under a window.
        folds: Heads of queries of a head of keys, which folded operators have as rows.
        form: The form of the model.
        weights: Tensors by name: the model's own, joined ones, and small constants.
        evened: Outputs of norms whose weights have the factors of those that read them.
    """

    plain: Sequence[str] = ("0",)
    folded: Sequence[str] = ()
    trees: bool = True
    folds: int = 1
    form: ModelForm = field(default_factory=ModelForm)
    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evened: set[str] = field(default_factory=set)

    def add(self, kind: str, inputs: Sequence[str], *outputs: str, **attributes: object) -> str:
        """Add a node of ONNX; return its first output."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, **attributes))
        return outputs[0]

    def weight(self, name: str, tensor: Tensor) -> str:
        """Add a weight, which is not copied."""
        self.weights[name] = tensor.detach()
        return name

    def floating(self) -> dict[str, Tensor]:
        """Return the weights that a `Session` is handed."""
        weights = self.weights.items()
        return {name: each.contiguous() for name, each in weights if each.dtype != torch.int64}

    def linear(self, name: str, x: str, module: nn.Linear | BlockLinear, out: str = "") -> str:
        """Add a linear layer, [.., K] -> [.., N]; `out` names its output, if not `name`."""
        out = out or name
        if isinstance(module, BlockLinear):
            if module.factors is not None and x not in self.evened:
                factors = self.weight(f"{name}.factors", module.factors)
                x = self.add("Mul", [x, factors], f"{name}.evened")
            more = -module.in_features % GROUP
            if more and name != "logits":  # whose codes may be those of the embedding
                x, module = self.pad(x, more), module.padded()
            self.nodes.append(module.node(x, self.operands(name, module), out))
        else:
            weight = self.weight(f"{name}.weight", module.weight)
            self.add("FusedMatMul", [x, weight], out, domain=MICROSOFT, transB=1)
        if module.bias is None:
            return out
        return self.add("Add", [out, self.weight(f"{name}.bias", module.bias)], f"{name}.biased")

    def pad(self, x: str, more: int) -> str:
        """Append zeros to the last axis, once for all layers that read them."""
        name = f"{x}.padded"
        if not any(name in node.output for node in self.nodes):
            pads = self.weight(f"pads.{more}", torch.tensor([0, 0, 0, 0, 0, more]))
            self.add("Pad", [x, pads], name)
        return name

    def operands(self, name: str, module: BlockLinear) -> list[str]:
        """Add codes and scales of a layer in blocks."""
        return [self.weight(f"{name}.{part}", each) for part, each in module.operands.items()]

    def embedding(self, module: nn.Embedding, head: nn.Module) -> str:
        """Add the rows of the ids, [1, S] -> [1, S, H]."""
        if not isinstance(head, BlockLinear) or isinstance(module, nn.Embedding):
            return self.add("Gather", [self.weight("embedding", module.weight), "ids"], "x")
        codes = self.weight("embedding.codes", head.codes.flatten(1))
        _, scales = self.operands("logits", head)
        how = {"bits": 8, "block_size": head.codes.shape[2], "quantize_axis": 1, "gather_axis": 0}
        x = self.add("GatherBlockQuantized", [codes, "ids", scales], "x", domain=MICROSOFT, **how)
        if head.factors is None:
            return x
        return self.add("Mul", [x, self.weight("logits.factors", head.factors)], "x.evened")

    def norm(self, name: str, x: str, norm: LlamaRMSNorm, readers: Sequence[nn.Module] = ()) -> str:
        """Normalise the last axis by its root mean square."""
        weight, epsilon = self.gain(name, norm, readers)
        kind = "SimplifiedLayerNormalization"
        return self.add(kind, [x, weight], name, axis=-1, epsilon=epsilon, stash_type=1)

    def gain(
        self, name: str, norm: LlamaRMSNorm, readers: Sequence[nn.Module]
    ) -> tuple[str, float]:
        """Add a norm's weight, with the factors of what reads it; return it and the epsilon."""
        gemma = not hasattr(norm, "variance_epsilon")
        weight = 1.0 + norm.weight if gemma else norm.weight
        shared: list[Any] = [getattr(each, "factors", None) for each in readers]
        if shared and all(x is not None and torch.equal(x, shared[0]) for x in shared):
            weight = weight * shared[0]
            self.evened.add(name)
        epsilon = norm.eps if gemma else norm.variance_epsilon
        return self.weight(f"{name}.weight", weight), float(epsilon)

    def scaled(self, x: str, factor: float) -> str:
        """Multiply by a factor, unless it is 1."""
        if factor == 1.0:
            return x
        weight = self.weight(f"{x}.factor", torch.tensor(factor, dtype=torch.float32))
        return self.add("Mul", [x, weight], f"{x}.scaled")

    def skip_norm(
        self, name: str, x: str, more: str, norm: LlamaRMSNorm, readers: Sequence[nn.Module] = ()
    ) -> tuple[str, str]:
        """Add `more` to `x`; return the normalised sum and the sum."""
        weight, epsilon = self.gain(name, norm, readers)
        kind, outputs = "SkipSimplifiedLayerNormalization", (name, "", "", f"{name}.sum")
        self.add(kind, [x, more, weight], *outputs, domain=MICROSOFT, epsilon=epsilon)
        return name, outputs[3]

    def head_norm(self, name: str, x: str, norm: LlamaRMSNorm, width: int) -> str:
        """Normalise each head of a projection."""
        split = self.weight(f"{name}.split", torch.tensor([0, 0, -1, width]))
        flat = self.weight(f"{name}.flat", torch.tensor([0, 0, -1]))
        heads = self.norm(name, self.add("Reshape", [x, split], f"{name}.heads"), norm)
        return self.add("Reshape", [heads, flat], f"{name}.rows")

    def attention(self, i: int, h: str, module: LlamaAttention, config: PreTrainedConfig) -> str:
        """Add the attention of layer i; each sequence attends by an operator of its own."""
        name, width, groups = f"layer{i}", module.head_dim, config.num_key_value_heads
        each, parts = self.projections(name, h, module), list[str]()
        if hasattr(module, "q_norm"):  # Qwen 3, Gemma 3
            for number, (part, norm) in enumerate((("q", module.q_norm), ("k", module.k_norm))):
                each[number] = self.head_norm(f"{name}.{part}.norm", each[number], norm, width)
        for at in self.plain:
            rows = [self.add("Gather", [x, f"attend.{at}"], f"{x}.{at}", axis=1) for x in each]
            parts.append(self.attend(i, at, rows, module, (config.num_attention_heads, groups)))
        if self.folded:
            both = self.joined(each, f"{name}.joined", -1)
            every = self.pick(both, "fold", f"{name}.fold", 3 * groups, width)
            inputs = [every]
            if len(self.folded) > 1:
                inputs = [f"{every}.{at}" for at in self.folded]
                self.add("Split", [every, "sizes"], *inputs, axis=1)
            pairs, heads = zip(self.folded, inputs, strict=True), (groups, groups)
            outputs = [self.attend(i, at, [rows], module, heads) for at, rows in pairs]
            out = self.joined(outputs, f"{name}.folded")
            parts.append(self.pick(out, "unfold", f"{name}.unfold", groups * self.folds, width))
        out = self.joined(parts, f"{name}.every")
        if self.plain:
            out = self.add("Gather", [out, "back"], f"{name}.back", axis=1)
        return self.linear(f"{name}.o", out, module.o_proj)

    def attend(
        self, i: int, at: str, rows: Sequence[str], module: LlamaAttention, heads: tuple[int, int]
    ) -> str:
        """Add an operator of layer i over a sequence's rows, with heads of queries and keys."""
        window, kind = self.form.windows[i], self.form.tables[i]
        biased, out = self.trees or at in self.folded, f"layer{i}.attention.{at}"
        caches = f"key{i}.{at}", f"value{i}.{at}"
        places = [f"last.{at}", f"total.{at}", f"cosines{kind}", f"sines{kind}"]
        places += [f"positions.{at}", *[f"{'narrow' if window else 'bias'}.{at}"] * biased]
        return self.add(
            "GroupQueryAttention",
            [*rows, *[""] * (3 - len(rows)), *caches, *places],
            out,
            *(f"{cache}.out" for cache in caches),
            domain=MICROSOFT,
            num_heads=heads[0],
            kv_num_heads=heads[1],
            scale=float(module.scaling),
            softcap=self.form.softcap,
            local_window_size=-1 if biased or not window else window,
            do_rotary=1,
        )

    def joined(self, parts: Sequence[str], name: str, axis: int = 1) -> str:
        """Return the tensors, one after the other."""
        return parts[0] if len(parts) == 1 else self.add("Concat", parts, name, axis=axis)

    def pick(self, x: str, places: str, name: str, heads: int, width: int) -> str:
        """Return rows of so many heads, which have these places among all of x; see `folding`."""
        split = self.weight("heads", torch.tensor([-1, width]))
        flat = self.weight(f"rows.{heads}", torch.tensor([1, -1, heads * width]))
        every = self.add("Reshape", [x, split], f"{name}.split")
        rows = self.add("Gather", [every, places], f"{name}.heads")
        return self.add("Reshape", [rows, flat], name)

    def projections(self, name: str, h: str, module: LlamaAttention) -> list[str]:
        """Add queries, keys and values, side by side as the operator takes them if they may be."""
        if hasattr(module, "qkv_proj"):  # Phi 3
            return [self.linear(f"{name}.qkv", h, module.qkv_proj)]
        linears = [getattr(module, f"{part}_proj") for part in "qkv"]
        blocks = [x for x in linears if isinstance(x, BlockLinear)]
        kinds = {(x.codes.shape[2], x.bias is None) for x in blocks}
        same = len(blocks) == len(linears) and len(kinds) == 1 and not hasattr(module, "q_norm")
        if same and (h in self.evened or all(x.factors is None for x in blocks)):
            return [self.linear(f"{name}.qkv", h, BlockLinear.joined(blocks))]
        return [self.linear(f"{name}.{p}", h, x) for p, x in zip("qkv", linears, strict=True)]

    def feed_forward(self, name: str, h: str, module: LlamaMLP) -> str:
        """Add a gated feed-forward layer with SiLU, or GELU as Gemma has it."""
        if hasattr(module, "gate_up_proj"):  # Phi 3
            both, up = self.linear(f"{name}.both", h, module.gate_up_proj), f"{name}.up"
            gate = self.add("Split", [both], f"{name}.gate", up, axis=-1, num_outputs=2)
        else:
            gate = self.linear(f"{name}.gate", h, module.gate_proj)
            up = self.linear(f"{name}.up", h, module.up_proj)
        if self.form.activation == "silu":
            act = self.add("QuickGelu", [gate], f"{name}.silu", domain=MICROSOFT, alpha=1.0)
        else:
            act = self.add("Gelu", [gate], f"{name}.gelu", approximate="tanh")
        product = self.add("Mul", [act, up], f"{name}.product")
        return self.linear(f"{name}.down", product, module.down_proj)


def build_graph(model: PreTrainedModel, plain: int, folded: int, trees: bool) -> Graph:
    """Return the graph of a model with so many operators, folded ones if they can be; see `Graph`.

    Inputs: ids i64 [1, S] of all sequences; rows i64 [k], whose logits are computed; cosines and
    sines [P, R], see `ModelForm.rotary`; and see `declare`. Outputs: the extended keys and values,
    the inputs of the usual taps [1, S, H], states [1, S, H] and logits [1, k, V].
    """
    config, trunk, form = model.config, model.model, ModelForm.of(model.config)
    graph = Graph([*map(str, range(plain))], trees=trees, form=form)
    graph.folds = config.num_attention_heads // config.num_key_value_heads
    if graph.folds > 1 and (trees or form.window is None):  # a bias has other bits there
        graph.folded = [f"{FOLDED}{i}" for i in range(folded)]
    x = graph.embedding(trunk.embed_tokens, model.get_output_embeddings())
    x = graph.scaled(x, getattr(trunk.embed_tokens, "scalar_embed_scale", 1.0))
    x = graph.scaled(x, form.embedding)
    more = ""
    for i, layer in enumerate(trunk.layers):
        name = f"layer{i}"
        four = hasattr(layer, "pre_feedforward_layernorm")  # Gemma's
        between = layer.pre_feedforward_layernorm if four else layer.post_attention_layernorm
        attention, asking = layer.self_attn, _inputs_of(layer.self_attn)
        if more:
            h, x = graph.skip_norm(f"{name}.before", x, more, layer.input_layernorm, asking)
        else:
            h = graph.norm(f"{name}.before", x, layer.input_layernorm, asking)
        out = graph.attention(i, h, attention, config)
        if four:
            out = graph.norm(f"{name}.attended", out, layer.post_attention_layernorm)
        out = graph.scaled(out, form.residual)
        h, x = graph.skip_norm(f"{name}.between", x, out, between, _inputs_of(layer.mlp))
        more = graph.feed_forward(name, h, layer.mlp)
        if four:
            more = graph.norm(f"{name}.fed", more, layer.post_feedforward_layernorm)
        more = graph.scaled(more, form.residual)
    states, _ = graph.skip_norm("states", x, more, trunk.norm)
    selected = graph.add("Gather", [states, "rows"], "selected", axis=1)
    head, plain = model.get_output_embeddings(), form.divisor == 1.0 and form.bound is None
    logits = graph.linear("logits", selected, head, "logits" if plain else "logits.raw")
    if plain:
        return graph
    logits = graph.scaled(logits, 1 / (form.divisor * (form.bound or 1.0)))
    if form.bound is not None:
        logits = graph.scaled(graph.add("Tanh", [logits], "logits.bounded"), form.bound)
    graph.add("Identity", [logits], "logits")
    return graph


def _inputs_of(block: nn.Module) -> list[nn.Module]:
    """Return the projections that read what goes into an attention or a feed-forward layer."""
    named = [(name, each) for name, each in block.named_children() if name.endswith("_proj")]
    return [each for name, each in named if name not in ("o_proj", "down_proj")]


def in_onnx(
    graph: Graph, model: PreTrainedModel, places: Mapping[str, Place] = MappingProxyType({})
) -> bytes:
    """Return the graph of a model in ONNX's format; see `declare`."""
    config, info = model.config, helper.make_tensor_value_info
    layers, width = config.num_hidden_layers, model.model.layers[0].self_attn.head_dim
    ids = info("ids", TensorProto.INT64, [1, "S"]), info("rows", TensorProto.INT64, ["k"])
    # Each output costs time, so few inputs of layers are outputs.
    taps = (f"layer{i}.before.sum" for i in sorted({*usual_taps(layers)} - {0}))
    states = dict.fromkeys((*taps, "states"), config.hidden_size)
    outputs = *of_width(states), info("logits", TensorProto.FLOAT, [1, "k", config.vocab_size])
    return declare(graph, ids, outputs, (layers, config.num_key_value_heads, width), places)


def of_width(names: Mapping[str, int]) -> list[ValueInfoProto]:
    """Return the declarations of tensors [1, S, width], whose widths are given by name."""
    info, real = helper.make_tensor_value_info, TensorProto.FLOAT
    return [info(name, real, [1, "S", width]) for name, width in names.items()]


def declare(
    graph: Graph,
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    shape: tuple[int, int, int],
    places: Mapping[str, Place] = MappingProxyType({}),
) -> bytes:
    """Return a graph in ONNX's format; weights but for small constants stay outside of it.

    Inputs of operator i end in `.i`: attend i64 [m], its rows among those of all, unless it is
    folded; their positions i64 [1, m]; total and last i32 [1], the slots in use and the last of
    them; any bias [1, 1, m, T] of the scores; key and value of each layer [1, heads, C, width].
    Folded ones share the inputs of `folding`, and sizes i64 [k], the rows of each of several. Back
    i64 [S] are the places of all rows among those that are attended for.

    Args:
        inputs, outputs: The graph's own, beside those of `GraphRunner`.
        shape: Layers, heads of keys, and width of a head.
        places: Of weights that a `Session` is not handed.
    """
    info, (layers, heads, width) = helper.make_tensor_value_info, shape
    real, short, whole = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
    caches = [f"{part}{i}" for i in range(layers) for part in ("key", "value")]
    tables = (name + kind for kind in graph.form.rotary for name in TABLES)
    every = [*inputs, *(info(name, real, ["P", "R"]) for name in tables)]
    if graph.folded:
        every.append(info("fold", whole, [1, "M", 3 * heads]))
        every.append(info("unfold", whole, [1, "U", heads * graph.folds]))
    if len(graph.folded) > 1:
        every.append(info("sizes", whole, [len(graph.folded)]))
    if graph.plain:
        every.append(info("back", whole, ["S"]))
    results = list[ValueInfoProto]()
    for at in (*graph.plain, *graph.folded):  # the planner takes dimensions of one name for equal
        m, size = f"m{at}", [1, heads, f"C{at}", width]
        every.append(info(f"positions.{at}", whole, [1, m]))
        if at not in graph.folded:
            every.append(info(f"attend.{at}", whole, [m]))
        every += (info(f"{name}.{at}", short, [1]) for name in ("total", "last"))
        biased = graph.trees or at in graph.folded
        biases = ("bias", "narrow")[: (1 + bool(graph.form.window)) * biased]
        every += (info(f"{name}.{at}", real, [1, 1, m, f"T{at}"]) for name in biases)
        every += (info(f"{name}.{at}", real, size) for name in caches)
        results += (info(f"{name}.{at}.out", real, size) for name in caches)
    results += outputs
    weights = [
        numpy_helper.from_array(weight.numpy(), name)
        if weight.dtype == torch.int64
        else declared(name, weight, places.get(name))
        for name, weight in graph.weights.items()
    ]
    return serialized(helper.make_graph(graph.nodes, "model", every, results, weights))
