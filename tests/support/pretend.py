"""A pretended accelerator: tensors of its device over data of the CPU.

It raises the errors of CUDA (two devices in one operator, `numpy()`), and records the launches,
copies and waits of CUDA, so tests on any machine find code that would fail or be slow there. One
operator counts as one kernel, without its cost. Modes are of one thread, as torch's are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ragspec.sampling.settings import Sampling
from tests.support.pretend_record import Cause, Record

EVERY_SETTING = Sampling(
    temperature=0.9,
    top_k=60,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.3,
    min_new_tokens=4,
    logit_bias={5: 1.0, 6: -2.0},
    seed=3,
)

NAME = "pretend"
DEVICES = [NAME, pytest.param("cuda", marks=pytest.mark.gpu)]
_INDEXING = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"})
# The host must know how much there is before it can go on.
_SIZED = frozenset(
    {
        *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"),
        *("repeat_interleave", "bincount"),
    }
)
_NO_KERNEL = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"),
        *("lift_fresh", "_reshape_alias", "detach", "alias", "set_", "resize_", "split_with_sizes"),
    }
)


class PretendTensor(torch.Tensor):
    """A tensor that lies on the pretended device. data_here: what it holds, on the CPU."""

    data_here: torch.Tensor
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data_here: torch.Tensor) -> PretendTensor:
        """Wrap data of the CPU, of which views stay views."""
        assert data_here.device.type == "cpu" and not isinstance(data_here, PretendTensor)
        instance: PretendTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            data_here.size(),
            strides=data_here.stride(),
            storage_offset=data_here.storage_offset(),
            dtype=data_here.dtype,
            device=torch.device(NAME, 0),
        )
        instance.data_here = data_here
        return instance

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PretendTensor:
        result = memo.setdefault(id(self), PretendTensor(self.data_here.clone()))
        assert isinstance(result, PretendTensor)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise RuntimeError: the device exists only inside of a `Pretend`."""
        raise RuntimeError(f"{func}: got a tensor of the pretended device outside of `Pretend`")


class Pretend:
    """The device while it is there: `with Pretend() as device`.

    A model moves to it by `pretend(model)`, anything by `.to("pretend")`.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.records: list[Record] = []

    def __enter__(self) -> Self:
        _registered().present += 1
        self._stack.callback(_leave)
        self._stack.enter_context(_Calls(self))
        self._stack.enter_context(_Operators(self))
        # No mode sees it, and a guard written in Python cannot offer it.
        self._stack.enter_context(patch.object(torch.accelerator, "synchronize", self._synchronize))
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _synchronize(self, device: Any = None, /) -> None:
        self.note(Cause.WAIT, "synchronize")

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Record the work of the device within."""
        record = Record()
        self.records.append(record)
        try:
            yield record
        finally:
            self.records.remove(record)

    def note(self, cause: Cause, what: str, count: int = 0) -> None:
        """Add an event to all records."""
        for record in self.records:
            record.note(cause, what, count)


def pretend(model: Any, device: Any = NAME) -> Any:
    """Return a copy of a model (a module, or anything with `to`) on the pretended device."""
    return copy.deepcopy(model).to(device)


