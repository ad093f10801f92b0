"""The nouns of the core: trees, drafters, steps. Every other module imports them from here.

Legend used in all docstrings: B rows, N draft nodes, V vocabulary, T committed tokens,
D depth, A accepted nodes.

A draft tree hangs below the *root*: the last committed token, whose key and value the target
has not seen yet. Node i has the token `tokens[i]` and the parent `parents[i] < i`, or -1 where
its parent is the root. What can be derived (depths, ancestors, paths) lives in `tree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.errors import InputError

if TYPE_CHECKING:
    from ragspec.adviser import Adviser
    from ragspec.law import TokenLaw
    from ragspec.rules import TargetView
    from ragspec.tops import Tops

ROOT = -1
NO_ORIGIN = (-1, -1)
PREDICTION = -2  # the document of an origin in a predicted output
LAYOUT = -3  # and in the words that a prompt asks for around the answer

Ints = NDArray[np.int64]


class DraftKind(StrEnum):
    """How the tokens of a draft came about; a rule declares which kinds it may judge."""

    DETERMINISTIC = "deterministic"
    COUPLED = "coupled"
    SAMPLED = "sampled"
    SAMPLED_WITHOUT_REPLACEMENT = "sampled-without-replacement"


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Draft tokens below the root, parents before children.

    Shapes: tokens i64 [N], parents i64 [N] (-1 = child of the root), reach f32 [N] (estimated
    probability that the node is accepted), source i64 [N] (index into `sources`), origin i64
    [N, 2] (document, token offset in it; -1 where there is none), q f64 [N + 1, V] (row 0 the law
    at the root, row i + 1 the law at node i; only rows of nodes with children matter).
    Siblings carry distinct tokens unless `kind` is SAMPLED.
    """

    tokens: Ints
    parents: Ints
    reach: NDArray[np.float32]
    source: Ints
    origin: Ints
    sources: tuple[str, ...]
    kind: DraftKind = DraftKind.DETERMINISTIC
    q: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def empty(cls, kind: DraftKind = DraftKind.DETERMINISTIC) -> DraftTree:
        """Return the tree of no nodes: the step that verifies it is plain decoding."""
        return _empty(kind)

    @classmethod
    def build(
        cls,
        tokens: Sequence[int] | Ints,
        parents: Sequence[int] | Ints,
        source: str,
        *,
        reach: Sequence[float] | NDArray[np.float32] | None = None,
        origin: Sequence[tuple[int, int]] | Ints | None = None,
        kind: DraftKind = DraftKind.DETERMINISTIC,
        q: torch.Tensor | None = None,
    ) -> DraftTree:
        """Return a tree of one source; reach defaults to 1, origin to none."""
        n = len(tokens)
        if not n and q is None:
            return _empty(kind)
        if origin is None:
            origin = np.full((n, 2), -1, dtype=np.int64)
        return cls(
            tokens=np.asarray(tokens, dtype=np.int64),
            parents=np.asarray(parents, dtype=np.int64),
            reach=np.ones(n, np.float32) if reach is None else np.asarray(reach, np.float32),
            source=np.zeros(n, dtype=np.int64),
            origin=np.asarray(origin, np.int64).reshape(n, 2),
            sources=(source,),
            kind=kind,
            q=q,
        )

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int] | Ints,
        source: str,
        *,
        reach: Sequence[float] | NDArray[np.float32] | None = None,
        origin: Sequence[tuple[int, int]] | Ints | None = None,
        kind: DraftKind = DraftKind.DETERMINISTIC,
        q: torch.Tensor | None = None,
    ) -> DraftTree:
        """Return the tree in which every node continues the one before it."""
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int64)
        return cls.build(tokens, parents, source, reach=reach, origin=origin, kind=kind, q=q)


@cache
def _empty(kind: DraftKind) -> DraftTree:
    """Return the empty tree of a kind: one is met at every plain step."""
    none = np.zeros(0, dtype=np.int64)
    origin = np.zeros((0, 2), dtype=np.int64)
    return DraftTree(none, none, np.zeros(0, np.float32), none, origin, ("none",), kind)


