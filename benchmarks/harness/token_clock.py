"""A streamer of transformers' `generate` that records the time of every token."""

from __future__ import annotations

import time

import torch


class TokenClock:
    """A streamer that records times and drops the tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        """Record the time of a token; the first call passes the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing, since no token is buffered."""
