"""Draft trees, which drafters propose, budgets cut and rules judge.

Legend of all docstrings, here and in `rules`: B rows, N draft nodes, V vocabulary, T committed
tokens, D depth, A accepted nodes.

The *root* of a draft tree is the last committed token, which is not in the target's KV cache yet.
Node i has the token `tokens[i]` and the parent `parents[i] < i`; the parent -1 is the root.
`operations` derives depths, ancestors and paths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

ROOT = -1
NO_ORIGIN = (-1, -1)
PREDICTION = -2  # the document of origins in a predicted output
LAYOUT = -3  # the document of origins in the words that a prompt asks for around the answer

Ints = NDArray[np.int64]


class DraftKind(StrEnum):
    """How the tokens of a draft were chosen; a rule declares the kinds that it can judge."""

    DETERMINISTIC = "deterministic"
    COUPLED = "coupled"
    SAMPLED = "sampled"
    SAMPLED_WITHOUT_REPLACEMENT = "sampled-without-replacement"


SAMPLED_KINDS = frozenset({DraftKind.SAMPLED, DraftKind.SAMPLED_WITHOUT_REPLACEMENT})
"""The kinds whose tokens were drawn from a distribution q, see `operations.keep_order`."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Draft tokens below the root, parents before children.

    Siblings have distinct tokens unless `kind` is SAMPLED. Nodes of `SAMPLED_KINDS` are in the
    order of their draws.

    Attributes:
        tokens: Token ids i64 [N].
        parents: Parent nodes i64 [N]; -1 is the root.
        accept_prob: Estimated probability that the node is accepted, f32 [N].
        source: Index into `sources`, i64 [N].
        origin: Document and token offset in it, i64 [N, 2]; -1 for none.
        q: The draft's distributions f64 [N + 1, V], row 0 after the root and row i + 1 after node
            i. Only rows of nodes with children matter.
    """

    tokens: Ints
    parents: Ints
    accept_prob: NDArray[np.float32]
    source: Ints
    origin: Ints
    sources: tuple[str, ...]
    kind: DraftKind = DraftKind.DETERMINISTIC
    q: "Tensor | None" = None

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls, kind: DraftKind = DraftKind.DETERMINISTIC) -> "DraftTree":
        """Return the tree without nodes; a step that verifies it is plain decoding."""
        return _empty(kind)

    @classmethod
    def build(
        cls,
        tokens: Sequence[int] | Ints,
        parents: Sequence[int] | Ints,
        source: str,
        *,
        accept_prob: Sequence[float] | NDArray[np.float32] | None = None,
        origin: Sequence[tuple[int, int]] | Ints | None = None,
        kind: DraftKind = DraftKind.DETERMINISTIC,
        q: "Tensor | None" = None,
    ) -> "DraftTree":
        """Return a tree of one source; `accept_prob` defaults to 1, `origin` to none."""
        n = len(tokens)
        if not n and q is None:
            return _empty(kind)
        if origin is None:
            origin = np.full((n, 2), -1, dtype=np.int64)
        return cls(
            tokens=np.asarray(tokens, dtype=np.int64),
            parents=np.asarray(parents, dtype=np.int64),
            accept_prob=np.asarray([1.0] * n if accept_prob is None else accept_prob, np.float32),
            source=np.zeros(n, dtype=np.int64),
            origin=np.asarray(origin, np.int64).reshape(n, 2),
            sources=(source,),
            kind=kind,
            q=q,
        )

    @classmethod
    def chain(cls, tokens: Sequence[int] | Ints, source: str, **columns: Any) -> "DraftTree":
        """Return the tree in which every node continues the one before; `columns` as in `build`."""
        return cls.build(tokens, np.arange(-1, len(tokens) - 1), source, **columns)


@cache
def _empty(kind: DraftKind) -> DraftTree:
    """Return the empty tree of a kind, cached because every plain step uses one."""
    none = np.zeros(0, dtype=np.int64)
    origin = np.zeros((0, 2), dtype=np.int64)
    return DraftTree(none, none, np.zeros(0, np.float32), none, origin, ("none",), kind)
