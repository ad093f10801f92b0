"""A target whose forwards run on ONNX Runtime.

One position of SmolLM2-135M after 512 tokens takes .56 of the time of transformers, eight take .69
(see `benchmarks/RESULTS.md`). Up to `SEQUENCES` sequences share a forward; in 8 bits each has the
bits that it has alone.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ragspec.models.block_linear import BlockLinear
from ragspec.models.onnx_session import Session
from ragspec.needs import LAST
from ragspec.types import PreTrainedModel
from ragspec.verification.batch import Batch, TreeView
from ragspec.verification.causal import CausalTarget
from ragspec.verification.onnx.bits import Names, Rows, Views, batches_agree, have_same_bits
from ragspec.verification.onnx.form import FOLDED, TABLES, ModelForm
from ragspec.verification.prefix_cache import model_state
from ragspec.verification.sequence_cache import Buffers, SequenceCache
from ragspec.verification.tree_session import TreeSession

HIDDEN = -1e30  # bias of a slot that a query does not see
POSITIONS = 2048  # rows of the first rotary table
FOLD_TO = 16  # most positions of a folded operator
FOLD_FROM = 64  # slots in use for each of them, from which on it is faster
SEQUENCES = 8  # of one forward; each has an operator in each layer, which costs little while idle
_FIRST = torch.zeros(1, 1, dtype=torch.int64)  # a position
_IDLE = TreeView(0, _FIRST, _FIRST, None)  # of an operator without a sequence
SMALL = 256  # numbers of an input that is copied; see `Binding`
Array = npt.NDArray[Any]
Tables = dict[str, Array]


class Binding:
    """The inputs and outputs of a session's next forward.

    Small inputs are written where those of the forward before were: naming an array to the runtime
    takes some 10 us, as long as weights pass through the caches.

    Args:
        inputs: Values that the graph reads and extends in place, by the names of inputs.
    """

    def __init__(self, session: Session, inputs: Mapping[str, object]) -> None:
        self.inner = session.inner.io_binding()
        for name, value in inputs.items():
            self.inner.bind_ortvalue_input(name, value)
            self.inner.bind_ortvalue_output(f"{name}.out", value)
        self._held: dict[str, Array] = {}

    def read(self, name: str, array: Array) -> None:
        """Let the forward read an array as this input."""
        held = self._held.get(name)
        if held is not None and held.shape == array.shape and array.size <= SMALL:
            held[...] = array
        elif held is not array:
            array = array.copy() if array.size <= SMALL else np.ascontiguousarray(array)
            self.inner.bind_cpu_input(name, array)
            self._held[name] = array


class GraphRunner:
    """Runs a graph whose attention is that of `Graph.attention`.

    It computes with NumPy: while weights pass through the caches, a call of torch takes 20 us.

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
        tables: Tables,
        more: Callable[[int], Tables],
        window: int | None = None,
        folds: int = 1,
    ) -> None:
        self.session, self._shape, self.tables, self._more = session, shape, tables, more
        self._window = window
        names = [each.name for each in session.inner.get_inputs()]
        self._operators = [n.partition(".")[2] for n in names if n.startswith("total.")]
        self._folded = [at for at in self._operators if at.startswith(FOLDED)]
        self._plain = [at for at in self._operators if at not in self._folded]
        self._folds, self._trees = folds, "bias.0" in names
        self.fold_from = FOLD_FROM
        self.sequences = len(self._plain or self._folded)
        self._idle = SequenceCache(max(2, folds))  # of an operator without a sequence
        self._bound: WeakKeyDictionary[Buffers, dict[str, Any]] = WeakKeyDictionary()
        self._sizes = {each.name: each.shape for each in session.inner.get_outputs()}
        self._last: tuple[tuple[object, ...], Binding | None] = ((), None)  # buffers and names

    def run(
        self, rows: Rows, views: Views, inputs: Mapping[str, Tensor], names: Names
    ) -> list[Tensor]:
        """Return the outputs with these names of a forward over the next positions of sequences.

        Args:
            inputs: The graph's own.
        """
        every = {name: each.numpy() for name, each in inputs.items()}
        back, caches = list[int](), list[Buffers]()
        folds, unfolds, sizes = list[Array](), list[Array](), list[int]()
        first = start = 0  # of a sequence among all rows, and among those that are attended for
        n = views[0].positions.shape[1]
        # Without slots in use it would ignore the positions.
        few = len(rows) == 1 and n <= FOLD_TO and self.fold_from * n <= rows[0].extent
        which = ((self._folded if few else self._plain) or self._operators)[: len(rows)]
        working = dict(zip(which, zip(rows, views, strict=True), strict=True))
        for at in self._operators:
            row, view = working.get(at, (self._idle, _IDLE))
            there, positions = at in working, view.positions.numpy()
            count = length = positions.shape[1]
            if at in self._folded:
                places = self._places_folded(row, view)
                fold, unfold = folding(count, self._shape[1], self._folds)
                folds.append(fold + first * (there * self._shape[1] * (self._folds + 2)))
                if there or self._plain:
                    unfolds.append(unfold + sum(sizes) * self._shape[1])
                sizes.append(count * self._folds)
            else:
                attend = np.arange(first, first + count) if there else positions[0]
                if count == 1 and not self._trees:  # as wide as chains of the same bits
                    attend, positions = attend.repeat(2), np.concatenate([positions] * 2, 1)
                    positions[0, 1] += 1
                    row.reserve(2)
                places, length = self._places(row, positions) | {"attend": attend}, len(attend)
                if self._trees:
                    places |= self._biases(view, int(places["total"][0]))
            every |= {f"{name}.{at}": each for name, each in places.items()}
            caches.append(row.buffers)
            if there:
                back += range(start, start + count)
                first += count
            start += length
        if folds:
            every |= {"fold": np.concatenate(folds, 1), "unfold": np.concatenate(unfolds, 1)}
        if len(folds) > 1:
            every["sizes"] = np.array(sizes)
        if self._plain:
            every["back"] = np.array(back)
        return self._outputs(every, caches, names, first)

    def _places_folded(self, row: SequenceCache, view: TreeView) -> dict[str, Array]:
        """Return the inputs of a folded operator, whose rows fill more slots than are used."""
        folds, n = self._folds, view.positions.shape[1]
        if view.related is None and n > 1:
            view = replace(view, related=torch.ones(1, n, n, dtype=torch.bool).tril())
        row.reserve(n * folds)
        places = self._places(row, np.concatenate([view.positions.numpy()] * folds, 1))
        size = 1, 1, folds * n, row.extent + folds * n
        for name, bias in self._biases(view, row.extent + n).items():
            places[name] = np.full(size, HIDDEN, np.float32)
            places[name].reshape(folds, n, size[-1])[..., : bias.shape[-1]] = bias[0]
        return places

    def _biases(self, view: TreeView, slots: int) -> dict[str, Array]:
        """Return what is added to the scores of n queries and all slots, [1, 1, n, slots]."""
        bias = np.zeros((1, 1, view.positions.shape[1], slots), np.float32)
        if view.related is not None:
            hidden = ~view.related[:, None].numpy()
            bias[..., slots - hidden.shape[3] :][hidden] = HIDDEN
        if self._window is None:
            return {"bias": bias}
        at, narrow = np.arange(slots), bias.copy()  # without the slots before the window
        at[slots - view.slot_positions.shape[1] :] = view.slot_positions[0].numpy()
        narrow[..., view.positions[0, :, None].numpy() - at >= self._window] = HIDDEN
        return {"bias": bias, "narrow": narrow}

    def _places(self, row: SequenceCache, positions: Array) -> dict[str, Array]:
        """Return the inputs of an operator of whose sequence n slots are next."""
        if not row.buffers.keys:
            layers, heads, width = self._shape
            none = torch.empty(1, heads, 0, width, dtype=torch.float32)
            for layer in range(layers):
                row.buffers.write(layer, 0, none, none)
        end = row.extent + positions.shape[1]
        if (most := max(int(positions.max()) + 1, end)) > len(self.tables["cosines"]):
            self.tables = self._more(2 * most)  # slots of folded heads count, too
        total = np.array([end, end - 1], dtype=np.int32)
        return {"positions": positions, "total": total[:1], "last": total[1:]}

    def _outputs(
        self, inputs: Mapping[str, Array], caches: Sequence[Buffers], names: Names, positions: int
    ) -> list[Tensor]:
        """Run the session, which extends the buffers; return the outputs with these names."""
        sizes = {"S": positions, "k": len(inputs["rows"])}
        shapes = ([sizes.get(size, size) for size in self._sizes[name]] for name in names)
        outputs = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
        key = (*map(ref, caches), *names)
        (last, binding), self._last = self._last, ((), None)  # a forward of another thread has none
        if binding is None or last != key:
            pairs = zip(self._operators, map(self._values, caches), strict=True)
            bound = {f"{name}.{at}": each for at, values in pairs for name, each in values.items()}
            binding = Binding(self.session, bound)
        for name, array in {**inputs, **self.tables}.items():
            binding.read(name, array)
        results = [self.session.value(output.numpy()) for output in outputs]  # not held by it
        for name, result in zip(names, results, strict=True):
            binding.inner.bind_ortvalue_output(name, result)
        self.session.inner.run_with_iobinding(binding.inner)
        self._last = key, binding
        return outputs

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
        return OnnxTarget, (self.model,), {"probed": self.probed}

    @property
    def runtime(self) -> str:
        """The runtime of forwards: "onnx", or "torch" if weights have changed."""
        return "onnx" if self.runs_alone() else "torch"

    def runs_alone(self, taps: Iterable[int] = ()) -> bool:
        """Return whether a forward needs no module; see `CausalTarget`."""
        return self._unchanged and all(tap in self._outputs or not tap for tap in taps)

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
        taps, n = batch.taps, tokens.shape[1]
        heard: Collection[int] = () if taps is None else taps.modules
        if not self.runs_alone(heard):
            return super().forward(tokens, batch, keep)
        rows = torch.from_numpy(np.arange(n - keep, n)) if isinstance(keep, int) else keep
        read = rows if taps is None or taps.selected is None else rows[taps.selected]
        names = {tap: self._outputs[tap] for tap in heard if tap}
        outputs = self.run(batch.rows, batch.views, tokens, read, (*names.values(), "logits"))
        if taps is not None:
            taps.states = dict(zip(names, outputs, strict=False))
            if LAST in heard:
                taps.states[LAST] = taps.states[LAST][:, rows]
            if 0 in heard:
                taps.states[0] = self.embed(tokens) * self.form.embedding
        batch.advance()
        return outputs[-1]

    def run(
        self, rows: Rows, views: Views, tokens: Tensor, read: Tensor, names: Names
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

    def _run_by(self, session: Session, tables: Tables) -> GraphRunner:
        """Return what runs a session, whose first rotary tables are these."""
        shape = self.config.num_hidden_layers, self.config.num_key_value_heads, self._width
        folds = self.config.num_attention_heads // self.config.num_key_value_heads
        return GraphRunner(session, shape, tables, self.rotary, self.form.window, folds)

    def _open_session(self, sequences: int) -> Session:
        """Return a session over the model's weights, of which it has a packed copy; see `Graph`."""
        from ragspec.verification.onnx.graph import build_graph, in_onnx

        graph = build_graph(self.model, sequences, int(sequences == 1), not self.chains)
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
        """The runner for several sequences, opened by the first; None if it changes bits."""
        runner = self._open_batch()
        if runner is None or not self.chains:
            return runner
        return runner if batches_agree(self.vocab_size, self.run, runner.run) else None

    def _open_batch(self) -> GraphRunner | None:
        """Return what runs several sequences, before its bits are compared; None without it."""
        return self._run_by(self._open_session(SEQUENCES), self._runner.tables)

    @cached_property
    def _outputs(self) -> dict[int, str]:
        """The outputs of the graph that are hidden states, by number."""
        names = [output.name for output in self._runner.session.inner.get_outputs()]
        matches = [(re.fullmatch(r"layer(\d+)\.before\.sum", name), name) for name in names]
        return {int(match[1]): name for match, name in matches if match} | {LAST: "states"}

    def _look(self) -> list[object]:
        """Return what shows changes of the model."""
        return model_state(self.loaded)

    def rotary(self, positions: int) -> Tables:
        """Return the model's rotary tables [positions, half of what is turned]."""
        places, tables = torch.arange(positions, dtype=torch.float32)[:, None], Tables()
        for end, each in self.frequencies.items():
            angles = places * each[:-1]
            for name, table in zip(TABLES, (angles.cos(), angles.sin()), strict=True):
                tables[name + end] = (table * each[-1]).numpy()
        return tables

    @cached_property
    def frequencies(self) -> dict[str, Tensor]:
        """The frequencies and the factor of each rotary table, [f + 1], by the end of its name."""
        rotary, frequencies = self.model.model.rotary_emb, dict[str, Tensor]()
        for end, kind in self.form.rotary.items():
            start = f"{kind}_" if kind else ""
            factor = torch.tensor([getattr(rotary, f"{start}attention_scaling")])
            frequencies[end] = torch.cat((getattr(rotary, f"{start}inv_freq"), factor)).float()
        return frequencies


@cache
def folding(n: int, groups: int, folds: int) -> tuple[Array, Array]:
    """Return which heads the rows of a folded operator have, and which are those of a position.

    Row f n + i of F n has the f-th heads of queries of position i, and its keys and values.

    Args:
        groups: Heads of keys.
        folds: F, heads of queries of each.

    Returns:
        The inputs of a graph, fold i64 [1, F n, 3 groups] among all heads of queries, keys and
        values of n positions, and unfold i64 [1, n, F groups] among the heads of all rows.
    """
    heads, count = folds * groups, np.arange(groups)
    other = np.broadcast_to(heads + np.arange(2 * groups), (folds, 2 * groups))
    picks = np.concatenate((count * folds + np.arange(folds)[:, None], other), 1)
    first = np.arange(n)[:, None] * (heads + 2 * groups)
    rows = np.arange(folds * n).reshape(folds, n).T[:, None] * groups + count[:, None]
    return (picks[:, None] + first).reshape(1, folds * n, -1), rows.reshape(1, n, heads)
