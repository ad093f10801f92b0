"""Forwards of a graph whose attention is that of `Graph.attention`, in NumPy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ragspec.models.onnx_session import Session
from ragspec.verification.batch import TreeView
from ragspec.verification.onnx.bits import Names, Rows, Views
from ragspec.verification.onnx.form import FOLDED
from ragspec.verification.sequence_cache import Buffers, SequenceCache

HIDDEN = -1e30  # bias of a slot that a query does not see
FOLD_TO = 16  # most positions of a folded operator
FOLD_FROM = 64  # slots in use for each of them, from which on it is faster
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
