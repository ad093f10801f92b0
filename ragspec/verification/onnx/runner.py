"""Forwards of one sequence through a graph that extends the sequence's keys and values in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ragspec.models.quantized import Session
from ragspec.verification.sequence_cache import Buffers, SequenceCache
from ragspec.verification.tree_attention import TreeView

HIDDEN = -1e30  # bias of a slot that a query does not see
Tables = Callable[[int], dict[str, Tensor]]


class GraphRunner:
    """Runs a graph whose attention is that of `Graph.attention`.

    Args:
        shape: Layers, heads of keys, and width of a head.
        tables: The first rotary tables, `cosines` and `sines` [P, width / 2].
        more: Returns tables of so many positions.
    """

    def __init__(
        self, session: Session, shape: tuple[int, int, int], tables: dict[str, Tensor], more: Tables
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


def _bias(view: TreeView, n: int, slots: int) -> Tensor:
    """Return what is added to the scores of n queries and all slots, [1, 1, n, slots]."""
    bias = torch.zeros(1, 1, n, slots, dtype=torch.float32)
    if view.related is not None:
        recent = bias[..., slots - view.related.shape[2] :]
        recent.masked_fill_(~view.related[:, None], HIDDEN)
    return bias
