"""What the loop asks of a target: the session of one generation, whatever model lies behind it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import torch

from ragspec.draft import DraftTree


class TargetSession(Protocol):
    """The cache of one generation: B rows that grow at their own pace. A context manager."""

    def admit(self, tree: DraftTree) -> DraftTree:
        """Return the part of a draft that this session verifies at a fair price."""
        ...

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> torch.Tensor:
        """Run one forward over committed-but-unseen tokens and the draft below them.

        pending: for each row the committed tokens not yet in the cache, the root last (the whole
        prompt at first). trees: one draft a row, same row order. Returns logits [B, N + 1, V]:
        row b has the root's first, then its nodes'; what lies beyond its own N is undefined.
        """
        ...

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending tokens and these nodes of the last forward, drop all others."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order; naming a row several times copies it."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
