"""A target whose steps have fixed shapes and are reused.

off      another target, without such steps
eager    uncompiled steps, for tests and as a fallback
graph    steps captured in a CUDA graph: one launch per step, the same kernels
compile  steps compiled by inductor, which fuses small kernels; on CUDA also captured
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.models.device import is_cuda, out_of_memory
from ragspec.verification.causal import CausalTarget
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.sequence_cache import slot_bytes
from ragspec.verification.static.arena import Arena
from ragspec.verification.static.buffers import LayerShape, Stacks
from ragspec.verification.static.layout import MOST_QUERIES, QUERIES, slots_of
from ragspec.verification.static.session import StaticSession, StepTensors
from ragspec.verification.static.step import CapturedStep, FixedStep, Masks, StaticStep, StepShape
from ragspec.verification.tree_attention import Configs, lease

MOST_SLOTS = 1 << 30
FIRST_BYTES = 256 << 20  # initial keys and values of a session for texts of any length
FIRST_SLOTS = 512  # minimum for each of its rows
Compiler = Callable[[Any], Any]
Make = Callable[[Compiler | None], FixedStep]


class StaticTarget(CausalTarget):
    """A causal model verified by steps of fixed shape; see `open_static` for supported models.

    Args:
        mode: "eager", "graph" or "compile".
        layers: The shapes of the keys and values of each layer.
        backend: The backend of torch.compile.
    """

    def __init__(
        self,
        model: Any,
        mode: str,
        masks: Masks,
        layers: Sequence[tuple[LayerShape, LayerShape]],
        backend: str = "inductor",
    ) -> None:
        super().__init__(model)
        self.static, self.widths = mode, QUERIES
        self.masks, self.layers = masks, tuple(layers)
        self.backend = backend
        self._free: list[Arena] = []
        self._lock = threading.Lock()
        self._pool: Any = None

    def open(self, rows: int, capacity: int) -> StaticSession:
        """Return a session of R empty rows of initially `capacity` slots."""
        return self._session(rows, rows, capacity, None)

    def open_rows(self, prefix_cache: PrefixCache | None = None, most: int = 1) -> StaticSession:
        """Return a session for `most` rows; see `CausalTarget.open_rows`.

        Its first allocation suffices for most texts, because growing takes as long as some steps.
        """
        each = slot_bytes(self.model.config, self.dtype) * most
        slots = max(FIRST_SLOTS, FIRST_BYTES // each)
        slots = slots if self.max_length is None else min(slots, self.max_length)
        return self._session(0, most, slots, prefix_cache)

    def _session(
        self, rows: int, most: int, capacity: int, prefix_cache: PrefixCache | None
    ) -> StaticSession:
        arena = self.lend_arena(most, capacity)
        session = StaticSession(self, self, arena, rows, capacity, prefix_cache)
        # Not at the exit of its block: a session may be entered again.
        weakref.finalize(session, self.take_back, arena).atexit = False
        return session

    def lend_arena(self, rows: int, capacity: int) -> Arena:
        """Return buffers for a session: free ones with their steps if they are large enough."""
        rows = 1 << (rows - 1).bit_length()
        slots = slots_of(capacity + MOST_QUERIES, MOST_SLOTS)
        with self._lock:
            arena = self._free.pop() if self._free else None
        if arena is None or arena.stacks.rows < rows or arena.stacks.slots < slots:
            arena = None  # free its memory before the new allocation
            arena = Arena(Stacks(self.layers, rows, slots))
        self.check_addresses(arena)
        return arena

    def check_addresses(self, arena: Arena) -> None:
        """Discard the steps of an arena if the model's weights have moved."""
        held = itertools.chain(self.model.parameters(), self.model.buffers())
        addresses = hash(tuple(tensor.data_ptr() for tensor in held))
        if arena.addresses != addresses:
            arena.moved()
            arena.addresses = addresses

    def take_back(self, arena: Arena) -> None:
        """Keep the buffers of a finished session for the next one; only one arena is kept."""
        with self._lock:
            self._free = [arena]

    def take_step(
        self,
        arena: Arena,
        shape: StepShape,
        inputs: NDArray[np.int64],
        configs: Configs,
        *,
        hidden: bool,
    ) -> StepTensors:
        """Start a step; see `TakesSteps`."""
        used = shape.distribution is not None
        distributions = arena.distributions[shape.rows].distributions if used else None

        def make(compiler: Compiler | None) -> FixedStep:
            return StaticStep(
                self.model,
                arena.stacks,
                shape,
                self.masks,
                distributions,
                head=self.output_head if hidden else None,
                compiler=compiler,
            )

        packet, logits, states = self.take(arena, (shape, hidden), make, inputs, configs)
        return packet if used else None, logits, states

    def take_again(
        self, arena: Arena, shape: StepShape, packet: Tensor, logits: Tensor, *, hidden: bool
    ) -> Tensor:
        """Return the packet of the last step with uncertain tokens resolved; see `StaticStep`.

        Without memory for that the packet is unchanged, and the host resolves node by node.
        """
        step = arena.steps[(shape, hidden), self.static]
        if isinstance(step, CapturedStep):
            step = step.step
        assert isinstance(step, StaticStep)
        try:
            with torch.no_grad():
                return step.again(packet, logits)
        except Exception as error:
            if out_of_memory(error):
                return packet
            raise

    def take(
        self, arena: Arena, key: Hashable, make: Make, inputs: NDArray[np.int64], configs: Configs
    ) -> tuple[Any, ...]:
        """Run the step of this key over an arena, created on first use; see `FixedStep`.

        If memory runs out, or a step cannot be captured or compiled, all later steps are eager.
        """
        self.check_mode()
        name, key = key, (key, self.static)  # eager steps of the trial are not reused
        sent: FixedStep | None = None
        with lease(self.model, configs), torch.no_grad():
            new = key not in arena.steps
            try:
                step = arena.steps.get(key)
                if step is None:
                    step = arena.steps[key] = self._create(make)
                step.send(inputs)
                sent = step
                return step()
            except Exception as error:
                if self.static == "eager" or not (new or out_of_memory(error)):
                    raise
                reason = _reason(error)
            self.static = "eager"
            key = name, self.static
            warnings.warn(
                f"{reason}; steps are taken one kernel at a time from now on, which is slower. "
                "Open the engine with static='off' where that is faster.",
                RuntimeWarning,
                stacklevel=2,
            )
            arena.steps.clear()
            step = arena.steps[key] = self._create(make)
            if sent is None:
                step.send(inputs)
            else:
                # Not the inputs: the failed step may have passed its new tokens on already.
                step.packet.copy_(sent.packet)
            return step()

    def _create(self, make: Make) -> FixedStep:
        compiler: Compiler | None = None
        if self.static == "compile":
            compiler = partial(torch.compile, fullgraph=True, dynamic=False, backend=self.backend)
        step = make(compiler)
        if self.static == "eager" or not is_cuda(self.device):
            return step
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CapturedStep(step, self._pool)


def _reason(error: Exception) -> str:
    if out_of_memory(error):
        return "memory ended while a step was captured (leave more of it free)"
    first = next(iter(str(error).strip().splitlines()), "")
    return f"a step could not be captured ({type(error).__name__}: {first})"
