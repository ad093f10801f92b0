"""A step of one shape over an unmodified model: inputs are copied in, one packet comes out.

    inputs i64 [B, 3 n + 2]: tokens, parents, ancestors (bits), slot of the last committed token,
        generated index of the root; FRESH more columns if the distributions depend on the text,
        see `BatchDistribution`
    packet i64 [B, 3 n]: whether each query was accepted, the target's own token after it, below 0
        if it is uncertain (see `again`), and the bits of the largest score there

The slots of accepted queries move to the front, in order; those of other queries follow.

The same function runs eagerly, compiled, or captured in a CUDA graph and replayed: `FixedStep`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.models.device import is_cuda, out_of_memory, pins
from ragspec.models.supported import AttentionWindow, cache_argument
from ragspec.sampling.batch_distribution import FRESH, BatchDistribution, DistributionShape
from ragspec.types import Cache, PreTrainedModel
from ragspec.verification.reading import Taps
from ragspec.verification.static.buffers import Arena, compact
from ragspec.verification.static.layout import Counters, accepted_first, lay_out

Outputs = TypeVar("Outputs", bound=tuple[object, ...])
Mask = Tensor | dict[str, Tensor]  # one for all layers, or by their kind
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes, as wide as a score


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

    def infinity(self, dtype: torch.dtype) -> int:
        """Return the bits that mark scores which are not finite, for logits of this dtype."""
        if self.distribution is not None and any(self.distribution.penalties):
            dtype = torch.promote_types(dtype, torch.float32)
        bits = torch.tensor(torch.inf, dtype=dtype, device="cpu").view(INTEGERS[dtype.itemsize])
        return int(bits)  # which NaN has, too

    @property
    def width(self) -> int:
        """The columns of the inputs."""
        return 3 * self.queries + 2 + (FRESH if self.reads_texts else 0)


@dataclass(frozen=True, slots=True)
class Masks:
    """The windows of a model's kinds of layers, and whether it takes masks by kind or only one."""

    windows: Mapping[str, AttentionWindow]
    by_name: bool

    def of(self, make: Callable[[AttentionWindow], Tensor]) -> Mask:
        """Return the argument `attention_mask` of the model, with one mask per window."""
        masks = {window: make(window) for window in dict.fromkeys(self.windows.values())}
        if self.by_name:
            return {name: masks[window] for name, window in self.windows.items()}
        return next(iter(masks.values()))