def present(device: str) -> AbstractContextManager[Any]:
    """Return a context in which a device of `DEVICES` is there."""
    return Pretend() if device == NAME else nullcontext()


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries operators out on the CPU, as far as the device would carry them out."""

    def __init__(self, device: Pretend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._pinned: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the operator gives, on the device that its arguments name."""
        kwargs = dict(kwargs or {})
        operator = _operator(func)
        name = operator.name
        if name in ("is_pinned", "_pin_memory"):
            return self._pin(args[0]) if name == "_pin_memory" else self._is_pinned(args[0])
        tensors = list(_tensors((*args, *kwargs.values())))
        request = kwargs.get("device")
        selection = None if request is None else torch.device(request).type
        there = any(isinstance(each, PretendTensor) for each in tensors)
        if not there and selection != NAME:
            return self._here(func, args, kwargs)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs, selection)
        if there:
            _check_devices(operator, args, tensors)
            self._note_waits(name, args, tensors)
        if selection is not None:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if operator.launches:
            self._device.note(Cause.KERNEL, name)
        result = _carry_out(func, name, _inside(args), _inside(kwargs))
        if selection == "cpu" or not isinstance(result, (torch.Tensor, list, tuple)):
            return result
        known = {id(each.data_here): each for each in tensors if isinstance(each, PretendTensor)}
        return _outside(result, known)

    def _here(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Carry out what concerns the CPU alone; memory is pinned in name only."""
        if not kwargs.pop("pin_memory", None):
            return func(*args, **kwargs)
        return self._note_pinned(func(*args, **kwargs))

    def _note_pinned(self, instance: torch.Tensor) -> torch.Tensor:
        # The reference prevents reuse of the address.
        self._pinned[instance.untyped_storage().data_ptr()] = instance
        return instance

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, PretendTensor):
            raise RuntimeError(f"cannot pin '{NAME}' memory; only dense CPU tensors can be pinned")
        return self._note_pinned(tensor.clone())

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        current = not isinstance(tensor, PretendTensor)
        return current and tensor.untyped_storage().data_ptr() in self._pinned

    def _copy(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], selection: str | None
    ) -> Any:
        """Carry out a copy between the devices, or on one."""
        source = args[0] if name == "_to_copy" else args[1]
        if name == "copy_":
            selection = NAME if isinstance(args[0], PretendTensor) else "cpu"
        soon = bool(kwargs.pop("non_blocking", False) or (name == "copy_" and any(args[2:])))
        size, out = source.numel() * source.element_size(), isinstance(source, PretendTensor)
        kwargs.pop("device", None)
        result = func(*_inside(args[:2] if name == "copy_" else args), **_inside(kwargs))
        if not out:
            soon = soon and self._is_pinned(source)
            self._device.note(Cause.COPY_IN_ASYNC if soon else Cause.COPY_IN, name, size)
        elif selection == "cpu":
            soon = soon and (name == "_to_copy" or self._is_pinned(args[0]))
            self._device.note(Cause.COPY_OUT_ASYNC if soon else Cause.COPY_OUT, name, size)
            return args[0] if name == "copy_" else result
        else:
            self._device.note(Cause.KERNEL, name)
        return args[0] if name == "copy_" else PretendTensor(result)

    def _note_waits(self, name: str, args: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Note what the host waits for in an operator over tensors of the device."""
        if name == "_local_scalar_dense":
            self._device.note(Cause.COPY_OUT, name, tensors[0].element_size())
        elif name in _SIZED:
            self._device.note(Cause.WAIT, name)
        elif name in _INDEXING:
            for index in _tensors(args[1]):
                if not isinstance(index, PretendTensor):
                    size = index.numel() * index.element_size()
                    self._device.note(Cause.COPY_IN, name, size)
                elif index.dtype in (torch.bool, torch.uint8):
                    self._device.note(Cause.WAIT, name)


class _Calls(TorchFunctionMode):
    """Handles calls that are no operator, or several where the device has one kernel."""

    def __init__(self, device: Pretend) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the call gives."""
        handle = _HANDLED.get(getattr(func, "__name__", ""))
        if handle is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return handle(self, func, args, dict(kwargs or {}))

    def _create(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`torch.tensor` and its like: built here, then copied."""
        current = func.__name__ == "new_tensor" and isinstance(args[0], PretendTensor)
        device = kwargs.pop("device", NAME if current else None)
        if device is None or torch.device(device).type != NAME:
            return func(*args, **kwargs, **({} if device is None else {"device": device}))
        if current:
            kwargs.setdefault("dtype", args[0].dtype)
            func, args = torch.tensor, args[1:]
        return func(*args, **kwargs).to(NAME)

    def _to_list(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(args[0].cpu() if isinstance(args[0], PretendTensor) else args[0])

    def _to_numpy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], PretendTensor):
            raise TypeError(
                f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
                "tensor to host memory first."
            )
        return func(*args, **kwargs)

    def _item(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`tensor[index]` and `tensor[index] = value`: lists become indices on the device."""
        held, index, *value = args
        parts = index if isinstance(index, tuple) else (index,)
        if isinstance(held, PretendTensor) and any(map(_listed, parts)):
            parts = tuple(_index(each).to(NAME) if _listed(each) else each for each in parts)
            args = (held, parts, *value)
        return func(*args, **kwargs)

    def _attention(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors((*args, *kwargs.values())))
        if not any(isinstance(each, PretendTensor) for each in tensors):
            return func(*args, **kwargs)
        _refuse_two(
            func.__name__, [each for each in tensors if not isinstance(each, PretendTensor)]
        )
        self._device.note(Cause.KERNEL, func.__name__)
        return PretendTensor(func(*_inside(args), **_inside(kwargs)))


_HANDLED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("tensor", "as_tensor", "asarray", "new_tensor"), _Calls._create),
    **dict.fromkeys(("numpy", "__array__"), _Calls._to_numpy),
    **dict.fromkeys(("__getitem__", "__setitem__"), _Calls._item),
    "tolist": _Calls._to_list,
    "scaled_dot_product_attention": _Calls._attention,
}


def _listed(part: Any) -> bool:
    return isinstance(part, (list, np.ndarray))


def _index(part: Any) -> torch.Tensor:
    instance = torch.as_tensor(part)
    return instance if instance.numel() else instance.long()


@dataclass(frozen=True, slots=True)
class _Operator:
    """The facts of an operator. launches: a kernel, so that it is no view. scalars: takes
    tensors of the CPU that hold one number, as pointwise kernels do."""

    name: str
    launches: bool
    scalars: bool
    mutable: bool


@cache
def _operator(func: Any) -> _Operator:
    name = func._schema.name.partition("::")[2]
    scalars = torch.Tag.pointwise in func.tags or name in ("fill_", "fill", "masked_fill_")
    launches = not (name in _NO_KERNEL or func.is_view)
    return _Operator(name, launches, scalars, func._schema.is_mutable)


def _check_devices(
    operator: _Operator, args: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> None:
    """Raise RuntimeError where CUDA would for tensors of two devices."""
    name = operator.name
    others = [each for each in tensors if not isinstance(each, PretendTensor)]
    if not others:
        return
    if name in _INDEXING:
        if not isinstance(args[0], PretendTensor):
            raise RuntimeError(
                f"{name}: indices should be either on cpu or on the same device as the indexed "
                "tensor (cpu)"
            )
        values = list(_tensors(args[2:]))
        _refuse_two(name, [v for v in values if v.dim() and not isinstance(v, PretendTensor)])
    elif operator.scalars:
        written = operator.mutable and not isinstance(args[0], PretendTensor)
        _refuse_two(name, others if written else [each for each in others if each.dim()])
    else:
        _refuse_two(name, others)


def _refuse_two(name: str, others: Sequence[torch.Tensor]) -> None:
    if others:
        raise RuntimeError(
            f"{name}: Expected all tensors to be on the same device, but found at least two "
            f"devices, {NAME}:0 and cpu ({[tuple(each.shape) for each in others]})"
        )


def _carry_out(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what an operator gives on the CPU, which lacks a few that the device has."""
    if name == "histc" and not args[0].is_floating_point():
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, which may stand in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _inside(value: Any) -> Any:
    """Return arguments with the data in place of the pretended tensors."""
    if isinstance(value, PretendTensor):
        return value.data_here
    if isinstance(value, (list, tuple)):
        return type(value)(map(_inside, value))
    if isinstance(value, dict):
        return {key: _inside(each) for key, each in value.items()}
    return value


def _outside(value: Any, known: dict[int, PretendTensor]) -> Any:
    """Return results as pretended tensors; what was written to stays the tensor that it was."""
    if isinstance(value, torch.Tensor):
        result = known.get(id(value))
        return PretendTensor(value) if result is None else result
    if isinstance(value, (list, tuple)):
        return type(value)(_outside(each, known) for each in value)
    return value


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """Tells torch whether the device is there: while a `Pretend` is open, so that nothing else
    takes it for an accelerator of this machine."""

    present = 0

    def is_available(self) -> bool:
        return self.present > 0

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Module:
    """The result of `torch.get_device_module`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return _registered().present > 0

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_device_name(self, device: Any = None) -> str:
        return NAME

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


@cache
def _registered() -> _Hooks:
    """Register the device with torch, once in a process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    hooks = _Hooks()
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), hook=hooks)
    return hooks


def _leave() -> None:
    _registered().present -= 1
