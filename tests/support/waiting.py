"""Waiting for what other threads do."""

import time
from collections.abc import Callable


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Return once it is true; fails where it never comes to that."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)
