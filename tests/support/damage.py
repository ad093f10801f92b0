"""Ways in which a file, or the weights in one, may come to harm."""

import errno
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
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


CHANGES = {f"os.{name}" for name in ("link", "mkdir", "remove", "rename", "rmdir", "truncate")}


def kill_before(number: int) -> None:
    """Have this process killed before it changes files for the n-th time; see `check_kills`."""
    left = number

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        opened = event == "open" and arguments[2] & (os.O_CREAT | os.O_TRUNC)
        for after in (False, True) if opened else (False,) * (event in CHANGES):
            left -= 1
            if not left:
                with suppress(OSError):  # as where a file of that name is there already
                    if after:
                        os.open(arguments[0], arguments[2])
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)


def check_kills(
    folder: Path, copies: Path, write: Callable[[Path], object], read: Callable[[Path], object]
) -> None:
    """Assert that a writer of a store that is killed at any moment leaves the old or the new store.

    Each process writes to a copy of the folder, and is killed before its first change of a file,
    before its second, and so on to its last, where opening a file to write it and the writing are
    two; the next writer clears up and goes on.
    """
    shutil.copytree(folder, copies / "whole")
    contents = [read(folder)]
    for _ in range(2):
        write(copies / "whole")
        contents.append(read(copies / "whole"))
    known, killed = list[int](), True
    while killed:
        twin = copies / f"killed{len(known)}"
        shutil.copytree(folder, twin)
        child = os.fork()
        if child == 0:
            try:
                kill_before(len(known) + 1)
                write(twin)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL)
        killed = status != 0
        known.append(contents.index(read(twin)))
        write(twin)
        assert read(twin) == contents[known[-1] + 1]
        assert not list(twin.glob(".build-*")) and len(list(twin.glob("gen-*"))) <= 2
        shutil.rmtree(twin)
    assert known == sorted(known) and known.count(0) > 9 and known[-1] == 1


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
