"""Linear weights of a model on the CPU, kept once more in the layout that its fast kernels read.

For the few positions of a draft tree BLAS spends much of a product on rearranging the weights, at
every call; oneDNN takes them rearranged beforehand (384 x 8192 weights, float32: 4 positions in
0.16 instead of 0.64 ms, 16 in 0.46 instead of 1.4). The modules are lent a forward for the time of
a block, one forward or one draft, and even then it serves only what runs in a `tree_view`; others
find them as they were.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.models.packed import MOST_SHARE, available, free_memory, halves, packed, product
from ragspec.verification.tree_attention import Configs, in_view, lease

LEAST_WORK = 5 << 17  # multiplications in float32 below which a call costs more than it saves
PACKED_FOR = 16  # positions of the forward that the layout is chosen for; it serves all

BorrowedForwards = tuple[int, int, str]


class Pack(NamedTuple):
    """One module's weights in oneDNN's layout, and what its own were at that time.

    size: number of weights. least: multiplications from which on the pack is used.
    """

    weight: Tensor
    size: int
    least: int
    dtype: torch.dtype
    borrowed: BorrowedForwards


_packs: dict[int, Pack] = {}
_lock = threading.Lock()
_borrowers: list[Packed] = []
_lending = threading.Lock()  # not `_lock`: a forward must not wait while another model is packed


def pack(model: nn.Module) -> list[nn.Linear]:
    """Bring the packs of a model up to date and return the modules that have one.

    None are made where they would take more than a quarter of the free memory. Weights changed
    since are packed again: torch counts changes, and those made behind its back (`weight.data`)
    are seen where they are to whole rows or columns.
    """
    if not available() or _is_compiled(model):
        return []
    modules = [module for module in model.modules() if _packable(module)]
    with _lock:
        stale = [module for module in modules if not _is_fresh(module)]
        for module in stale:
            _packs.pop(id(module), None)
        if stale and sum(module.weight.nbytes for module in stale) <= MOST_SHARE * free_memory():
            for module in stale:
                _remember(module)
        return [module for module in modules if id(module) in _packs]


@contextmanager
def lend(
    model: nn.Module, configs: Configs | None = None, packs: Packed | None = None
) -> Iterator[None]:
    """Lease the model inside the block with its packs; see `tree_attention.lease` and `Packed`.

    packs: of what `pack` says of it, for callers that borrow it step by step.
    """
    with lease(model, configs), Packed(pack(model)) if packs is None else packs:
        yield


class Packed:
    """Lets these modules use their packs inside the block, in a `tree_view`; nests.

    Made once and entered for every forward: 0.1 us a module and direction.
    """

    def __init__(self, modules: Iterable[nn.Linear]) -> None:
        self._forwards = [(module.__dict__, MethodType(forward, module)) for module in modules]

    def __enter__(self) -> None:
        with _lending:
            _borrowers.append(self)
            for current, lent in self._forwards:
                if "forward" not in current:
                    current["forward"] = lent

    def __exit__(self, *raised: object) -> None:
        with _lending:
            _borrowers.remove(self)
            used = {id(local) for other in _borrowers for local, _ in other._forwards}
            for current, lent in self._forwards:
                if used and id(current) in used:
                    continue
                if (result := current.get("forward")) is lent or _is_lent(result):
                    del current["forward"]


def forward(module: nn.Linear, states: Tensor) -> Tensor:
    """Return what the module's own forward would, with its pack where that is faster."""
    pack = _packs.get(id(module))
    if pack is None or not in_view() or not _fits(pack, states):
        return functional.linear(states, module.weight, module.bias)
    return product(states, pack.weight, module.bias)


def _is_lent(result: object) -> bool:
    """Tell whether a module's forward is one of ours; somebody else's is left where it is."""
    return getattr(result, "__func__", None) is forward


def _fits(pack: Pack, states: Tensor) -> bool:
    return (
        states.numel() // states.shape[-1] * pack.size > pack.least
        and states.dtype == pack.dtype
        and not states.requires_grad
        and not torch.is_autocast_enabled("cpu")
    )


def _is_compiled(model: nn.Module) -> bool:
    """Tell whether dynamo reads the modules: a lent forward would make it compile again."""
    return hasattr(model, "_orig_mod") or any(
        module._compiled_call_impl is not None for module in model.modules()
    )


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear:
        return False
    if "forward" in module.__dict__ and not _is_lent(module.__dict__["forward"]):
        return False
    weight = module.weight
    half = weight.dtype == torch.bfloat16 and halves()
    return (
        (weight.dtype == torch.float32 or half)
        and type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def _remember(module: nn.Linear) -> None:
    key, weight = id(module), module.weight.detach()
    weakref.finalize(module, _packs.pop, key, None).atexit = False
    _packs[key] = Pack(
        packed(weight, PACKED_FOR),
        weight.numel(),
        LEAST_WORK if weight.dtype == torch.float32 else 0,  # halves go through oneDNN anyway
        weight.dtype,
        _look(module),
    )


def _is_fresh(module: nn.Linear) -> bool:
    result = _packs.get(id(module))
    return result is not None and result.borrowed == _look(module)


def _look(module: nn.Linear) -> BorrowedForwards:
    """Return what tells whether the weights are those of before: place, changes, and a sum.

    The sum is over entries of every row and every column.
    """
    weight = module.weight.detach()
    entries = weight.view(-1)[:: _stride(*weight.shape)]
    changes = 0 if weight.is_inference() else module.weight._version
    return weight.data_ptr(), changes, float(entries.sum(dtype=torch.float64)).hex()


def _stride(rows: int, columns: int) -> int:
    """Return a step through a matrix, row after row, that meets every row and every column."""
    step = min(rows, columns)
    while math.gcd(step, columns) > 1:
        step -= 1
    return step
