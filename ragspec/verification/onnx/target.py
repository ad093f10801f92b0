"""A target whose forwards run on ONNX Runtime.

One position of SmolLM2-135M after 512 tokens takes .56 of the time of transformers, eight take .69
(see `benchmarks/RESULTS.md`). Up to `SEQUENCES` sequences share a forward; in 8 bits each has the
bits that it has alone.
"""

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragspec.models.block_linear import BlockLinear
from ragspec.models.onnx_session import Session
from ragspec.needs import LAST
from ragspec.types import PreTrainedModel
from ragspec.verification.batch import Batch
from ragspec.verification.causal import CausalTarget
from ragspec.verification.onnx.bits import Names, Rows, Views, batches_agree, have_same_bits
from ragspec.verification.onnx.form import TABLES, ModelForm
from ragspec.verification.onnx.runner import GraphRunner, Tables
from ragspec.verification.prefix_cache import model_state
from ragspec.verification.tree_session import TreeSession

POSITIONS = 2048  # rows of the first rotary table
SEQUENCES = 8  # of one forward; each has an operator in each layer, which costs little while idle


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
            usual, self._runner.fold_from = self._runner.fold_from, 1
            self.same_bits = have_same_bits(self, self.run)
            self._runner.fold_from = usual

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
