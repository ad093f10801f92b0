"""The pretended accelerator raises the errors of a real one, and records where the host waits."""

import inspect
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.support import tiny
from tests.support.pretend import NAME, Pretend, pretend
from tests.support.pretend_record import Cause


@pytest.fixture
def device() -> Iterator[Pretend]:
    with Pretend() as result:
        yield result


@pytest.fixture
def there(device: Pretend) -> torch.Tensor:
    return torch.arange(6.0).to(NAME)


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": lambda far, near: far + near,
    "product": lambda far, near: far @ near,
    "cat": lambda far, near: torch.cat([far, near]),
    "where": lambda far, near: torch.where(far > 0, far, near),
    "gather": lambda far, near: far.gather(0, near.long()),
    "index of the host's": lambda far, near: near[far.long()],
    "written to the host's": lambda far, near: near.add_(far.sum()),
    "attention": lambda far, near: torch.nn.functional.scaled_dot_product_attention(
        far[None, None], near[None, None], near[None, None]
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_two_devices_are_refused(name: str, there: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"device|on cpu"):
        MIXED[name](there, torch.ones(6))
    MIXED[name](there, torch.ones(6).to(NAME))


def test_arrays_are_refused(there: torch.Tensor) -> None:
    converts: list[Callable[[], object]] = [there.numpy, lambda: np.asarray(there)]
    for convert in converts:
        with pytest.raises(TypeError, match=r"Tensor\.cpu"):
            convert()
    assert there.cpu().numpy().tolist() == [0, 1, 2, 3, 4, 5]


def test_scalars_of_the_host_are_accepted(there: torch.Tensor) -> None:
    assert ((there * torch.tensor(2.0)).cpu() == torch.arange(6) * 2).all()
    assert there[torch.tensor([1, 3])].tolist() == [1.0, 3.0]


WAITS: dict[str, tuple[Callable[[torch.Tensor], object], Cause, int]] = {
    "item": (lambda far: far[2].item(), Cause.COPY_OUT, 4),
    "tolist": (lambda far: far.tolist(), Cause.COPY_OUT, 24),
    "cpu": (lambda far: far.cpu(), Cause.COPY_OUT, 24),
    "tensor": (lambda far: torch.tensor([1, 2], device=NAME), Cause.COPY_IN, 16),
    "pageable": (lambda far: far.copy_(torch.zeros(6), non_blocking=True), Cause.COPY_IN, 24),
    "nonzero": (lambda far: far.nonzero(), Cause.WAIT, 0),
    "list": (lambda far: far[[1, 2]], Cause.COPY_IN, 16),
    "synchronize": (lambda far: torch.accelerator.synchronize(), Cause.WAIT, 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_is_counted_at_its_place(name: str, device: Pretend, there: torch.Tensor) -> None:
    do, cause, size = WAITS[name]
    with device.recording() as record:
        do(there)
    assert record.waits == 1
    (event,) = record.of(cause)
    assert (event.bytes, event.in_module) == (size, False)
    _, first = inspect.getsourcelines(do)
    place, _, line = event.where.rpartition(":")
    assert place == "tests/support/test_pretend.py"
    assert first <= int(line) <= first + 2
    assert record.table().count(event.where) >= 1


def test_pinned_copies_are_not_waited_for(device: Pretend, there: torch.Tensor) -> None:
    pinned = torch.ones(6, pin_memory=True)
    with device.recording() as record:
        there.copy_(pinned, non_blocking=True)
        torch.zeros(3).pin_memory().to(NAME, non_blocking=True)
    assert (record.waits, record.asynchronous, record.bytes_in) == (0, 2, 36)
    assert there.tolist() == [1.0] * 6
    with device.recording() as record:
        there.copy_(pinned)
    assert record.waits == 1


def test_a_model_on_the_pretended_device_computes_as_on_the_cpu(device: Pretend) -> None:
    model = tiny.model("llama")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad(), device.recording() as record:
        result = pretend(model)(ids.to(NAME)).logits
    assert torch.equal(result.cpu(), model(ids).logits)
    assert record.kernels > record.kernels_beside
    assert next(model.parameters()).device.type == "cpu"


def test_no_operator_runs_outside_of_pretend() -> None:
    with Pretend():
        far = torch.ones(2).to(NAME)
    with pytest.raises(RuntimeError, match="outside of `Pretend`"):
        far + far
    assert not torch.accelerator.is_available() or torch.cuda.is_available()
