"""Packed weights give the results of the module's forward, and only inside a block."""

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ragspec.engine.engine import Engine
from ragspec.verification import cpu_weights as packing
from ragspec.verification import prefix_cache
from ragspec.verification.batch import Batch, TreeView
from ragspec.verification.cpu_weights import Packed, forward, pack
from ragspec.verification.prefix_cache import model_state
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.tree_attention import tree_view
from tests.support import tiny

WIDTH, OUTPUTS = 256, 1024
pytestmark = pytest.mark.skipif(not packing.available(), reason="needs oneDNN on x86")


class Two(nn.Module):
    """Two linear layers, large enough to pay."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(WIDTH, OUTPUTS)
        self.two = nn.Linear(OUTPUTS, WIDTH, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(self.one(states))
        return out


@pytest.fixture
def model() -> Two:
    return Two().eval().requires_grad_(False)


@pytest.fixture
def borrowed() -> Iterator[None]:
    place = torch.tensor([[0]])
    with tree_view(Batch([SequenceCache(1)], [TreeView(0, place, place, None)])):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of every product with a packed weight."""
    results: list[int] = []
    fits = packing._fits

    def counted(pack: Any, states: torch.Tensor) -> bool:
        used = fits(pack, states)
        if used:
            results.append(states.shape[-2])
        return used

    monkeypatch.setattr(packing, "_fits", counted)
    return results


def right(model: Two, states: torch.Tensor) -> torch.Tensor:
    inner = functional.linear(states.double(), model.one.weight.double(), model.one.bias.double())
    return functional.linear(inner, model.two.weight.double())


@pytest.mark.usefixtures("borrowed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [3, 16, 60])
def test_products_with_packs_equal_those_of_the_module(
    model: Two, dtype: torch.dtype, positions: int, calls: list[int]
) -> None:
    model.to(dtype)
    states = torch.randn(2, WIDTH, positions).to(dtype).transpose(1, 2)  # strided
    with Packed(pack(model)):
        result = model(states)
    served = dtype == torch.float32 or packing.halves()
    assert calls == [positions] * (2 if served else 0)
    assert result.dtype == dtype
    error = (result.double() - right(model, states)).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.03)


def test_packs_are_not_used_outside_a_view(model: Two, calls: list[int]) -> None:
    states = torch.randn(1, 8, WIDTH)
    with Packed(pack(model)):
        assert torch.equal(model.one(states), functional.linear(states, *model.one.parameters()))
    assert calls == []


@pytest.mark.usefixtures("borrowed")
def test_little_work_autocast_gradients_and_other_types_are_left_to_the_module(
    model: Two, calls: list[int]
) -> None:
    states = torch.randn(1, 8, WIDTH)
    with Packed(pack(model)):
        model(states[:, :1])
        with torch.autocast("cpu", torch.bfloat16):
            assert model(states).dtype == torch.bfloat16
        assert model(states.clone().requires_grad_()).requires_grad
    assert calls == []


def test_modules_are_restored_after_errors(model: Two) -> None:
    modules, state = pack(model), model_state(model)
    with pytest.raises(KeyError), Packed(modules):
        with Packed(modules):
            pass
        assert getattr(model.one.forward, "__func__", None) is forward
        assert model_state(model) == state  # as another thread reads it
        raise KeyError
    assert "forward" not in model.one.__dict__
    assert set(model.state_dict()) == {"one.weight", "one.bias", "two.weight"}


def test_a_forward_that_other_code_sets_is_used_and_stays(model: Two) -> None:
    def current(states: torch.Tensor) -> torch.Tensor:
        return states

    packs, state = Packed(pack(model)), model_state(model)
    with packs:
        pass
    model.one.__dict__["forward"] = current  # as accelerate's hooks do
    assert pack(model) == [model.two]
    with packs:
        assert model.one.forward is current
        model.two.__dict__["forward"] = current
    assert model_state(model) != state
    assert model.one.__dict__["forward"] is model.two.__dict__["forward"] is current


