"""Devices, threads and dtypes of models, and whether their numbers are rounded visibly."""

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from ragspec.errors import InputError
from ragspec.models.checks import DTYPES, check_device, check_dtype

AnyDevice = str | torch.device
AnyDtype = str | torch.dtype


def pick_device(device: AnyDevice) -> torch.device:
    """Return a usable device. "auto" is the accelerator if there is one, else the CPU.

    Raises:
        InputError: torch does not know the name, or the machine lacks the device.
    """
    if device == "auto":
        return torch.accelerator.current_accelerator(True) or torch.device("cpu")
    if not isinstance(device, torch.device):
        check_device(str(device))
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch builds without the device assert
        reason = str(error).splitlines()[0].split(". ")[0]  # torch's message fills a page
        raise InputError(
            f"device {str(device)!r} cannot be used on this machine ({reason}); expected 'auto', "
            "'cpu' or an accelerator that torch finds"
        ) from error
    return place


def as_loaded(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast, which would give other numbers than the model's dtype."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


_COUNT: ContextVar[int | None] = ContextVar("threads", default=None)


def thread_count() -> int:
    """Return how many threads of a CPU models have, also inside `threads`."""
    return _COUNT.get() or torch.get_num_threads()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch so many threads inside the block, in this thread alone; models keep theirs."""
    if count == torch.get_num_threads():
        yield
        return
    token = _COUNT.set(thread_count())
    try:
        with _openmp()(limits=count):
            yield
    finally:
        _COUNT.reset(token)


@cache
def _openmp() -> Callable[..., AbstractContextManager[object]]:
    """Return what limits OpenMP in this thread; torch's function would limit others, too."""
    from threadpoolctl import ThreadpoolController

    limit: Callable[..., AbstractContextManager[object]]
    limit = ThreadpoolController().select(user_api="openmp").limit
    return limit


def is_cuda(device: torch.device) -> bool:
    """Return whether a device has CUDA streams, graphs and kernels."""
    return device.type == "cuda"


class Stopwatch:
    """Measures the device time of the work that is queued inside the block.

    Only CUDA devices are measured. Others report 0: there the host's clock is as accurate.
    """

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Event
        self._events = [make(enable_timing=True) for _ in range(2 if is_cuda(device) else 0)]

    def __enter__(self) -> None:
        if self._events:
            self._events[0].record()

    def __exit__(self, *error: object) -> None:
        if self._events:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """The seconds of the last block. Its work must have completed on the device."""
        if not self._events:
            return 0.0
        return float(self._events[0].elapsed_time(self._events[1])) / 1000


def pins(device: torch.device) -> bool:
    """Return whether copies from pinned host memory to a device are asynchronous."""
    return device.type not in ("cpu", "meta", "mps")


def input_device(embedding: nn.Module) -> torch.device:
    """Return the device on which an embedding expects its ids.

    The weights of an offloaded embedding lie on the meta device; accelerate's hook knows its own.
    """
    hook = getattr(embedding, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):  # one hook or a sequence of hooks
        if (place := getattr(each, "execution_device", None)) is not None:
            return torch.device(place)
    return next(embedding.parameters()).device


_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


def release_memory() -> None:
    """Return freed memory to the system, as C's library on Linux does only when it is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory. For the CPU torch has no class of its own."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY)


def pick_dtype(dtype: AnyDtype, device: torch.device, others: Iterable[str] = ()) -> AnyDtype:
    """Return the `dtype` argument for transformers.

    "auto" keeps the checkpoint's dtype on an accelerator and selects float32 on a CPU. There
    float32 is exact to the last token, and no slower for small batches.

    Args:
        others: Names that the caller also takes, for the message.

    Raises:
        InputError: The name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    check_dtype(dtype, others)
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return cast(torch.dtype, getattr(torch, DTYPES[dtype]))


def rounds(model: torch.nn.Module, device: torch.device) -> bool:
    """Return whether forwards of several widths round visibly.

    They do below float32, in its fast modes, and in modules that quantise their inputs.
    """
    dtypes = {each.dtype for each in model.parameters()}
    if any(not each.is_floating_point or torch.finfo(each).bits < 32 for each in dtypes):
        return True
    if any("quant" in type(each).__module__ for each in model.modules()):
        return True
    fast = torch.get_float32_matmul_precision() != "highest"  # TensorFloat-32 and bfloat16 passes
    fast |= device.type not in ("cpu", "meta") and bool(torch.backends.cuda.matmul.allow_tf32)
    return fast and torch.float32 in dtypes
