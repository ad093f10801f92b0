"""Waiting for other threads."""

import time
from collections.abc import Callable


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return once the condition is true; fail if it is not after some seconds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)
