"""Runs the steps of fixed shape of one model, and keeps their buffers from session to session.

off      no such steps
eager    uncompiled steps, for tests and as a fallback
graph    steps captured in a CUDA graph: one launch per step, the same kernels
compile  steps compiled by inductor, which fuses small kernels; on CUDA also captured
"""

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.models.device import is_cuda, out_of_memory
from ragspec.types import PreTrainedModel
from ragspec.verification.sequence_cache import slot_bytes
from ragspec.verification.static.buffers import Arena
from ragspec.verification.static.layout import MOST_QUERIES, slots_of
from ragspec.verification.static.step import FixedStep, Masks, Outputs
from ragspec.verification.tree_attention import Configs, lease

MOST_SLOTS = 1 << 30
FIRST_BYTES = 256 << 20  # initial keys and values of a session for texts of any length
FIRST_SLOTS = 512  # minimum for each of its rows


class StepRunner:
    """The steps of fixed shape of one model; see `open_static` for supported models.

    Args:
        mode: "eager", "graph" or "compile".
        layers: See `Arena`.
        backend: The backend of torch.compile.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mode: str,
        masks: Masks,
        layers: Sequence[tuple[Tensor, Tensor]],
        backend: str = "inductor",
    ) -> None:
        self.model, self.mode, self.masks = model, mode, masks
        self.dtype: torch.dtype = model.dtype
        self.device = layers[0][0].device
        self._layers, self._backend = tuple(layers), backend
        self._free: list[Arena] = []
        self._lock = threading.Lock()
        self._pool: Any = None  # of the memory of graphs
        self._captured = weakref.WeakSet[FixedStep[Any]]()

    def first_slots(self, rows: int) -> int:
        """Return the slots of each row that suffice for most texts: growing costs some steps."""
        each = slot_bytes(self.model.config, self.model.dtype) * rows
        return max(FIRST_SLOTS, FIRST_BYTES // each)

    def lend_arena(self, borrower: object, rows: int, capacity: int) -> Arena:
        """Return the arena of a borrower, until that is collected by the garbage collector.

        The last free arena that is large enough is reused with its steps. The last free one is
        kept, and more while all of them are small: draft models have one for each text.
        """
        rows = 1 << (rows - 1).bit_length()
        slots = slots_of(capacity + MOST_QUERIES, MOST_SLOTS)
        with self._lock:
            large = [each for each in self._free if each.rows >= rows and each.slots >= slots]
            if self._free:  # one that is too small makes room for the new one
                self._free.remove(large[-1] if large else self._free[0])
        arena = large[-1] if large else Arena(self._layers, rows, slots)
        for cache in arena.caches:
            cache.truncate(0)
        self.check_addresses(arena)
        weakref.finalize(borrower, self._take_back, arena).atexit = False
        return arena

    def check_addresses(self, arena: Arena) -> None:
        """Discard the steps of an arena if the model's weights have moved."""
        held = itertools.chain(self.model.parameters(), self.model.buffers())
        addresses = hash(tuple(tensor.data_ptr() for tensor in held))
        if arena.addresses != addresses:
            arena.discard_steps()
            arena.addresses = addresses

    def take(
        self,
        arena: Arena,
        key: Hashable,
        make: Callable[[], FixedStep[Outputs]],
        inputs: NDArray[np.int64],
        configs: Configs,
    ) -> tuple[FixedStep[Outputs], Outputs]:
        """Start the step of this key over an arena, without waiting for an accelerator.

        If memory runs out, or a step cannot be captured or compiled, all later steps are eager.

        Args:
            make: Returns the step on its first use.

        Returns:
            The step and its outputs, which the next call overwrites.
        """
        name, key = key, (key, self.mode)  # eager steps of the trial are not reused
        sent: FixedStep[Outputs] | None = None
        with lease(self.model, configs), torch.no_grad():
            new = key not in arena.steps
            try:
                step = arena.steps.get(key)
                if step is None:
                    step = arena.steps[key] = self._create(make)
                step.send(inputs)
                sent = step
                return step, step()
            except Exception as error:
                if self.mode == "eager" or not (new or out_of_memory(error)):
                    raise
                first = next(iter(str(error).strip().splitlines()), "")
                reason = f"a step could not be captured ({type(error).__name__}: {first})"
                if out_of_memory(error):
                    reason = "memory ended while a step was captured (leave more of it free)"
            self.mode = "eager"
            warnings.warn(
                f"{reason}; steps are taken one kernel at a time from now on, which is slower. "
                "Open the engine with static='off' where that is faster.",
                RuntimeWarning,
                stacklevel=2,
            )
            arena.steps.clear()
            step = arena.steps[name, self.mode] = self._create(make)
            if sent is None:
                step.send(inputs)
            else:
                # Not the inputs: the failed step may have passed its new tokens on already.
                step.packet.copy_(sent.packet)
            return step, step()

    def _create(self, make: Callable[[], FixedStep[Outputs]]) -> FixedStep[Outputs]:
        step = make()
        if self.mode == "compile":
            step.compile(self._backend)
        if self.mode != "eager" and is_cuda(step.packet.device):
            if not self._captured:  # torch frees a pool with its last graph, and takes no more in
                self._pool = torch.cuda.graph_pool_handle()
            self._captured.add(step)
            step.capture(self._pool)
        return step

    def _take_back(self, arena: Arena) -> None:
        with self._lock:
            self._free.append(arena)
            while len(self._free) > 1 and sum(each.bytes for each in self._free) > FIRST_BYTES:
                self._free.pop(0)
