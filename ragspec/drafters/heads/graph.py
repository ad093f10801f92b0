"""A head of EAGLE-1 as a graph of ONNX Runtime over its tensors, which needs no modelling code.

One forward is one call of the runtime. For a target in 8 bits the head is stored so too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragspec.drafters.heads.config import HeadConfig, HeadWeights
from ragspec.drafters.heads.head import HeadStates
from ragspec.drafters.heads.vocabulary import DraftVocabulary
from ragspec.models.quantized import BLOCK, BlockLinear, Session, missing_package
from ragspec.verification.causal import CausalTarget
from ragspec.verification.onnx.runner import GraphRunner
from ragspec.verification.onnx.target import POSITIONS, OnnxTarget
from ragspec.verification.tree_attention import TreeView

if TYPE_CHECKING:
    from ragspec.verification.batch_cache import BatchCache
    from ragspec.verification.onnx.graph import Graph
    from ragspec.verification.tree_attention import View

_LAYER = "layers.layers.0."


def open_graph(weights: HeadWeights, target: CausalTarget) -> HeadGraph | None:
    """Return a head on ONNX Runtime; None if it or its target does not run there."""
    config, layer = weights.config, weights.config.layers
    other = config.join != "project" or config.joined_norms or config.first_norm
    other = other or config.output_norm or config.has_output or config.has_embedding
    known = layer["model_type"] == "llama" and layer.get("hidden_act", "silu") == "silu"
    known = known and layer["num_hidden_layers"] == 1 and not layer.get("rope_scaling")
    known = known and _rope(layer).get("rope_type", "default") == "default"
    state = {name: each.shape for name, each in weights.state.items() if name != "tokens"}
    if other or not known or not isinstance(target, OnnxTarget) or missing_package():
        return None
    return HeadGraph(weights, target) if state == _shapes(config) else None


class HeadGraph:
    """Runs the layer of a head over the keys and values of one sequence; see `open_graph`.

    Args:
        target: The head is stored in 8 bits if this is.
    """

    def __init__(self, weights: HeadWeights, target: CausalTarget) -> None:
        from ragspec.verification.onnx.graph import Graph, declare, of_width

        config = weights.config
        graph, heads, width = Graph(), *_heads(config.layers)[1:]
        small = isinstance(target.output_head, BlockLinear)
        _build(graph, weights, small)
        shape = 1, heads, width
        inputs = of_width({"embedded": config.embedding_size, "before": config.hidden_size})
        proto = declare(graph, inputs, of_width({"states": config.hidden_size}), shape)
        self.config, self.tokens = config, weights.state.get("tokens")
        self.layers = nn.Module()  # none that a forward changes
        self._theta = float(_rope(config.layers).get("rope_theta", 10_000.0))
        self._width = width
        session, tables = Session(proto, graph.floating()), self._rotary(POSITIONS)
        self._runner = GraphRunner(session, shape, tables, self._rotary)

    def project(self, taps: Tensor) -> Tensor:
        """Return the states that the head reads; see `DraftHead.project`."""
        return taps

    def vocabulary(self, target: CausalTarget) -> DraftVocabulary | None:
        """Return the logits of the tokens that it drafts; see `DraftHead.vocabulary`."""
        return None if self.tokens is None else DraftVocabulary.of_target(target, self.tokens)

    def embed(self, target: CausalTarget, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens; see `DraftHead.embed`."""
        return target.embed(tokens)

    def read(self, embedded: Tensor, states: Tensor, view: View, cache: BatchCache) -> HeadStates:
        """Return the output after n tokens; see `DraftHead.read`."""
        assert isinstance(view, TreeView)
        inputs, (row,) = {"embedded": embedded, "before": states}, cache.rows
        (out,) = self._runner.run(row, view, view.positions, inputs, ("states",))
        return HeadStates(out, out)

    def _rotary(self, positions: int) -> dict[str, Tensor]:
        """Return rotary tables [positions, width / 2]."""
        powers = torch.arange(0, self._width, 2, dtype=torch.float32) / self._width
        angles = torch.arange(positions, dtype=torch.float32)[:, None] / self._theta**powers
        return {"cosines": angles.cos(), "sines": angles.sin()}


def _build(graph: Graph, weights: HeadWeights, small: bool) -> None:
    """Add the nodes of a head: inputs embedded [1, S, E] and before [1, S, H], output states."""
    layer, state = weights.config.layers, weights.state

    def linear(name: str) -> nn.Linear | BlockLinear:
        weight, bias = state[f"{name}.weight"], state.get(f"{name}.bias")
        module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        module.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            module.bias = nn.Parameter(bias, requires_grad=False)
        return BlockLinear.of(module) if small and weight.shape[1] % BLOCK == 0 else module

    def layers(part: str, names: str) -> dict[str, Any]:
        each = (f"{name}_proj" for name in names.split())
        return {name: linear(f"{_LAYER}{part}.{name}") for name in each}

    heads, groups, width = _heads(layer)
    attention: Any = SimpleNamespace(**layers("self_attn", "q k v o"), head_dim=width)
    attention.scaling = width**-0.5
    norm: Any = SimpleNamespace(weight=state[f"{_LAYER}post_attention_layernorm.weight"])
    norm.variance_epsilon = layer.get("rms_norm_eps", 1e-6)
    counts: Any = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=groups)
    pair = ["before", "embedded"] if weights.config.state_first else ["embedded", "before"]
    x = graph.linear("fc", graph.add("Concat", pair, "pair", axis=-1), linear("fc"))
    out = graph.attention("layer0", 0, x, attention, counts)
    h, x = graph.skip_norm("between", x, out, norm)
    more = graph.feed_forward("layer0", h, SimpleNamespace(**layers("mlp", "gate up down")))
    graph.add("Add", [x, more], "states")


def _shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the sizes of all tensors of a head, by name."""
    layer, h = config.layers, config.hidden_size
    heads, groups, width = _heads(layer)
    m = layer["intermediate_size"]
    sizes = {"q": (heads * width, h), "o": (h, heads * width)}
    sizes |= dict.fromkeys("kv", (groups * width, h))
    named = {f"self_attn.{name}_proj": size for name, size in sizes.items()}
    named |= {"mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "mlp.down_proj": (h, m)}
    whole: dict[str, tuple[int, ...]] = {f"{_LAYER}{n}.weight": size for n, size in named.items()}
    whole |= {f"{_LAYER}post_attention_layernorm.weight": (h,)}
    whole["fc.weight"] = h, config.embedding_size + h
    return whole | ({"fc.bias": (h,)} if config.bias else {})


def _heads(layer: dict[str, Any]) -> tuple[int, int, int]:
    """Return the heads of queries and of keys, and their width."""
    heads = int(layer["num_attention_heads"])
    width = layer.get("head_dim") or layer["hidden_size"] // heads
    return heads, int(layer.get("num_key_value_heads") or heads), int(width)


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions."""
    return layer.get("rope_parameters") or {"rope_theta": layer.get("rope_theta", 10_000.0)}
