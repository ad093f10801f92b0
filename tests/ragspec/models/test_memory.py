"""Memory is counted without taking it, and refused where it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ragspec.errors import InputError
from ragspec.models.memory import Memory, expect_room, free_on, weight_bytes
from ragspec.models.packed import free_memory

CPU = torch.device("cpu")


def test_weights_are_counted_by_their_heads_alone(tmp_path: Path) -> None:
    floats = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.float32)}
    save_file(floats, tmp_path / "model-1.safetensors")
    save_file({"ids": torch.zeros(11, dtype=torch.int64)}, tmp_path / "model-2.safetensors")
    assert weight_bytes(tmp_path) == 4 * 22 + 8 * 11
    assert weight_bytes(tmp_path, torch.float64) == 8 * 22 + 8 * 11  # whole numbers stay
    assert weight_bytes(tmp_path, torch.bfloat16) == 2 * 22 + 8 * 11


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 16, b"\x02" + bytes(7) + b"[]", b"\x01" + bytes(7)]
)
def test_what_cannot_be_read_counts_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weight_bytes(tmp_path) == 0


def test_more_than_is_free_is_refused_with_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = Memory({"weights": 3_000_000_000, "cache": 1_500_000_000})
    assert needed.total == 4_500_000_000
    monkeypatch.setattr("ragspec.models.memory.free_memory", lambda: 4_500_000_000)
    expect_room(needed, CPU, "it", "wait.")
    told = r"no room for it, which takes 4\.50 GB \(weights 3\.00, cache 1\.50\); 4\.50 GB are free"
    with pytest.raises(InputError, match=told + " on cpu: wait"):
        expect_room(needed, CPU, "it", "wait.", share=0.9)
    monkeypatch.setattr("ragspec.models.memory.free_memory", lambda: 0)  # a system that is silent
    expect_room(needed, CPU, "it", "wait.")


def test_a_device_tells_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert abs(free_on(CPU) - free_memory()) < free_memory() / 2
    assert free_on(torch.device("meta")) == 0
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (5, 9))
    assert free_on(torch.device("cuda:0")) == 5
