"""A target whose forwards of one sequence run on ONNX Runtime.

One position of SmolLM2-135M after 512 tokens takes .56 of the time of transformers, eight take .69
(see `benchmarks/RESULTS.md`). Forwards of several sequences run through the model's
own modules, over the same caches.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragspec.verification.causal import CausalTarget
from ragspec.verification.prefix_cache import weight_state
from ragspec.verification.rotary_tables import asks_for_length
from ragspec.verification.tree_attention import TreeView

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, OrtValue
    from transformers import PreTrainedModel

    from ragspec.verification.batch_cache import BatchCache
    from ragspec.verification.sequence_cache import Buffers
    from ragspec.verification.tree_attention import View
    from ragspec.verification.tree_session import TreeSession

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
LEAST_WEIGHTS = 1 << 20  # of a smaller model a session costs more than it saves
PACKAGES = ("onnxruntime", "onnx")
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"  # releases from 1.29 on upload figures of use by default
HIDDEN = -1e30  # bias of a slot that a query does not see
POSITIONS = 2048  # rows of the first rotary table


def hindrance(target: CausalTarget) -> str:
    """Return why a model does not run on ONNX Runtime, "" if it does."""
    model = target.model
    config = model.config
    if config.model_type not in FAMILIES or not hasattr(model, "model"):
        return f"no graph is known for {type(model).__name__}"
    if type(target) is not CausalTarget or target.border is not None or asks_for_length(model):
        return "its forwards depend on more than tokens and positions"
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        return f"{' and '.join(missing)} is not installed (pip install 'ragspec[onnx]')"
    if any(p.device.type != "cpu" or p.dtype != torch.float32 for p in model.parameters()):
        return "its weights are not all in float32 on the CPU"
    if sum(p.numel() for p in model.parameters()) < LEAST_WEIGHTS:
        return f"it has fewer than {LEAST_WEIGHTS:,} weights"
    if others := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"it has layers of {', '.join(sorted(others))}"
    window, limit = getattr(config, "sliding_window", None), target.max_length
    if window and getattr(config, "use_sliding_window", True) and window < (limit or window + 1):
        return f"it attends to the last {window} tokens alone"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"its activation is {config.hidden_act}"
    return _customised(model)


def _customised(model: nn.Module) -> str:
    """Return which module of a model computes in another way than its class says, "" for none."""
    for name, module in model.named_modules():
        linear = name.endswith(("_proj", "lm_head"))
        plain = all(type(each.data) is Tensor for each in module.parameters(recurse=False))
        replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
        other = linear and type(module) is not nn.Linear
        if _is_hooked(module) or replaced or other or not plain:
            return f"its {name or 'model'} was changed"
    return ""


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


class OnnxTarget(CausalTarget):
    """A `CausalTarget` that runs forwards of one sequence on ONNX Runtime.

    The runtime extends the buffers of a `SequenceCache` in place. It has the weights as they were
    when it was opened. Whenever a session begins and they have changed, or a module has a hook,
    the forwards of this session run through the modules.

    Args:
        model: A model without a `hindrance`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        os.environ.setdefault(NO_TELEMETRY, "1")
        self._runtime = importlib.import_module("onnxruntime")
        config = model.config
        self._layers, self._heads = config.num_hidden_layers, config.num_key_value_heads
        self._width: int = model.model.layers[0].self_attn.head_dim
        self._weights = self._look()
        self._unchanged = True
        self._session = self._open_session()
        self._tables = self._rotary(POSITIONS)

    @property
    def runtime(self) -> str:
        """What runs forwards of one sequence: "onnx", or "torch" if weights have changed."""
        return "onnx" if self.runs_alone else "torch"

    @property
    def runs_alone(self) -> bool:
        """Whether a forward of one sequence needs no module of the model."""
        return self._unchanged

    def open(self, *args: Any, **kwargs: Any) -> TreeSession:
        """Return a session; see `CausalTarget.open`."""
        self._unchanged = self._look() == self._weights
        return super().open(*args, **kwargs)

    def forward(self, tokens: Tensor, view: View, cache: BatchCache, keep: int | Tensor) -> Tensor:
        """Run packed tokens; see `CausalTarget.forward`."""
        single = isinstance(view, TreeView) and view.hidden is None and not cache.packed
        if not isinstance(view, TreeView) or not single or not self.runs_alone:
            return super().forward(tokens, view, cache, keep)
        (row,), n = cache.rows, tokens.shape[1]
        if not row.tail.keys:
            self._fill(row.tail)
        end = row.extent + n
        rows = torch.arange(n - keep, n) if isinstance(keep, int) else keep
        head = self.output_head
        heard = bool(head._forward_pre_hooks)  # somebody reads its inputs, so torch computes logits
        inputs = {
            "ids": tokens,
            "positions": view.positions,
            "rows": rows[:0] if heard else rows,
            "total": torch.tensor([end], dtype=torch.int32),
            "last": torch.tensor([end - 1], dtype=torch.int32),
            "bias": _bias(view, n, end),
            **self._rotary_to(int(view.positions.max()) + 1),
        }
        states, logits = self._run(inputs, row.tail)
        cache.advance(n)
        if heard:
            with torch.no_grad():
                logits = head(states[:, rows])
        return logits

    def _open_session(self) -> InferenceSession:
        """Return a session over the model's weights, of which it has a packed copy."""
        from ragspec.verification.onnx.graph import build_graph, serialized

        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        graph = build_graph(self.model)
        weights = {
            name: self._value(weight.contiguous())
            for name, weight in graph.weights.items()
            if weight.is_floating_point()
        }
        self._held = weights  # it reads those that it does not pack
        options.add_external_initializers(list(weights), list(weights.values()))
        proto = serialized(graph, self.model)
        return self._runtime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])

    def _run(self, inputs: dict[str, Tensor], buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Run the session, which extends the buffers; return states and logits."""
        binding = self._session.io_binding()
        values = {name: self._value(tensor.contiguous()) for name, tensor in inputs.items()}
        caches = {
            f"{kind}{layer}": self._value(tensor)
            for kind, held in (("key", buffers.keys), ("value", buffers.values))
            for layer, tensor in held.items()
        }
        for name, value in (values | caches).items():
            binding.bind_ortvalue_input(name, value)
        for name, value in caches.items():
            binding.bind_ortvalue_output(f"{name}.out", value)
        for name in ("states", "logits"):
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding)
        states, logits = binding.get_outputs()[-2:]
        return torch.from_numpy(states.numpy()), torch.from_numpy(logits.numpy())

    def _value(self, tensor: Tensor) -> OrtValue:
        """Return a contiguous tensor as a value of ONNX Runtime in the same memory."""
        return self._runtime.OrtValue.ortvalue_from_numpy(tensor.numpy())

    def _look(self) -> list[object]:
        """Return what shows changes: modules, their hooks, and their weights."""
        head, state = self.output_head, list[object]()  # hooks of the head read hidden states
        for module in self.model.modules():
            state.append((id(module), _is_hooked(module) and module is not head))
            state.append("forward" in module.__dict__ and not isinstance(module, nn.Linear))
            state += map(weight_state, module.parameters(recurse=False))
        return state

    def _fill(self, buffers: Buffers) -> None:
        """Make the buffers of all layers."""
        for layer in range(self._layers):
            shape = 1, self._heads, buffers.capacity, self._width
            buffers.keys[layer], buffers.values[layer] = torch.empty(shape), torch.empty(shape)

    def _rotary(self, positions: int) -> dict[str, Tensor]:
        """Return the model's rotary tables [positions, width / 2]."""
        places = torch.arange(positions)[None]
        cosines, sines = self.model.model.rotary_emb(torch.zeros(1), places)
        half = self._width // 2
        return {
            "cosines": cosines[0, :, :half].contiguous(),
            "sines": sines[0, :, :half].contiguous(),
        }

    def _rotary_to(self, positions: int) -> dict[str, Tensor]:
        """Return rotary tables of at least so many positions."""
        if positions > len(self._tables["cosines"]):
            self._tables = self._rotary(2 * positions)
        return self._tables


def _bias(view: TreeView, n: int, slots: int) -> Tensor:
    """Return what is added to the scores of n queries and all slots, [1, 1, n, slots]."""
    bias = torch.zeros(1, 1, n, slots)
    if view.related is not None:
        recent = bias[..., slots - view.related.shape[2] :]
        recent.masked_fill_(~view.related[:, None], HIDDEN)
    return bias
