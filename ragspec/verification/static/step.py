"""A step of one shape over an unmodified model: inputs are copied in, one packet comes out.

    inputs i64 [B, 3 n + 2]: tokens, parents, ancestors (bits), slot of the last committed token,
        generated index of the root; FRESH more columns if the distributions depend on the text,
        see `RequestDistributions`
    packet i64 [B, 2 n]: whether each query was accepted, and the target's own token after it, below
        0 if it is uncertain: see `again`

The slots of accepted queries move to the front, in order; those of other queries follow.

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
    plain_mask,
    walk,
    windowed,
)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The shape of a step: rows B, queries per row n, slots S, and the choice of tokens.

    Attributes:
        distribution: The features of the distributions. None: the step only computes logits, and
            the host chooses tokens.
    """

    rows: int
    queries: int
    slots: int
    distribution: DistributionShape | None = None

    @property
    def reads_texts(self) -> bool:
        """Whether the distributions need the new tokens of the texts."""
        return self.distribution is not None and self.distribution.penalties.reads_texts

    @property
    def width(self) -> int:
        """The columns of the inputs."""
        return 3 * self.queries + 2 + (FRESH if self.reads_texts else 0)


@dataclass(frozen=True, slots=True)
class Masks:
    """The windows of a model's kinds of layers, and whether it takes masks by kind or only one."""

    windows: Mapping[str, AttentionWindow]
    by_name: bool

    def of(self, make: Callable[[AttentionWindow], Any]) -> Any:
        """Return the argument `attention_mask` of the model, with one mask per window."""
        masks = {window: make(window) for window in dict.fromkeys(self.windows.values())}
        if self.by_name:
            return {name: masks[window] for name, window in self.windows.items()}
        return next(iter(masks.values()))


class FixedStep(Protocol):
    """A step that can be captured: `packet` and its buffers have fixed addresses."""

    packet: Tensor

    def send(self, values: NDArray[np.int64]) -> None:
        """Copy the inputs of the next step to `packet`, asynchronously."""

    def __call__(self) -> tuple[Any, ...]:
        """Run the step on `packet`; return tensors, some may be None. The caller holds a lease."""


