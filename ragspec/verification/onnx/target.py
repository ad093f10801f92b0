"""A target whose forwards run on ONNX Runtime.

One position of SmolLM2-135M after 512 tokens takes .56 of the time of transformers, eight take .69
(see `benchmarks/RESULTS.md`). Up to `SEQUENCES` sequences share a forward; in 8 bits each has the
bits that it has alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from ragspec.models.quantized import BlockLinear, Session
from ragspec.needs import LAST
from ragspec.types import PreTrainedModel
from ragspec.verification.batch import TreeView
from ragspec.verification.causal import CausalTarget
from ragspec.verification.onnx.bits import Rows, Views, batches_agree, have_same_bits
from ragspec.verification.onnx.form import FOLDED, TABLES, ModelForm
from ragspec.verification.prefix_cache import weight_state
from ragspec.verification.sequence_cache import Buffers, SequenceCache

if TYPE_CHECKING:
    from ragspec.verification.batch import Batch
    from ragspec.verification.tree_session import TreeSession

HIDDEN = -1e30  # bias of a slot that a query does not see
POSITIONS = 2048  # rows of the first rotary table
MOST_ROWS = 64  # whose logits the graph computes where somebody reads the states
_FIRST = torch.zeros(1, 1, dtype=torch.int64)  # a position
FOLD_TO = 16  # most positions of a folded operator
FOLD_FROM = 64  # slots in use for each of them, from which on it is faster
SEQUENCES = 8  # of one forward; each has an operator in each layer, which costs little while idle
Tables = Callable[[int], dict[str, Tensor]]


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
        tables: The first rotary tables [P, half of what is turned], see `ModelForm.rotary`.
        more: Returns tables of so many positions.
        window: The most tokens that a token attends to in some layers.
        folds: See `Graph`.

    Attributes:
        sequences: Most sequences of a forward.
        fold_from: See `FOLD_FROM`; at least 1.
    """

    def __init__(
        self,
        session: Session,
        shape: tuple[int, int, int],
        tables: dict[str, Tensor],
        more: Callable[[int], dict[str, Tensor]],
        window: int | None = None,
        folds: int = 1,
    ) -> None:
        self.session, self._shape, self.tables, self._more = session, shape, tables, more
        self._window = window
        names = [each.name for each in session.inner.get_inputs()]
        self._operators = [n.partition(".")[2] for n in names if n.startswith("total.")]
        self._few, self._folds = "back" not in names, folds if "fold" in names else 1
        self._folded = self._operators if self._few else [FOLDED] * (self._folds > 1)
        self._trees = "bias.0" in names and not self._few
        self.fold_from = FOLD_FROM
        self.sequences = len(self._operators) - (FOLDED in self._operators)
        self._idle = SequenceCache(max(2, self._folds))  # of an operator without a sequence
        self._bound: WeakKeyDictionary[Buffers, dict[str, Any]] = WeakKeyDictionary()
        self._sizes = {each.name: each.shape for each in session.inner.get_outputs()}
        self._last: tuple[tuple[object, ...], Any] = ((), None)  # buffers and names, and a binding

    def run(
        self,
        rows: Sequence[SequenceCache],
        views: Sequence[TreeView],
        inputs: Mapping[str, Tensor],
        names: Sequence[str],
    ) -> list[Tensor]:
        """Return the outputs with these names of a forward over the next positions of sequences.

        Args:
            inputs: The graph's own.
        """
        every, back, caches = dict(inputs), list[int](), list[Buffers]()
        folds, unfolds, sizes = list[Tensor](), list[Tensor](), list[int]()
        first = start = 0  # of a sequence among all rows, and among those that are attended for
        n = views[0].positions.shape[1]
        # Without slots in use it would ignore the positions.
        folded = FOLDED in self._folded and len(rows) == 1 and n <= FOLD_TO
        folded = folded and self.fold_from * n <= rows[0].extent
        which = [FOLDED] if folded else self._operators[: len(rows)]
        working = dict(zip(which, zip(rows, views, strict=True), strict=True))
        for at in self._operators:
            row, view = working.get(at, (self._idle, None))
            there, positions = view is not None, _FIRST if view is None else view.positions
            count = length = positions.shape[1]
            if at in self._folded:
                places = self._places_folded(row, view, positions)
                fold, unfold = folding(count, self._shape[1], self._folds)
                folds.append(fold + first * (there * self._shape[1] * (self._folds + 2)))
                if there or not self._few:
                    unfolds.append(unfold + sum(sizes) * self._shape[1])
                sizes.append(count * self._folds)
            else:
                attend = torch.arange(first, first + count) if there else _FIRST[0]
                if count == 1 and not self._trees:  # as wide as chains of the same bits
                    attend, positions = attend.expand(2), torch.cat((positions, positions + 1), 1)
                    row.reserve(2)
                places, length = self._places(row, positions) | {"attend": attend}, len(attend)
                if self._trees:
                    end = int(places["total"])
                    places |= self._biases(view, count, end, None if view is None else view.related)
            every |= {f"{name}.{at}": each for name, each in places.items()}
            caches.append(row.buffers)
            if there:
                back += range(start, start + count)
                first += count
            start += length
        if folds:
            every |= {"fold": torch.cat(folds, 1), "unfold": torch.cat(unfolds, 1)}
        if len(folds) > 1:
            every["sizes"] = torch.tensor(sizes)
        if not self._few:
            every["back"] = torch.tensor(back)
        return self._outputs(every, caches, names, first)

    def _places_folded(
        self, row: SequenceCache, view: TreeView | None, positions: Tensor
    ) -> dict[str, Tensor]:
        """Return the inputs of a folded operator, whose rows fill more slots than are used."""
        n, end = positions.shape[1], row.extent + positions.shape[1]
        row.reserve(n * self._folds)
        places = self._places(row, positions.expand(self._folds, n).reshape(1, -1))
        related, slots = None if view is None else view.related, row.extent + n * self._folds
        if related is None and n > 1:
            related = torch.ones(1, n, n, dtype=torch.bool).tril()
        for name, bias in self._biases(view, n, end, related).items():
            places[name] = bias.new_full((1, 1, self._folds * n, slots), HIDDEN)
            places[name].view(self._folds, n, slots)[..., :end] = bias[0]
        return places

    def _biases(
        self, view: TreeView | None, n: int, slots: int, related: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the biases of the scores of n queries."""
        bias = _bias(related, n, slots)
        if self._window is None:
            return {"bias": bias}
        return {"bias": bias, "narrow": _narrowed(bias, view, self._window)}

    def _places(self, row: SequenceCache, positions: Tensor) -> dict[str, Tensor]:
        """Return the inputs of an operator of whose sequence n slots are next."""
        if not row.buffers.keys:
            self._fill(row.buffers)
        end = row.extent + positions.shape[1]
        if (most := max(int(positions.max()) + 1, end)) > len(self.tables["cosines"]):
            self.tables = self._more(2 * most)  # slots of folded heads count, too
        return {
            "positions": positions,
            "total": torch.tensor([end], dtype=torch.int32),
            "last": torch.tensor([end - 1], dtype=torch.int32),
        }

    def _outputs(
        self,
        inputs: Mapping[str, Tensor],
        caches: Sequence[Buffers],
        names: Sequence[str],
        positions: int,
    ) -> list[Tensor]:
        """Run the session, which extends the buffers; return the outputs with these names."""
        value, sizes = self.session.value, {"S": positions, "k": len(inputs["rows"])}
        shapes = ([sizes.get(size, size) for size in self._sizes[name]] for name in names)
        outputs = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
        results = [value(output.numpy()) for output in outputs]  # a binding does not hold them
        key = (*map(ref, caches), *names)
        (last, binding), self._last = self._last, ((), None)  # a forward of another thread has none
        if last != key:
            binding = self._bind(caches)
        for name, tensor in {**inputs, **self.tables}.items():
            binding.bind_cpu_input(name, tensor.contiguous().numpy())
        for name, result in zip(names, results, strict=True):
            binding.bind_ortvalue_output(name, result)
        self.session.inner.run_with_iobinding(binding)
        self._last = key, binding
        return outputs

    def _bind(self, caches: Sequence[Buffers]) -> Any:
        """Return a binding of the buffers of each operator."""
        binding = self.session.inner.io_binding()
        for at, buffers in zip(self._operators, caches, strict=True):
            for name, bound in self._values(buffers).items():
                binding.bind_ortvalue_input(f"{name}.{at}", bound)
                binding.bind_ortvalue_output(f"{name}.{at}.out", bound)
        return binding

    def _values(self, buffers: Buffers) -> dict[str, object]:
        """Return what the runtime reads and writes in the place of the buffers."""
        bound = self._bound.get(buffers)
        if bound is None:
            bound = self._bound[buffers] = {
                f"{kind}{layer}": self.session.value(each.numpy())
                for kind, held in (("key", buffers.keys), ("value", buffers.values))
                for layer, each in held.items()
            }
        return bound

    def _fill(self, buffers: Buffers) -> None:
        """Make the buffers of all layers."""
        layers, heads, width = self._shape
        size = 1, heads, buffers.capacity, width
        for layer in range(layers):
            for states in (buffers.keys, buffers.values):
                states[layer] = torch.empty(size, dtype=torch.float32)


class OnnxTarget(CausalTarget):
    """A `CausalTarget` that runs forwards on ONNX Runtime.

    The runtime extends the buffers of a `SequenceCache` in place. It has the weights as they were
    when it was opened. Whenever a session begins and they have changed, or a module has a hook,
    the forwards of this session run through the modules.

    Products with quantized weights round their inputs too, and would carry a difference of the last
    bit into the text. A chain has the same bits in every width from two positions on, so a single
    token attends with a second one, and drafts are chains. Each of several sequences attends by
    itself. The other operators have the same bits in every width.

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
        self.chains = any(isinstance(each, BlockLinear) for each in model.modules())
        self._runner = self._run_by(self._open_session(1), self.rotary(POSITIONS))
        if self.chains:
            self.packs = False
            self._runner.fold_from = 1
            self.same_bits = have_same_bits(self, self.run)
            self._runner.fold_from = FOLD_FROM

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the model; the copy opens a session of its own."""
        return type(self), (self.model,), {"probed": self.probed}

    @property
    def runtime(self) -> str:
        """What runs forwards: "onnx", or "torch" if weights have changed."""
        return "onnx" if self.runs_alone() else "torch"

    def runs_alone(self, taps: Iterable[int] = ()) -> bool:
        """Return whether a forward needs no module; see `CausalTarget`."""
        return self._unchanged and {LAST, 0, *self._outputs}.issuperset(taps)

    @property
    def rounds(self) -> bool:
        """Whether forwards of several widths round visibly; see `CausalTarget.rounds`."""
        return not (self.chains and self.same_bits and self._unchanged) and super().rounds

    def open(self, *args: Any, **kwargs: Any) -> TreeSession:
        """Return a session; see `CausalTarget.open`."""
        self._unchanged = self._look() == self._weights
        return super().open(*args, **kwargs)

    def forward(self, tokens: Tensor, batch: Batch, keep: int | Tensor) -> Tensor:
        """Run packed tokens; see `CausalTarget.forward`."""
        every = enumerate(getattr(getattr(self.loaded, "model", None), "layers", ()))
        layers = {i: layer for i, layer in every if layer._forward_pre_hooks}  # see `Taps`
        views = batch.views
        padded = any(view.hidden is not None for view in views)
        if padded or not self.runs_alone(layers):
            return super().forward(tokens, batch, keep)
        assert not self.chains or all(map(_is_chain, views))
        n = tokens.shape[1]
        rows = torch.arange(n - keep, n) if isinstance(keep, int) else keep
        head = self.loaded.get_output_embeddings()
        # Somebody reads its inputs, and may select few of the rows of a prompt.
        selects = (
            bool(head._forward_pre_hooks) and len(rows) > MOST_ROWS and self.form.bound is None
        )
        names = (*(self._outputs[i] for i in layers if i), "states", "logits")
        read = rows[:0] if selects else rows
        *tapped, states, logits = self.run(batch.rows, views, tokens, read, names)
        for i, layer in layers.items():
            each = tapped.pop(0) if i else self.embed(tokens) * self.form.embedding
            for hook in layer._forward_pre_hooks.values():
                hook(layer, (each,), {})
        batch.advance()
        if selects or (head._forward_pre_hooks and _changes(head, states[:, rows])):
            with torch.no_grad():
                logits = self.form.bounded(head(states[:, rows]))
        return logits

    def run(
        self,
        rows: Sequence[SequenceCache],
        views: Sequence[TreeView],
        tokens: Tensor,
        read: Tensor,
        names: Sequence[str],
    ) -> list[Tensor]:
        """Return the outputs with these names of a forward over some sequences.

        Args:
            tokens: Of all sequences, i64 [1, n].
            read: Those whose logits are computed, ascending, i64 [k].
        """
        runner = self._runner_of(rows, views)
        size = 1 if runner is None else runner.sequences
        if runner is not None and len(rows) <= size:
            return runner.run(rows, views, {"ids": tokens, "rows": read}, names)
        outputs, first = [], 0
        for start in range(0, len(rows), size):
            some = slice(start, start + size)
            end = first + sum(view.positions.shape[1] for view in views[some])
            mine = read[(read >= first) & (read < end)] - first
            outputs.append(self.run(rows[some], views[some], tokens[:, first:end], mine, names))
            first = end
        return [torch.cat(parts, 1) for parts in zip(*outputs, strict=True)]

    def _run_by(self, session: Session, tables: dict[str, Tensor]) -> GraphRunner:
        """Return what runs a session, whose first rotary tables are these."""
        shape = self.config.num_hidden_layers, self.config.num_key_value_heads, self._width
        folds = self.config.num_attention_heads // self.config.num_key_value_heads
        return GraphRunner(session, shape, tables, self.rotary, self.form.window, folds)

    def _open_session(self, sequences: int, few: bool = False) -> Session:
        """Return a session over the model's weights, of which it has a packed copy; see `Graph`."""
        from ragspec.verification.onnx.graph import build_graph, in_onnx

        graph = build_graph(self.model, sequences, not self.chains, few)
        return Session(in_onnx(graph, self.model), graph.floating())

    @cached_property
    def form(self) -> ModelForm:
        """The form of the model."""
        return ModelForm.of(self.config)

    def _runner_of(self, rows: Rows, views: Views) -> GraphRunner | None:
        """Return what runs a forward over sequences; None if each must run alone."""
        return self._runner if len(rows) == 1 else self._together

    @cached_property
    def _together(self) -> GraphRunner | None:
        """What runs forwards of several sequences, opened by the first; None if it changes bits."""
        runner = self._run_by(self._open_session(SEQUENCES), self._runner.tables)
        alike = not self.chains or batches_agree(self.vocab_size, self.run, runner.run)
        return runner if alike else None

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
            hooked = bool(module._forward_hooks or module._forward_pre_hooks) and module is not head
            state.append((id(module), type(module), hooked))
            state.append("forward" in module.__dict__ and not isinstance(module, nn.Linear))
            state += map(weight_state, module.parameters(recurse=False))
        return state

    def rotary(self, positions: int) -> dict[str, Tensor]:
        """Return the model's rotary tables [positions, half of what is turned]."""
        places = torch.arange(positions)[None]
        rotary, none = self.model.model.rotary_emb, torch.zeros(1, dtype=torch.float32)
        tables = dict[str, Tensor]()
        for end, kind in self.form.rotary.items():
            both = rotary(none, places, *([kind] if kind else []))
            for name, table in zip(TABLES, both, strict=True):
                tables[name + end] = table[0, :, : table.shape[-1] // 2].contiguous()
        return tables


@cache
def folding(n: int, groups: int, folds: int) -> tuple[Tensor, Tensor]:
    """Return which heads the rows of a folded operator have, and which are those of a position.

    Row f n + i of F n has the f-th heads of queries of position i, and its keys and values.

    Args:
        groups: Heads of keys.
        folds: F, heads of queries of each.

    Returns:
        The inputs of a graph, fold i64 [1, F n, 3 groups] among all heads of queries, keys and
        values of n positions, and unfold i64 [1, n, F groups] among the heads of all rows.
    """
    heads, count = folds * groups, torch.arange(groups)
    other = (heads + torch.arange(2 * groups)).expand(folds, -1)
    picks = torch.cat((count * folds + torch.arange(folds)[:, None], other), 1)
    first = torch.arange(n)[:, None] * (heads + 2 * groups)
    rows = torch.arange(folds * n).view(folds, n).T[:, None] * groups + count[:, None]
    return (picks[:, None] + first).view(1, folds * n, -1), rows.reshape(1, n, heads)


def _is_chain(view: TreeView) -> bool:
    """Return whether each query follows the one before."""
    ends = view.positions[0, [0, -1]].tolist()
    return view.related is None or ends[1] - ends[0] == view.positions.shape[1] - 1


def _bias(related: Tensor | None, n: int, slots: int) -> Tensor:
    """Return what is added to the scores of n queries and all slots, [1, 1, n, slots]."""
    bias = torch.zeros(1, 1, n, slots, dtype=torch.float32)
    if related is not None:
        recent = bias[..., slots - related.shape[2] :]
        recent.masked_fill_(~related[:, None], HIDDEN)
    return bias


def _narrowed(bias: Tensor, view: TreeView | None, window: int) -> Tensor:
    """Return a bias that also hides the slots before the window of each query."""
    if view is None or bias.shape[-1] <= window:
        return bias
    slots = torch.arange(bias.shape[-1])
    slots[len(slots) - view.slot_positions.shape[1] :] = view.slot_positions[0]
    outside = view.positions[0, :, None] - slots >= window
    return bias.masked_fill(outside, HIDDEN)
