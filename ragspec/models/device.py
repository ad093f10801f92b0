"""Where a model runs and in which numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ragspec.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device for a name; "auto" is the accelerator where there is one, else the CPU.

    Raises InputError for a name that torch does not know, or a device that is not there.
    """
    if isinstance(device, torch.device):
        return device
    if device != "auto":
        return _named(device)
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device("cpu")


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"device {name!r} is unknown to torch; expected 'auto', 'cpu' or an accelerator such "
            "as 'cuda:0'"
        ) from error
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a build without the device asserts
        reason = str(error).splitlines()[0].split(". ")[0]  # torch goes on for a page
        raise InputError(
            f"device {name!r} cannot be used on this machine ({reason}); expected 'auto', 'cpu' "
            "or an accelerator that torch finds"
        ) from error
    return device


def is_cuda(device: torch.device) -> bool:
    """Return whether a device is one of CUDA, with its streams, graphs and kernels."""
    return device.type == "cuda"


class Stopwatch:
    """Tells how long a device takes for what is queued inside the block, as the device has it.

    Only a device of CUDA says so; others tell 0, for there the host's clock is as good.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[Any] = []
        if is_cuda(device):
            make: Any = torch.cuda.Event
            self._events = [make(enable_timing=True) for _ in range(2)]

    def __enter__(self) -> None:
        if self._events:
            self._events[0].record()

    def __exit__(self, *error: object) -> None:
        if self._events:
            self._events[1].record()

    @property
    def seconds(self) -> float:
        """The seconds of the last block, which must have ended on the device."""
        if not self._events:
            return 0.0
        return float(self._events[0].elapsed_time(self._events[1])) / 1000


def pins(device: torch.device) -> bool:
    """Return whether copies to a device are made without waiting from pinned memory of the host."""
    return device.type not in ("cpu", "meta", "mps")


def input_device(embedding: Any) -> torch.device:
    """Return where an embedding takes its ids.

    The weights of an offloaded one wait on the meta device or on the disk; the hook that accelerate
    puts on the module knows where they are brought to.
    """
    hook = getattr(embedding, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):  # one hook, or several in a row
        place = getattr(each, "execution_device", None)
        if place is not None:
            return torch.device(place)
    result: torch.device = embedding.weight.device
    return result


def without_autograd(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function as it runs without gradients and outside of inference mode.

    For what makes tensors that later calls write to: one that was made in inference mode cannot be
    written outside of it, and who calls may have left that mode meanwhile.
    """

    @wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return inside


_NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that there was no memory left; torch has no class for a CPU's."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY)


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """Return what to give transformers as `dtype`.

    "auto" is the checkpoint's own on an accelerator and float32 on a CPU, where it is exact to
    the last token and for small batches no slower. Raises InputError for an unknown name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in _DTYPES:
        raise InputError(
            f"dtype {dtype!r} is unknown; expected 'auto' or one of {', '.join(sorted(_DTYPES))}"
        )
    return _DTYPES[dtype]