class StaticStep:
    """One step over the first rows of the stacks; see the module.

    Args:
        distributions: The distributions of the B rows, None to compute only logits.
        head: The module whose inputs are returned as hidden states, None for no states.
        compiler: Compiles a function, None to run it uncompiled.
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
        """Copy the inputs of the next step; see `FixedStep`."""
        self._staging.send(values)

    def __call__(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the step; return packet and logits (see `run`) and hidden states; see `FixedStep`."""
        hook = None if self._head is None else self._head.register_forward_pre_hook(self._take)
        try:
            packet, logits = self._run()
        finally:
            if hook is not None:
                hook.remove()
        return packet, logits, self._states

    def again(self, packet: Tensor, logits: Tensor) -> Tensor:
        """Resolve the uncertain tokens of the last step, by filters over the whole vocabulary.

        The accepted paths are extended accordingly.

        Args:
            packet, logits: The output of the last step.

        Returns:
            The new packet.
        """
        assert self._distributions is not None
        n = self.shape.queries
        layout = lay_out(
            self.packet[:, 2 * n : 3 * n], self.packet[:, 3 * n], self._counters, self._columns
        )
        tokens, parents = self.packet[:, :n], self.packet[:, n : 2 * n]
        before, chosen = packet[:, :n], packet[:, n:]
        indices = self.packet[:, 3 * n + 1, None] + layout.level
        resolved = self._distributions.choose(logits, indices, tokens, layout.see, whole=True)
        chosen = torch.where(chosen < 0, resolved, chosen)
        if n == 1:
            return torch.cat([before, chosen], -1)
        accepted = walk(layout, tokens, parents, chosen)
        places = accepted_first(before).argsort(-1)  # the current slot of each query
        source = places.gather(1, accepted_first(accepted))
        compact(self._stacks, layout.columns.gather(1, source), layout.columns)
        return torch.cat([accepted, chosen], -1)

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the packet and the logits [B, n, V]; keep the accepted paths in the cache."""
        n = self.shape.queries
        tokens, parents, above = (self.packet[:, i * n : (i + 1) * n] for i in range(3))
        last, generated = self.packet[:, 3 * n], self.packet[:, 3 * n + 1]
        layout = lay_out(above, last, self._counters, self._columns)

        def make_mask(window: AttentionWindow) -> Tensor:
            mask = plain_mask(layout, last, self._counters)
            return windowed(mask, layout, self._counters, window)[:, None]

        logits = self._model(
            input_ids=tokens,
            position_ids=layout.positions,
            attention_mask=self._masks.of(make_mask),
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        if self._distributions is None:
            return self.packet, logits
        if self.shape.reads_texts:
            fresh = self.packet[:, 3 * n + 2 :]
            self._distributions.grow(fresh)
            fresh.fill_(self._distributions.size)  # a repeated step does not count them twice
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
    """A step captured in a CUDA graph, so that each run is one launch.

    The first call runs the step before the capture, so that kernels are selected and memory is
    allocated.
    """

    def __init__(self, step: FixedStep, pool: Any) -> None:
        self.step = step
        self.packet = step.packet
        self._pool = pool
        self._graph: Any = None
        self._outputs: tuple[Any, ...] = ()

    def send(self, values: NDArray[np.int64]) -> None:
        """Copy the inputs of the next step; see `FixedStep`."""
        self.step.send(values)

    def __call__(self) -> tuple[Any, ...]:
        """Replay the step; see `FixedStep`."""
        if self._graph is None:
            self._capture()
        self._graph.replay()
        return self._outputs

    def _capture(self) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Each run writes the same slots again, so only the last one counts.
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._outputs = self.step()
        self._graph = graph


def private_code(function: Any, name: str) -> Any:
    """Return a copy of a function with its own code object, by which dynamo counts shapes."""
    code: CodeType = function.__code__
    return FunctionType(
        code.replace(co_name=name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )


FRESH = MOST_QUERIES  # new tokens that a step can pass to the distributions of a row
_NOTHING = -1


class RequestDistributions:
    """The distributions of a batch, updated with new tokens; call `notify` before every step.

    Attributes:
        fresh: New tokens of each text, an input of the step, i64 [B, FRESH]. The vocabulary size,
            which is no token, pads the rows.
    """

    def __init__(self, distributions: BatchDistribution, rows: int) -> None:
        self.distributions = distributions
        self.fresh: NDArray[np.int64] = np.full((rows, FRESH), distributions.size)
        self._held: list[TokenDistribution | None] = [None] * rows
        self._known = [0] * rows  # tokens of each text that its distribution has

    def notify(
        self, rows: Mapping[int, tuple[TokenDistribution, Sequence[int]]]
    ) -> DistributionShape:
        """Set the distributions and texts of the next step. All other rows are padding.

        If a row keeps its distribution, only the new tokens of its text are passed on.
        """
        self.fresh[:] = self.distributions.size
        late: dict[int, Sequence[int]] = {}
        for row, (held, count) in enumerate(zip(self._held, self._known, strict=True)):
            distribution, text = rows.get(row, (None, ()))
            if distribution is not held or count == _NOTHING:
                self.distributions.set(row, distribution, text)
                self._held[row], self._known[row] = distribution, len(text)
            elif len(text) > count:
                new = text[count:]
                if len(new) > FRESH:
                    late[row] = new
                else:
                    self.fresh[row, : len(new)] = new
                self._known[row] = len(text)
        if late and self.distributions.shape.penalties.reads_texts:
            self._grow(late)
        return self.distributions.shape

    def forget(self) -> None:
        """Pass all tokens again before the next step, because the last one may not have run."""
        self._known = [_NOTHING] * len(self._known)

    def _grow(self, late: Mapping[int, Sequence[int]]) -> None:
        """Pass more than FRESH new tokens of texts at once."""
        tokens = np.full((len(self._held), max(map(len, late.values()))), self.distributions.size)
        for row, new in late.items():
            tokens[row, : len(new)] = new
        self.distributions.grow(torch.from_numpy(tokens).to(self.distributions.device))
