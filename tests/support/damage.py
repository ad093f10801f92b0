"""Ways in which a file, or the weights in one, may come to harm."""

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import StoreError


def full_disk(*arguments: Any, **options: Any) -> None:
    """Fail as the system does where no space is left."""
    raise OSError(errno.ENOSPC, "No space left on device")


def truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(1, len(data))]


def flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def grow(data: bytes, draw: random.Random) -> bytes:
    return data + draw.randbytes(draw.randrange(1, 9))


def scramble(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(max(1, len(data) - 8))
    return data[:at] + draw.randbytes(8) + data[at + 8 :]


def empty(data: bytes, draw: random.Random) -> bytes:
    return b""


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    truncate, flip, flip, flip, grow, scramble, empty,
)  # fmt: skip


def check_damage(
    folder: Path, opened: Callable[[Path], object], copies: Path, times: int, pattern: str = "*"
) -> None:
    """Assert that damage to files of a folder, or their loss, is a typed error at the opening."""
    draw, hurt = random.Random(7), 0
    files = [path for path in folder.rglob(pattern) if path.is_file() and path.stat().st_size]
    for time in range(times):
        twin, file = copies / f"twin{time}", files[time % len(files)]
        shutil.copytree(folder, twin)
        damaged, lost = DAMAGES[time % len(DAMAGES)](file.read_bytes(), draw), time % 9 == 8
        (twin / file.relative_to(folder)).write_bytes(damaged)
        if lost:
            (twin / file.relative_to(folder)).unlink()
        if lost or damaged != file.read_bytes():
            hurt += 1
            with pytest.raises(StoreError):
                opened(twin)
        shutil.rmtree(twin)
    assert hurt > times // 2


Change = Callable[[dict[str, torch.Tensor]], object]
"""Changes weights, by their names, in place."""


def without(name: str) -> Change:
    return lambda weights: weights.pop(name)


def with_one(name: str, *shape: int) -> Change:
    """Return what gives a weight of zeros in place of one, or beside the others."""
    return lambda weights: weights.update({name: torch.zeros(shape)})


def with_value(name: str, value: float) -> Change:
    """Return what sets the first number of a weight."""
    return lambda weights: weights[name].view(-1)[:1].fill_(value)
