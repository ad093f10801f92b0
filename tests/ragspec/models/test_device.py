"""Where a model runs and in which numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ragspec.errors import InputError
from ragspec.models.device import input_device, pick_device, pick_dtype

CPU = torch.device("cpu")


def test_auto_is_the_accelerator_or_the_cpu() -> None:
    result = pick_device("auto")
    if torch.accelerator.is_available():
        assert result == torch.accelerator.current_accelerator()
    else:
        assert result == CPU


def test_names_and_devices_are_taken_as_they_are() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device(torch.device("meta")) == torch.device("meta")
    with pytest.raises(InputError, match=r"'warp'.*expected 'auto'"):
        pick_device("warp")


def test_a_device_that_is_not_there_is_refused() -> None:
    for name in ("cuda:99", "xpu:99"):
        with pytest.raises(InputError, match=rf"'{name}' cannot be used on this machine"):
            pick_device(name)


def test_ids_go_to_where_an_offloaded_embedding_is_supplied() -> None:
    embedding = torch.nn.Embedding(2, 2, device="meta")
    assert input_device(embedding) == torch.device("meta")
    hook = SimpleNamespace(execution_device="cpu")
    several = SimpleNamespace(hooks=(SimpleNamespace(), hook))
    for hung in (hook, several):
        embedding._hf_hook = hung  # type: ignore[assignment]
        assert input_device(embedding) == CPU
    embedding._hf_hook = SimpleNamespace(execution_device=None)  # type: ignore[assignment]
    assert input_device(embedding) == torch.device("meta")


def test_numbers_by_name() -> None:
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("auto", torch.device("meta")) == "auto"
    assert pick_dtype("bf16", CPU) == pick_dtype("bfloat16", CPU) == torch.bfloat16
    assert pick_dtype(torch.float64, CPU) == torch.float64
    with pytest.raises(InputError, match=r"'int8' is unknown.*float32"):
        pick_dtype("int8", CPU)
