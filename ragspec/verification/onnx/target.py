"""A target whose forwards of one sequence run on ONNX Runtime.

One position of SmolLM2-135M after 512 tokens takes .56 of the time of transformers, eight take .69
(see `benchmarks/RESULTS.md`). Forwards of several sequences run through the model's
own modules, over the same caches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragspec.models.quantized import FAMILIES, BlockLinear, Session, missing_package
from ragspec.needs import LAST
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.prefix_cache import weight_state
from ragspec.verification.rotary_tables import asks_for_length
from ragspec.verification.tree_attention import TreeView

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ragspec.verification.batch_cache import BatchCache
    from ragspec.verification.sequence_cache import Buffers, SequenceCache
    from ragspec.verification.tree_attention import View
    from ragspec.verification.tree_session import TreeSession

LEAST_WEIGHTS = 1 << 20  # of a smaller model a session costs more than it saves
HIDDEN = -1e30  # bias of a slot that a query does not see
POSITIONS = 2048  # rows of the first rotary table
MOST_ROWS = 64  # whose logits the graph computes where somebody reads the states
Tables = Callable[[int], dict[str, Tensor]]
TRIED = 32  # tokens of the text whose bits are compared at opening


def hindrance(target: CausalTarget) -> str:
    """Return why a model does not run on ONNX Runtime, "" if it does."""
    model = target.model
    config = model.config
    if config.model_type not in FAMILIES or not hasattr(model, "model"):
        return f"no graph is known for {type(model).__name__}"
    if type(target) is not CausalTarget or target.border is not None or asks_for_length(model):
        return "its forwards depend on more than tokens and positions"
    if missing := missing_package():
        return f"{missing} is not installed (pip install 'ragspec[onnx]')"
    if any(
        p.device.type != "cpu" or p.dtype not in (torch.float32, torch.uint8)
        for p in model.parameters()
    ):
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
        other = linear and type(module) not in (nn.Linear, BlockLinear)
        if _is_hooked(module) or replaced or other or not plain:
            return f"its {name or 'model'} was changed"
    return ""


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _changes(head: nn.Module, states: Tensor) -> bool:
    """Tell the hooks of the output head its inputs; return whether one may change them."""
    return any(
        key not in head._forward_pre_hooks_with_kwargs or hook(head, (states,), {}) is not None
        for key, hook in head._forward_pre_hooks.items()
    )


class GraphRunner:
    """Runs a graph whose attention is that of `Graph.attention`.

    Args:
        shape: Layers, heads of keys, and width of a head.
        tables: The first rotary tables, `cosines` and `sines` [P, width / 2].
        more: Returns tables of so many positions.
    """

    def __init__(
        self,
        session: Session,
        shape: tuple[int, int, int],
        tables: dict[str, Tensor],
        more: Callable[[int], dict[str, Tensor]],
    ) -> None:
        self.session, self._shape, self._tables, self._more = session, shape, tables, more

    def run(
        self,
        row: SequenceCache,
        view: TreeView,
        positions: Tensor,
        inputs: Mapping[str, Tensor],
        names: Sequence[str],
    ) -> list[Tensor]:
        """Return the outputs with these names of a forward over n positions i64 [1, n].

        Args:
            inputs: The graph's own.
        """
        if not row.tail.keys:
            self._fill(row.tail)
        count = positions.shape[1]
        end = row.extent + count
        if (most := int(positions.max()) + 1) > len(self._tables["cosines"]):
            self._tables = self._more(2 * most)
        shared = {
            "positions": positions,
            "total": torch.tensor([end], dtype=torch.int32),
            "last": torch.tensor([end - 1], dtype=torch.int32),
            "bias": _bias(view, count, end),
        }
        return self._outputs({**inputs, **shared, **self._tables}, row.tail, names)

    def _outputs(
        self, inputs: Mapping[str, Tensor], buffers: Buffers, names: Sequence[str]
    ) -> list[Tensor]:
        """Run the session, which extends the buffers; return the outputs with these names."""
        value, binding = self.session.value, self.session.inner.io_binding()
        values = {name: value(tensor.contiguous().numpy()) for name, tensor in inputs.items()}
        caches = {
            f"{kind}{layer}": value(tensor.numpy())
            for kind, held in (("key", buffers.keys), ("value", buffers.values))
            for layer, tensor in held.items()
        }
        for name, value in (values | caches).items():
            binding.bind_ortvalue_input(name, value)
        for name, value in caches.items():
            binding.bind_ortvalue_output(f"{name}.out", value)
        for name in names:
            binding.bind_output(name, "cpu")
        self.session.inner.run_with_iobinding(binding)
        outputs = binding.get_outputs()[-len(names) :]
        return [torch.from_numpy(output.numpy()) for output in outputs]

    def _fill(self, buffers: Buffers) -> None:
        """Make the buffers of all layers."""
        layers, heads, width = self._shape
        size = 1, heads, buffers.capacity, width
        for layer in range(layers):
            for states in (buffers.keys, buffers.values):
                states[layer] = torch.empty(size, dtype=torch.float32)


class OnnxTarget(CausalTarget):
    """A `CausalTarget` that runs forwards of one sequence on ONNX Runtime.

    The runtime extends the buffers of a `SequenceCache` in place. It has the weights as they were
    when it was opened. Whenever a session begins and they have changed, or a module has a hook,
    the forwards of this session run through the modules.

    Products with quantized weights round their inputs too, and would carry a difference of the last
    bit into the text. A chain has the same bits in every width from two positions on, so a forward
    over one token takes a second one, drafts are chains, and no forward covers several sequences.

    Args:
        model: A model without a `hindrance`.

    Attributes:
        same_bits: Whether a chain has the bits of its tokens one by one.
    """

    same_bits: bool = False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._width: int = model.model.layers[0].self_attn.head_dim
        self._weights = self._look()
        self._unchanged = True
        self._runner = self._run_by(self._open_session(), self.rotary(POSITIONS))
        if any(isinstance(each, BlockLinear) for each in model.modules()):
            self.chains, self.packs = True, False
            self.same_bits = self._has_same_bits()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the model; the copy opens a session of its own."""
        return type(self), (self.model,), {"probed": self.probed}

    @property
    def runtime(self) -> str:
        """What runs forwards of one sequence: "onnx", or "torch" if weights have changed."""
        return "onnx" if self.runs_alone() else "torch"

    def runs_alone(self, taps: Iterable[int] = ()) -> bool:
        """Return whether a forward of one sequence needs no module; see `CausalTarget`."""
        return self._unchanged and {LAST, 0, *self._outputs}.issuperset(taps)

    @property
    def rounds(self) -> bool:
        """Whether forwards of several widths round visibly; see `CausalTarget.rounds`."""
        return not (self.chains and self.same_bits and self._unchanged) and super().rounds

    def open(self, *args: Any, **kwargs: Any) -> TreeSession:
        """Return a session; see `CausalTarget.open`."""
        self._unchanged = self._look() == self._weights
        return super().open(*args, **kwargs)

    def forward(self, tokens: Tensor, view: View, cache: BatchCache, keep: int | Tensor) -> Tensor:
        """Run packed tokens; see `CausalTarget.forward`."""
        single = isinstance(view, TreeView) and view.hidden is None and not cache.packed
        every = enumerate(getattr(getattr(self.loaded, "model", None), "layers", ()))
        layers = {i: layer for i, layer in every if layer._forward_pre_hooks}  # see `Taps`
        if not isinstance(view, TreeView) or not single or not self.runs_alone(layers):
            return super().forward(tokens, view, cache, keep)
        (row,), n = cache.rows, tokens.shape[1]
        rows = torch.arange(n - keep, n) if isinstance(keep, int) else keep
        positions = view.positions
        if self.chains and n == 1:
            tokens = tokens.expand(1, 2)
            positions = torch.cat((positions, positions + 1), 1)
            row.reserve(2)
        head = self.loaded.get_output_embeddings()
        # Somebody reads its inputs, and may select few of the rows of a prompt.
        selects = bool(head._forward_pre_hooks) and len(rows) > MOST_ROWS
        inputs = {"ids": tokens, "rows": rows[:0] if selects else rows}
        names = (*(self._outputs[i] for i in layers if i), "states", "logits")
        *tapped, states, logits = self._runner.run(row, view, positions, inputs, names)
        for i, layer in layers.items():
            each = tapped.pop(0) if i else self.embed(tokens)
            for hook in layer._forward_pre_hooks.values():
                hook(layer, (each[:, :n],), {})
        cache.advance(n)
        if _changes(head, states[:, rows]) or selects:
            with torch.no_grad():
                logits = head(states[:, rows])
        return logits

    def _run_by(self, session: Session, tables: dict[str, Tensor]) -> GraphRunner:
        """Return what runs a session, whose first rotary tables are these."""
        shape = self.config.num_hidden_layers, self.config.num_key_value_heads, self._width
        return GraphRunner(session, shape, tables, self.rotary)

    def _open_session(self) -> Session:
        """Return a session over the model's weights, of which it has a packed copy."""
        from ragspec.verification.onnx.graph import build_graph, in_onnx

        graph = build_graph(self.model)
        return Session(in_onnx(graph, self.model), graph.floating())

    @cached_property
    def _outputs(self) -> dict[int, str]:
        """The outputs of the graph that are inputs of layers, by number."""
        names = [output.name for output in self._runner.session.inner.get_outputs()]
        matches = [(re.fullmatch(r"layer(\d+)\.before\.sum", name), name) for name in names]
        return {int(match[1]): name for match, name in matches if match}

    def _look(self) -> list[object]:
        """Return what shows changes: modules, their hooks, and their weights."""
        state = list[object]()
        head = self.loaded.get_output_embeddings()  # its hooks read hidden states
        for module in self.loaded.modules():
            hooked = _is_hooked(module) and module is not head
            state.append((id(module), type(module), hooked))
            state.append("forward" in module.__dict__ and not isinstance(module, nn.Linear))
            state += map(weight_state, module.parameters(recurse=False))
        return state

    def rotary(self, positions: int) -> dict[str, Tensor]:
        """Return the model's rotary tables [positions, width / 2]."""
        places = torch.arange(positions)[None]
        cosines, sines = self.model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), places)
        half = self._width // 2
        return {
            "cosines": cosines[0, :, :half].contiguous(),
            "sines": sines[0, :, :half].contiguous(),
        }

    def _has_same_bits(self) -> bool:
        """Return whether a chain has the bits of its tokens one by one."""
        tokens = torch.randint(
            self.vocab_size, (TRIED,), generator=torch.Generator().manual_seed(0)
        )
        first, *chain = tokens[TRIED // 2 :].tolist()
        with self.open(1, TRIED) as session, torch.no_grad():
            session.read_prompts([tokens[: TRIED // 2].tolist()], 0)
            session.commit([()])
            (together,) = session.verify([[first]], [DraftTree.chain(chain, "probe")])
            session.discard_uncommitted()
            for row, token in enumerate((first, *chain)):
                (alone,) = session.verify([[token]], [DraftTree.empty()])
                session.commit([()])
                if not torch.equal(alone[0], together[row]):
                    return False
        return True


def _bias(view: TreeView, n: int, slots: int) -> Tensor:
    """Return what is added to the scores of n queries and all slots, [1, 1, n, slots]."""
    bias = torch.zeros(1, 1, n, slots, dtype=torch.float32)
    if view.related is not None:
        recent = bias[..., slots - view.related.shape[2] :]
        recent.masked_fill_(~view.related[:, None], HIDDEN)
    return bias
