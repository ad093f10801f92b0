"""Ways in which a file may come to harm."""

from __future__ import annotations

import random
from collections.abc import Callable


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
