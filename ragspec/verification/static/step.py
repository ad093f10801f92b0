"""A step of one shape over an unmodified model: inputs are copied in, one packet comes out.

    inputs i64 [B, 3 n + 2]: tokens, parents, ancestors (bits), slot of the last committed token,
        generated index of the root; FRESH columns more where texts matter to distributions: see
        `RequestDistributions`
    packet i64 [B, 2 n]: whether each query was kept, and the target's own token after it, below 0
        where it is not certain: see `again`

What is kept comes to lie first, in order, and the other queries behind that.

The same function runs eagerly, compiled, or captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.models.supported import AttentionWindow
from ragspec.sampling.batch_distribution import BatchDistribution, DistributionShape
from ragspec.sampling.distribution import TokenDistribution
from ragspec.verification.static.buffers import Stacks, Staging, compact, step_cache
from ragspec.verification.static.layout import (
    MOST_QUERIES,
    Counters,
    accepted_first,
    lay_out,
    step_mask,
    walk,
)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step is made for: rows B, queries of each n, slots S, and how its tokens are chosen.

    distribution: what the distributions ask for; None: logits alone are made, the host judges.
    """

    rows: int
    queries: int
    slots: int
    distribution: DistributionShape | None = None

    @property
    def reads_texts(self) -> bool:
        """Whether the distributions want to know what the texts gained."""
        return self.distribution is not None and self.distribution.penalties.texts

    @property
    def width(self) -> int:
        """The columns of what is given."""
        return 3 * self.queries + 2 + (FRESH if self.reads_texts else 0)


@dataclass(frozen=True, slots=True)
class Masks:
    """How a model takes its masks: the windows of its kinds of layer, by name or as one tensor."""

    windows: Mapping[str, AttentionWindow]
    by_name: bool

    def of(self, make: Callable[[AttentionWindow], Any]) -> Any:
        """Return what the model is given as `attention_mask`."""
        masks: dict[AttentionWindow, Any] = {}
        for window in self.windows.values():
            if window not in masks:
                masks[window] = make(window)
        if self.by_name:
            return {name: masks[window] for name, window in self.windows.items()}
        return next(iter(masks.values()))


class FixedStep(Protocol):
    """A step that can be captured: it reads `packet` and buffers that never move."""

    packet: Tensor

    def send(self, values: NDArray[np.int64]) -> None:
        """Let the next step be that of these values of `packet`; nobody waits."""

    def __call__(self) -> tuple[Any, ...]:
        """Take the step; the model is lent by the caller. Returns tensors, or None for some."""