@dataclass(frozen=True, slots=True)
class SourceText:
    """A text that a drafter may copy from: a retrieved passage, a prediction, a document.

    tokens: the ids of the text. document: an index that comes back in `origin` and citations;
    below 0 where it is no document and nothing may be cited from it, as PREDICTION and LAYOUT.
    offset: the token offset of `tokens[0]` in the document (0 where the text is the document).
    """

    tokens: tuple[int, ...]
    document: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter is told once, when a row starts: the prompt and what it was made from.

    spans: parts of the prompt that were copied from documents, as (start, end, document, offset)
    in tokens: prompt[start:end] is document text from token `offset` on; these give `origin`.
    texts: further texts that are not part of the prompt.
    law: the row's token law (processors and noise), for drafters that draw.
    device: where the target is, for drafters that keep what they learn there; None is the host.
    """

    prompt: tuple[int, ...]
    vocab_size: int
    spans: tuple[tuple[int, int, int, int], ...] = ()
    texts: tuple[SourceText, ...] = ()
    law: TokenLaw | None = None
    device: torch.device | None = None


@dataclass(slots=True)
class DraftContext:
    """What a drafter may look at before each step. It must not change it.

    tokens: prompt and generated tokens, the root last [T]. prompt_length: tokens of the prompt.
    remaining: tokens that may still be generated; no use to draft deeper. adviser: knows how far
    claims are to be believed and which sources pay; None where there is nobody to ask.
    """

    tokens: list[int]
    prompt_length: int
    remaining: int
    adviser: Adviser | None = None

    @property
    def generated(self) -> int:
        """Index of the next generated token (0 = the first after the prompt)."""
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True)
class Step:
    """One draft, one forward of the target, one verdict.

    path: accepted nodes, root side first [A]. tokens: what was emitted, the accepted tokens and
    the target's own last one [A + 1] (shorter where a stop condition cut it).
    best: optional, the target's best tokens at the root and every node, where the target made them;
    `top` has them on the host. hidden: optional [copies, N + 1, H], the target's last hidden states
    there, for drafters that declare `needs_hidden`; with guidance a sequence has several copies,
    the conditional one first. view: the target's own choices and laws there, those of nodes that no
    rule visited too; not `ends`; None with processors that keep a memory. All three are lent for
    the time of `observe`.
    excess: total variation that a relaxed rule may have added, one figure for each of `tokens`;
    none from rules that measure none.
    """

    tree: DraftTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    milliseconds: dict[str, float] = field(default_factory=dict)
    best: Tops | None = None
    hidden: torch.Tensor | None = None
    view: TargetView | None = None
    excess: tuple[float, ...] = ()

    @property
    def top(self) -> Ints | None:
        """The target's best tokens at the root and every node, on the host: i64 [N + 1, k]."""
        return None if self.best is None else self.best.host()


class DraftSession(Protocol):
    """The state of one drafter for one row of text.

    A session that can tell at next to no cost how likely its best draft of the next token would be
    accepted may also have `outlook(context)`: that probability. Where it is poor, nobody drafts.
    """

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` nodes below the last token of `context`; state may advance."""
        ...

    def observe(self, step: Step) -> None:
        """Learn what came of the last proposal; `step.tokens` are now committed."""
        ...

    def rollback(self, n: int) -> None:
        """Forget the last `n` committed tokens."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Something cheap that proposes tokens. It holds no row state; `open` makes it."""

    @property
    def name(self) -> str:
        """The name under which its nodes are reported."""
        ...

    @property
    def kind(self) -> DraftKind:
        """The kind of tree that its sessions propose."""
        ...

    def open(self, request: DraftRequest) -> DraftSession:
        """Return a fresh session for one row. Sessions share nothing that a step changes."""
        ...


def expect_drafter(drafter: object) -> None:
    """Raise InputError for anything else than a drafter, a class of drafters included."""
    if isinstance(drafter, type) or not isinstance(drafter, Drafter):
        got = drafter.__name__ if isinstance(drafter, type) else type(drafter).__name__
        what = f"the class {got}" if isinstance(drafter, type) else got
        raise InputError(
            f"got {what} as a drafter; expected an object with name, kind and open(request), "
            "such as ContextDrafter() or store.drafter()."
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decided: accepted nodes from the root down [A], and the target's own token.

    token is None where the text ends with the path. excess: what a relaxed rule measured, the
    total variation that each emitted position may add, in their order; none from other rules.
    """

    path: tuple[int, ...]
    token: int | None
    excess: tuple[float, ...] = ()