class FixedStep(Generic[Outputs]):
    """A function of fixed shapes over one packet of inputs; subclasses define `run`.

    Its tensors have fixed addresses, so it can be captured in a CUDA graph: then a call is one
    launch.

    Args:
        rows, width: The shape of the packet [B, w].
        name: Names the code of `run` of these shapes, by which dynamo counts them.

    Attributes:
        packet: The inputs of the next call, i64 [B, w].
    """

    def __init__(self, rows: int, width: int, device: torch.device, name: str) -> None:
        self.packet = torch.zeros(rows, width, dtype=torch.int64, device=device)
        # Not bound, as a cycle would hold the buffers; with a code object of its own, by which
        # dynamo counts shapes.
        run: Any = type(self).run
        code, scope = run.__code__.replace(co_name=name), run.__globals__
        self._run: Callable[..., Any] = FunctionType(code, scope, name, None, run.__closure__)
        # Pinned once: pinning memory for every call would cost more than the copy.
        staged = torch.empty(rows, width, dtype=torch.int64, device="cpu", pin_memory=pins(device))
        self._staged, self._values = staged, staged.numpy()
        self._sent = torch.Event(device) if is_cuda(device) else None
        self._pool: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs  # of the captured call

    def compile(self, backend: str) -> None:
        """Compile `run` from now on."""
        self._run = torch.compile(self._run, fullgraph=True, dynamic=False, backend=backend)

    def capture(self, pool: object) -> None:
        """Capture the next call in a CUDA graph over this memory pool, and replay it from then."""
        self._pool = pool

    def send(self, values: NDArray[np.int64]) -> None:
        """Copy the inputs of the next call asynchronously, after any earlier copy has finished."""
        if self._sent is not None:
            self._sent.synchronize()
        self._values[:] = values
        self.packet.copy_(self._staged, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def __call__(self) -> Outputs:
        """Return the outputs for the packet; the caller leases the model."""
        if self._pool is None:
            return self.outputs()
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        return self._outputs

    def outputs(self) -> Outputs:
        """Call `run` once; return its tensors, some may be None."""
        return self._run(self)  # type: ignore[no-any-return]

    def run(self) -> tuple[Tensor, ...]:
        """Return the outputs for the packet, without a copy to the host."""
        raise NotImplementedError

    def _captured(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Selects kernels and allocates memory. Each call writes the same slots again.
            for _ in range(2):
                self.outputs()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._outputs = self.outputs()
        return graph


class StepLogits:
    """A model as a function of tokens and a `step_cache`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._cache = model, cache_argument(model)

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Mask, cache: Cache, **more: Any
    ) -> Tensor:
        """Return the logits [B, n, V] of tokens i64 [B, n]."""
        more |= {"position_ids": positions, "attention_mask": mask, self._cache: cache}
        logits: Tensor = self._model(input_ids=tokens, use_cache=True, **more).logits
        return logits


class StaticStep(FixedStep[tuple[Tensor, Tensor, dict[int, Tensor]]]):
    """One step over the first rows of an arena; see the module.

    Args:
        distributions: The distributions of the B rows, None to compute only logits.
        taps: Records the hidden states that are returned, None for no states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arena: Arena,
        shape: StepShape,
        masks: Masks,
        distributions: BatchDistribution | None,
        taps: Taps | None = None,
    ) -> None:
        from ragspec.verification.model_cache import step_cache  # imports transformers

        rows, n, device = shape.rows, shape.queries, arena.device
        super().__init__(rows, shape.width, device, f"step_{rows}x{n}_of_{shape.slots}")
        self.shape = shape
        self._logits, self._masks, self._buffers = StepLogits(model), masks, arena.buffers
        self._distributions, self._taps = distributions, taps
        self._counters = Counters.of(n, shape.slots, model.dtype, device)
        self._columns = torch.zeros(rows, n, dtype=torch.int64, device=device)
        self._cache = step_cache(arena, rows, shape.slots, self._columns)

    def outputs(self) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return packet and logits (see `run`) and any hidden states [B, n, H], by number."""
        if self._taps is None:
            return (*self._run(self), {})
        with self._taps:
            return (*self._run(self), self._taps.taken())

    def run(self) -> tuple[Tensor, Tensor]:
        """Return the packet and the logits [B, n, V]; keep the accepted paths in the cache."""
        n = self.shape.queries
        tokens, parents, above = (self.packet[:, i * n : (i + 1) * n] for i in range(3))
        last, generated = self.packet[:, 3 * n], self.packet[:, 3 * n + 1]
        layout = lay_out(above, last, self._counters, self._columns)

        def make_mask(window: AttentionWindow) -> Tensor:
            mask = layout.plain_mask(last, self._counters)
            return layout.windowed(mask, self._counters, window)[:, None]

        masks = self._masks.of(make_mask)
        logits = self._logits(tokens, layout.positions, masks, self._cache)
        if self._distributions is None:
            return self.packet, logits
        if self.shape.reads_texts:
            fresh = self.packet[:, 3 * n + 2 :]
            self._distributions.grow(fresh)
            fresh.fill_(self._distributions.size)  # a repeated step does not count them twice
        indices = generated[:, None] + layout.level
        chosen, top = self._distributions.choose(logits, indices, tokens, layout.see)
        bits = top.view(INTEGERS[top.dtype.itemsize])
        if n == 1:  # the root alone, which is accepted
            return torch.cat([self._counters.steps.expand_as(chosen), chosen, bits], -1), logits
        accepted = layout.walk(tokens, parents, chosen)
        compact(self._buffers, layout.columns.gather(1, accepted_first(accepted)), layout.columns)
        return torch.cat([accepted, chosen, bits], -1), logits

    def read(
        self, packet: Tensor, logits: Tensor, rows: Sequence[int]
    ) -> list[tuple[list[int], list[int]]]:
        """Wait for the packet of the last call and resolve uncertain tokens after accepted paths.

        Returns:
            For each of these rows, whether each query was accepted, and the target's own token
            after it, below 0 if the host must compute it.
        """
        n, infinity = self.shape.queries, self.shape.infinity(logits.dtype)
        read, values = [], packet.tolist()
        # The token after the last accepted query; parents come first.
        if any(values[at][n + max(i for i in range(n) if values[at][i])] < 0 for at in rows):
            values = self.again(packet, logits).tolist()
        for at in rows:
            flags, tokens, bits = (values[at][i * n :][:n] for i in range(3))
            pairs = zip(tokens, bits, strict=True)
            read.append((flags, [-1 if b & infinity == infinity else token for token, b in pairs]))
        return read

    @torch.no_grad()
    def again(self, packet: Tensor, logits: Tensor) -> Tensor:
        """Resolve the uncertain tokens of the last call, by filters over the whole vocabulary.

        The accepted paths are extended accordingly. Without memory for that the packet is
        unchanged, and the host resolves node by node.

        Args:
            packet, logits: The output of the last call.

        Returns:
            The new packet.
        """
        assert self._distributions is not None
        n, choose = self.shape.queries, self._distributions.choose
        try:
            tokens, parents, above = (self.packet[:, i * n : (i + 1) * n] for i in range(3))
            layout = lay_out(above, self.packet[:, 3 * n], self._counters, self._columns)
            before, chosen, bits = (packet[:, i * n : (i + 1) * n] for i in range(3))
            indices = self.packet[:, 3 * n + 1, None] + layout.level
            resolved, _ = choose(logits, indices, tokens, layout.see, whole=True)
            chosen = torch.where(chosen < 0, resolved, chosen)
            if n == 1:
                return torch.cat([before, chosen, bits], -1)
            accepted = layout.walk(tokens, parents, chosen)
            places = accepted_first(before).argsort(-1)  # the current slot of each query
            source = places.gather(1, accepted_first(accepted))
            compact(self._buffers, layout.columns.gather(1, source), layout.columns)
            return torch.cat([accepted, chosen, bits], -1)
        except Exception as error:
            if out_of_memory(error):
                return packet
            raise