class StaticStep:
    """One step over the first rows of the stacks; see the module.

    distributions: of the B rows, None for logits alone. head: the module whose inputs are kept as
    `states`, None for none. compiler: makes a callable out of a function, None to run it as it is.
    """

    def __init__(
        self,
        model: Any,
        stacks: Stacks,
        shape: StepShape,
        masks: Masks,
        distributions: BatchDistribution | None,
        head: torch.nn.Module | None = None,
        compiler: Callable[[Any], Any] | None = None,
    ) -> None:
        self.shape = shape
        self._model, self._stacks, self._masks = model, stacks, masks
        self._distributions, self._head = distributions, head
        device = stacks.buffers[0].device
        rows, n = shape.rows, shape.queries
        self.packet = torch.zeros(rows, shape.width, dtype=torch.int64, device=device)
        self._staging = Staging(self.packet)
        self._counters = Counters.of(n, shape.slots, model.dtype, device)
        self._columns = torch.zeros(rows, n, dtype=torch.int64, device=device)
        self._cache = step_cache(stacks, rows, shape.slots, self._columns)
        self._states: Tensor | None = None
        self._run = private_code(StaticStep.run, f"step_{rows}x{n}_of_{shape.slots}").__get__(self)
        if compiler is not None:
            self._run = compiler(self._run)

    def send(self, values: NDArray[np.int64]) -> None:
        """Let the next step be that of these values of `packet`; nobody waits."""
        self._staging.send(values)

    def __call__(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Take the step that `packet` says: packet, logits (see `run`) and what the head read.

        The model is to be lent by the caller.
        """
        hook = None if self._head is None else self._head.register_forward_pre_hook(self._take)
        try:
            result: tuple[Tensor, Tensor] = self._run()
        finally:
            if hook is not None:
                hook.remove()
        return *result, self._states

    def again(self, packet: Tensor, logits: Tensor) -> Tensor:
        """Return the packet of a step that was taken, with its tokens certain.

        packet, logits: the step's own. Filters look at the whole vocabulary; the accepted paths go
        on from where the first ones ended.
        """
        assert self._distributions is not None
        n = self.shape.queries
        layout = lay_out(
            self.packet[:, 2 * n : 3 * n], self.packet[:, 3 * n], self._counters, self._columns
        )
        tokens, parents = self.packet[:, :n], self.packet[:, n : 2 * n]
        before, known = packet[:, :n], packet[:, n:]
        indices = self.packet[:, 3 * n + 1, None] + layout.level
        result = self._distributions.choose(logits, indices, tokens, layout.see, whole=True)
        chosen = torch.where(known < 0, result, known)
        if n == 1:
            return torch.cat([before, chosen], -1)
        accepted = walk(layout, tokens, parents, chosen)
        row_order = accepted_first(before).argsort(
            -1
        )  # of each query its place among those that were kept
        source = row_order.gather(1, accepted_first(accepted))
        compact(self._stacks, layout.columns.gather(1, source), layout.columns)
        return torch.cat([accepted, chosen], -1)

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the packet and the logits [B, n, V]; accepted paths are kept in the cache."""
        n = self.shape.queries
        tokens, parents, above = (self.packet[:, i * n : (i + 1) * n] for i in range(3))
        last, generated = self.packet[:, 3 * n], self.packet[:, 3 * n + 1]
        layout = lay_out(above, last, self._counters, self._columns)

        def mask(window: AttentionWindow) -> Tensor:
            return step_mask(layout, last, self._counters, window)

        logits = self._model(
            input_ids=tokens,
            position_ids=layout.positions,
            attention_mask=self._masks.of(mask),
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        if self._distributions is None:
            return self.packet, logits
        if self.shape.reads_texts:
            fresh = self.packet[:, 3 * n + 2 :]
            self._distributions.grow(fresh)
            fresh.fill_(self._distributions.size)  # taken again, the step does not count them twice
        indices = generated[:, None] + layout.level
        chosen = self._distributions.choose(logits, indices, tokens, layout.see)
        if n == 1:
            return torch.cat([torch.ones_like(chosen), chosen], -1), logits
        accepted = walk(layout, tokens, parents, chosen)
        compact(self._stacks, layout.columns.gather(1, accepted_first(accepted)), layout.columns)
        return torch.cat([accepted, chosen], -1), logits

    def _take(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        self._states = arguments[0]


class CapturedStep:
    """A step captured in a CUDA graph: taking it is one launch.

    The first call runs the step itself, so that kernels are chosen and what it needs is there.
    """

    def __init__(self, step: FixedStep, pool: Any) -> None:
        self.step = step
        self.packet = step.packet
        self._pool = pool
        self._graph: Any = None
        self._matches: tuple[Any, ...] | None = None

    def send(self, values: NDArray[np.int64]) -> None:
        """Let the next step be that of these values; see `FixedStep`."""
        self.step.send(values)

    def __call__(self) -> tuple[Any, ...]:
        """Take the step that `packet` says; see `FixedStep`."""
        if self._graph is None:
            self._capture()
        self._graph.replay()
        assert self._matches is not None
        return self._matches

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # The slots beyond the texts are written again, so that the last is as the only one.
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._matches = self.step()
        self._graph = graph


def private_code(function: Any, name: str) -> Any:
    """Return a function of a code object of its own: compiled shapes are counted by these."""
    code: CodeType = function.__code__
    instance = FunctionType(
        code.replace(co_name=name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )
    return instance


FRESH = MOST_QUERIES  # tokens that a text may gain by one step
_NOTHING = -1


class RequestDistributions:
    """Row distributions, and how much of each text they know; `notify` is called before every step.

    fresh i64 [B, FRESH]: what the texts have gained, to be told by the step; elsewhere the number
    of tokens that there are, which is none of them.
    """

    def __init__(self, distributions: BatchDistribution, rows: int) -> None:
        self.distributions = distributions
        self.fresh: NDArray[np.int64] = np.full((rows, FRESH), distributions.size)
        self._held: list[TokenDistribution | None] = [None] * rows
        self._known = [0] * rows  # tokens of each text

    def notify(
        self, rows: Mapping[int, tuple[TokenDistribution, Sequence[int]]]
    ) -> DistributionShape:
        """Let the next step go by these distributions and texts, and all other rows be padding.

        Rows keep what they know: of a text that goes on its new tokens alone are told.
        """
        self.fresh[:] = self.distributions.size
        late: dict[int, Sequence[int]] = {}
        for row, (held, known) in enumerate(zip(self._held, self._known, strict=True)):
            distribution, text = rows.get(row, (None, ()))
            if distribution is not held or known == _NOTHING:
                self.distributions.set(row, distribution, text)
                self._held[row], self._known[row] = distribution, len(text)
            elif len(text) > known:
                new = text[known:]
                if len(new) > FRESH:
                    late[row] = new
                else:
                    self.fresh[row, : len(new)] = new
                self._known[row] = len(text)
        if late and self.distributions.shape.penalties.texts:
            self._grow(late)
        return self.distributions.shape

    def forget(self) -> None:
        """Tell all again before the next step, as the last one may not have been taken."""
        self._known = [_NOTHING] * len(self._known)

    def _grow(self, late: Mapping[int, Sequence[int]]) -> None:
        """Tell of texts that went on elsewhere for a while, at once."""
        tokens = np.full((len(self._held), max(map(len, late.values()))), self.distributions.size)
        for row, new in late.items():
            tokens[row, : len(new)] = new
        self.distributions.grow(torch.from_numpy(tokens).to(self.distributions.device))
