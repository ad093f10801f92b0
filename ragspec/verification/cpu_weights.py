"""Packed copies of a CPU model's linear weights, in the layout of oneDNN's kernels.

For the few positions of a draft tree, BLAS spends much of each product on rearranging the weights.
oneDNN takes weights that were rearranged beforehand. With 384 x 8192 float32 weights, 4 positions
take 0.16 instead of 0.64 ms, 16 take 0.46 instead of 1.4 ms. Modules get another forward only for a
block (one forward of the model or one draft), and it only acts inside a `tree_view`.
"""

import platform
import threading
import weakref
from collections.abc import Iterable
from types import MethodType
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from ragspec.verification.prefix_cache import WeightState, weight_state
from ragspec.verification.tree_attention import in_view

LEAST_WORK = 5 << 17  # float32 multiplications below which a call costs more than it saves
MOST_SHARE = 0.25  # of the free memory may go to packed copies
PACKED_FOR = 16  # positions for which the layout is optimized; it works for any number

# By the id of a module: its weights in oneDNN's layout, and their state before packing.
_packs: dict[int, tuple[Tensor, WeightState]] = {}
_lock = threading.Lock()
_borrowers: "list[Packed]" = []
_lending = threading.Lock()  # not `_lock`: forwards do not wait for the packing of other models


def pack(model: nn.Module) -> list[nn.Linear]:
    """Update the packs of a model and return the modules that have one.

    If the new packs would take more than a quarter of the free memory, none are created. Changed
    weights are packed again. torch counts changes; those through `weight.data`, which it does not
    count, are detected if they affect whole rows or columns.
    """
    every = [*model.modules()]
    compiled = hasattr(model, "_orig_mod") or any(m._compiled_call_impl is not None for m in every)
    if compiled or not available():  # with another forward dynamo would compile again
        return []
    modules = [module for module in every if _packable(module)]
    with _lock:
        packs = [(module, _packs.get(id(module))) for module in modules]
        stale = [m for m, pack in packs if pack is None or pack[1] != weight_state(m.weight)]
        for module in stale:
            _packs.pop(id(module), None)
        if stale and sum(module.weight.nbytes for module in stale) <= MOST_SHARE * free_memory():
            for module in stale:
                key, state = id(module), weight_state(module.weight)
                packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), PACKED_FOR)
                weakref.finalize(module, _packs.pop, key, None).atexit = False
                _packs[key] = packed, state
        return [module for module in modules if id(module) in _packs]


class Packed:
    """Lets modules use their packs inside the block, in a `tree_view`. Blocks may nest.

    Create it once and enter it for every forward: this takes 0.1 us per module and direction.
    """

    def __init__(self, modules: Iterable[nn.Linear]) -> None:
        self._forwards = [(module.__dict__, MethodType(forward, module)) for module in modules]

    def __enter__(self) -> None:
        with _lending:
            _borrowers.append(self)
            for attributes, lent in self._forwards:
                attributes.setdefault("forward", lent)

    def __exit__(self, *raised: object) -> None:
        with _lending:
            _borrowers.remove(self)
            used = {id(local) for other in _borrowers for local, _ in other._forwards}
            for attributes, lent in self._forwards:
                override = attributes.get("forward")
                if id(attributes) not in used and (override is lent or _is_lent(override)):
                    del attributes["forward"]


def forward(module: nn.Linear, states: Tensor) -> Tensor:
    """Return the output of a linear module, computed with its pack if that is faster."""
    pack = _packs.get(id(module))
    if pack is None or not in_view() or not _fits(pack[0], states):
        return functional.linear(states, module.weight, module.bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(states, pack[0], module.bias, "none", [], "")
    return out


def _is_lent(function: object) -> bool:
    """Return whether a module's forward is ours. Overrides by other code are left in place."""
    return getattr(function, "__func__", None) is forward


def _fits(weight: Tensor, states: Tensor) -> bool:
    """Return whether packed weights are faster and give the result of the module."""
    least = LEAST_WORK if weight.dtype == torch.float32 else 0  # torch uses oneDNN for bfloat16
    return (
        states.numel() // states.shape[-1] * weight.numel() > least
        and states.dtype == weight.dtype
        and not states.requires_grad
        and not torch.is_autocast_enabled("cpu")
    )


def _packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear:
        return False
    if "forward" in module.__dict__ and not _is_lent(module.__dict__["forward"]):
        return False
    weight = module.weight
    return (
        (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and halves()))
        and type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.numel() > 0
    )


def available() -> bool:
    """Return whether this machine has kernels for packed matrices."""
    return (
        platform.machine().lower() in ("x86_64", "amd64")
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def halves() -> bool:
    """Return whether this CPU multiplies bfloat16 fast. Without AVX-512 it is emulated."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def free_memory() -> int:
    """Return the bytes of memory that are available without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)
