"""A head of EAGLE as a graph of ONNX Runtime over its tensors, which needs no modelling code.

One forward is one call of the runtime. For a target in 8 bits the head is stored so too.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ragspec.drafters.heads.config import HeadConfig, HeadWeights
from ragspec.drafters.heads.vocabulary import linear_of, output_rows
from ragspec.models.block_linear import BLOCK, BlockLinear
from ragspec.models.onnx_session import Session, missing_package
from ragspec.verification.causal import CausalTarget
from ragspec.verification.onnx.target import POSITIONS, GraphRunner, OnnxTarget, Tables

if TYPE_CHECKING:
    from ragspec.verification.batch import Batch
    from ragspec.verification.onnx.graph import Graph

_LAYER = "layers.layers.0."


def open_graph(weights: HeadWeights, target: CausalTarget) -> "HeadGraph | None":
    """Return a head on ONNX Runtime; None if it or its target does not run there."""
    config, layer = weights.config, weights.config.layers
    if not (
        config.form in ("eagle1", "eagle3")
        and config.tap_norm == "none"
        and layer["model_type"] == "llama"
        and layer.get("hidden_act", "silu") == "silu"
        and layer["num_hidden_layers"] == 1
        and not layer.get("rope_scaling")
        and (layer.get("rope_parameters") or layer).get("rope_type", "default") == "default"
        and isinstance(target, OnnxTarget)
        and not missing_package()
    ):
        return None
    state = {name: each.shape for name, each in weights.state.items() if name != "tokens"}
    return HeadGraph(weights, target) if state == _shapes(config) else None


class HeadGraph:
    """Runs a head over the keys and values of one sequence; see `open_graph`.

    Args:
        target: The head is stored in 8 bits if this is.

    Attributes:
        tokens: Ids of the tokens that it may draft, i64 [v]; None for all.
    """

    def __init__(self, weights: HeadWeights, target: CausalTarget) -> None:
        from onnx import TensorProto, helper

        from ragspec.verification.onnx.graph import Graph, declare, of_width

        config, info = weights.config, helper.make_tensor_value_info
        self.config, self.tokens = config, weights.state.get("tokens")
        self.layers = nn.Module()  # none that a forward changes
        modules = _Modules(weights, isinstance(target.output_head, BlockLinear))
        self._fc = modules.linear("fc") if config.join == "attend" else nn.Identity()
        graph = Graph()
        _, heads, width = _heads(config)
        read, fed = _build(graph, modules)
        rows: Any = modules.linear("output") if config.has_output else target.output_head
        if self.tokens is not None and not config.has_output:
            rows = output_rows(target, self.tokens)
        selected = graph.add("Gather", [read, "rows"], "selected", axis=1)
        self._names, shape = (graph.linear("logits", selected, rows), fed), (1, heads, width)
        inputs = of_width({"embedded": config.embedding_size, "before": config.hidden_size})
        inputs.append(info("rows", TensorProto.INT64, ["k"]))
        logits = info(self._names[0], TensorProto.FLOAT, [1, "k", rows.out_features])
        proto = declare(graph, inputs, [logits, *of_width({fed: config.hidden_size})], shape)
        rotary = config.layers | (config.layers.get("rope_parameters") or {})
        self._theta = float(rotary.get("rope_theta", 10_000.0))
        self._width = width
        session, tables = Session(proto, graph.floating()), self._rotary(POSITIONS)
        self._runner = GraphRunner(session, shape, tables, self._rotary)

    def project(self, taps: Tensor) -> Tensor:
        """Return the states that the head reads; see `DraftHead.project`."""
        return cast(Tensor, self._fc(taps))

    def rows(self, target: CausalTarget) -> None:
        """Return None: the graph has its rows of logits."""

    def run(self, embedded: Tensor, states: Tensor, batch: "Batch", keep: int) -> list[Tensor]:
        """Return logits of `tokens` [1, k, v] after the last k of n tokens, and states to feed."""
        n = embedded.shape[1]
        inputs = {"embedded": embedded, "before": states, "rows": torch.arange(n - keep, n)}
        return self._runner.run(batch.rows, batch.views, inputs, self._names)

    def _rotary(self, positions: int) -> Tables:
        """Return rotary tables [positions, width / 2]."""
        powers = torch.arange(0, self._width, 2, dtype=torch.float32) / self._width
        angles = torch.arange(positions, dtype=torch.float32)[:, None] / self._theta**powers
        return {"cosines": angles.cos().numpy(), "sines": angles.sin().numpy()}


class _Modules(NamedTuple):
    """The modules of a head, made of its tensors.

    Attributes:
        small: Whether linear layers are stored in 8 bits.
    """

    weights: HeadWeights
    small: bool

    def linear(self, name: str) -> nn.Linear | BlockLinear:
        """Return a linear layer."""
        state = self.weights.state
        module = linear_of(state[f"{name}.weight"], state.get(f"{name}.bias"))
        return BlockLinear.of(module) if self.small and module.in_features % BLOCK == 0 else module

    def part(self, name: str, parts: str) -> SimpleNamespace:
        """Return the attention or the feed-forward part of the layer."""
        each = (f"{part}_proj" for part in parts.split())
        return SimpleNamespace(**{part: self.linear(f"{_LAYER}{name}.{part}") for part in each})

    def norm(self, name: str) -> SimpleNamespace:
        """Return a norm."""
        eps = self.weights.config.layers.get("rms_norm_eps", 1e-6)
        return SimpleNamespace(weight=self.weights.state[f"{name}.weight"], variance_epsilon=eps)


def _build(graph: "Graph", modules: _Modules) -> tuple[str, str]:
    """Add the nodes of a head: inputs embedded [1, S, E] and before [1, S, H].

    Returns:
        The names of the outputs, see `HeadStates`.
    """
    config = modules.weights.config
    heads, groups, width = _heads(config)
    attention = modules.part("self_attn", "q k v o")
    attention.head_dim, attention.scaling = width, width**-0.5
    counts: Any = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups)
    pair = ["before", "embedded"] if config.state_first else ["embedded", "before"]
    if config.join == "attend":
        norms = (("embedded", "input_layernorm"), ("before", "hidden_norm"))
        normed = [graph.norm(name, x, modules.norm(_LAYER + name)) for x, name in norms]
        h = graph.add("Concat", normed, "pair", axis=-1)
        x = normed[1] if config.residual_norm else "before"
    else:
        h = x = graph.linear("fc", graph.add("Concat", pair, "pair", axis=-1), modules.linear("fc"))
    out = graph.attention(0, h, attention, counts)
    h, x = graph.skip_norm("between", x, out, modules.norm(f"{_LAYER}post_attention_layernorm"))
    more = graph.feed_forward("layer0", h, modules.part("mlp", "gate up down"))
    if config.form == "eagle1":
        return (graph.add("Add", [x, more], "states"),) * 2
    read, fed = graph.skip_norm("states", x, more, modules.norm("norm"))
    return read, read if config.feeds_norm else fed


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the sizes of all tensors of a head, by name."""
    layer, h = config.layers, config.hidden_size
    heads, groups, width = _heads(config)
    m, attends = layer["intermediate_size"], config.join == "attend"
    inputs = 2 * h if attends else h
    sizes: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (heads * width, inputs)}
    sizes |= {f"self_attn.{each}_proj": (groups * width, inputs) for each in "kv"}
    sizes |= {"self_attn.o_proj": (h, heads * width), "mlp.down_proj": (h, m)}
    sizes |= {"mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "post_attention_layernorm": (h,)}
    sizes |= dict.fromkeys(("input_layernorm", "hidden_norm"), (h,)) if attends else {}
    whole = {f"{_LAYER}{name}": size for name, size in sizes.items()}
    taps = len(config.taps) * config.target_size
    whole["fc"] = (h, taps) if attends else (h, config.embedding_size + h)
    whole |= {"norm": (h,)} if attends else {}
    if config.has_output:
        whole["output"] = config.draft_vocab_size or config.vocab_size, h
    named = {f"{name}.weight": size for name, size in whole.items()}
    return named | ({"fc.bias": (h,)} if config.bias else {})


def _heads(config: HeadConfig) -> tuple[int, int, int]:
    """Return the heads of queries and of keys, and their width."""
    layer = config.layers
    heads = int(layer["num_attention_heads"])
    width = layer.get("head_dim") or layer["hidden_size"] // heads
    return heads, int(layer.get("num_key_value_heads") or heads), int(width)
