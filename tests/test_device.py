"""Where a model runs and in which numbers."""

from __future__ import annotations

import pytest
import torch

from ragspec.device import pick_device, pick_dtype
from ragspec.errors import InputError

CPU = torch.device("cpu")


def test_auto_is_the_accelerator_or_the_cpu() -> None:
    found = pick_device("auto")
    if torch.accelerator.is_available():
        assert found == torch.accelerator.current_accelerator()
    else:
        assert found == CPU


def test_names_and_devices_are_taken_as_they_are() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device(torch.device("meta")) == torch.device("meta")
    with pytest.raises(InputError, match=r"'warp'.*expected 'auto'"):
        pick_device("warp")


def test_a_device_that_is_not_there_is_refused() -> None:
    for name in ("cuda:99", "xpu:99"):
        with pytest.raises(InputError, match=rf"'{name}' cannot be used on this machine"):
            pick_device(name)


def test_numbers_by_name() -> None:
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("auto", torch.device("meta")) == "auto"
    assert pick_dtype("bf16", CPU) == pick_dtype("bfloat16", CPU) == torch.bfloat16
    assert pick_dtype(torch.float64, CPU) == torch.float64
    with pytest.raises(InputError, match=r"'int8' is unknown.*float32"):
        pick_dtype("int8", CPU)