def change(layer: nn.Linear, kind: str) -> None:
    match kind:
        case "in place":
            layer.weight.add_(1.0)
        case "a row":
            layer.weight.data[OUTPUTS - 3] = 1.0
        case "a column":
            layer.weight.data[:, 5] += 1.0
        case "all by data":
            layer.weight.data += torch.randn(OUTPUTS, 2) @ torch.randn(2, WIDTH)
        case "another weight":
            layer.weight = nn.Parameter(torch.randn(OUTPUTS, WIDTH), requires_grad=False)
        case "another bias":
            layer.bias = nn.Parameter(torch.randn(OUTPUTS), requires_grad=False)


@pytest.mark.usefixtures("borrowed")
@pytest.mark.parametrize(
    "kind", ["in place", "a row", "a column", "all by data", "another weight", "another bias"]
)
def test_changed_weights_are_packed_again(model: Two, kind: str, calls: list[int]) -> None:
    states = torch.randn(1, 8, WIDTH)
    with Packed(pack(model)):
        before = model(states)
    change(model.one, kind)
    with Packed(pack(model)):
        after = model(states)
    assert not torch.allclose(before, after, atol=1e-3)
    assert (after.double() - right(model, states)).abs().max() < 1e-4
    assert len(calls) == 4


@pytest.mark.parametrize("shape", [(256, 704), (704, 256), (384, 384), (5, 7), (1, 9), (9, 1)])
def test_the_stride_visits_every_row_and_column(shape: tuple[int, int]) -> None:
    rows, columns = shape
    visited = range(0, rows * columns, prefix_cache._stride(rows, columns))
    assert {i // columns for i in visited} == set(range(rows))
    assert {i % columns for i in visited} == set(range(columns))


@pytest.mark.parametrize("number", [0.5, float("nan")])  # which is not equal to itself
def test_packs_are_reused_while_nothing_changes(model: Two, number: float) -> None:
    model.one.weight[0, 0] = number
    pack(model)
    before = packing._packs[id(model.one)]
    pack(model)
    assert packing._packs[id(model.one)] is before


def test_packs_need_memory_and_stale_ones_go(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(model)
    change(model.one, "in place")
    monkeypatch.setattr(packing, "free_memory", lambda: 4 * model.one.weight.nbytes - 1)
    assert pack(model) == [model.two]
    assert id(model.one) not in packing._packs


def test_only_plain_linear_layers_are_packed(model: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(nn.Linear):
        pass

    others = [nn.Linear(64, 64, dtype=torch.float64), nn.Linear(64, 64, device="meta")]
    assert pack(nn.Sequential(Mine(64, 64), *others)) == []
    assert pack(torch.compile(model, backend="eager")) == []  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "arm64")  # which has no such kernels
        assert pack(model) == []
    assert pack(model) == [model.one, model.two]
    model.one.compile(backend="eager")
    assert pack(model) == []


def test_packs_go_with_the_model(model: Two) -> None:
    key = id(model.one)
    pack(model)
    assert key in packing._packs
    del model.one
    gc.collect()
    assert key not in packing._packs


@pytest.mark.usefixtures("borrowed")
def test_a_copy_created_meanwhile_uses_its_weights(model: Two) -> None:
    states = torch.randn(1, 8, WIDTH)
    with Packed(pack(model)):
        other = copy.deepcopy(model)
        change(other.one, "in place")
        assert (other(states).double() - right(other, states)).abs().max() < 1e-3


@pytest.mark.parametrize("draft", [False, True])
def test_an_engine_uses_packs_and_writes_the_same_text(
    draft: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = copy.deepcopy(tiny.model("llama")).float()
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
    monkeypatch.setattr(packing, "LEAST_WORK", 0)

    def write() -> list[int]:
        engine = Engine(model, None, "context", copy.deepcopy(model) if draft else None, budget=6)
        written: list[int] = engine.generate(prompt, max_new_tokens=24).tokens
        return written

    with_packs = write()
    assert calls
    calls.clear()
    monkeypatch.setattr(packing, "available", lambda: False)
    assert write() == with_packs
    assert not calls
