"""What the loop asks of a target: the session of one generation, whatever model lies behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self, runtime_checkable

from torch import Tensor

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree


class TargetSession(Protocol):
    """A cache of R rows, which texts join and leave and which grow at their own pace.

    A forward covers the B rows *in line*: all of them at first, then those of the last `line_up`,
    in the order that it returned. `admit`, `verify` and `commit` are about these; `join`, `fork`,
    `leave` and `line_up` go by the numbers 0 .. R - 1 of rows. A context manager.
    """

    def join(self, tokens: Sequence[int], scope: str = "") -> tuple[int, int]:
        """Take a free row for a text; return its number and how many tokens it holds already.

        Those are what the text has in common with one of the same scope that was read here before,
        less the last token, which is always to be read. Raises InputError where no row is free.
        """

    def fork(self, row: int) -> int:
        """Take a free row that holds all that this one has committed; return its number."""

    def leave(self, row: int) -> None:
        """Give a row back; its keys serve texts that begin alike until another text takes it."""

    def line_up(self, rows: Sequence[int]) -> list[int]:
        """Let the next forwards cover these rows; return them in the order in which they lie.

        What was not committed is forgotten.
        """

    def abandon(self) -> list[int]:
        """Forget what was not committed, also of a forward that was broken off by an error.

        Returns the rows that hold nothing any more, where what they held cannot be told apart.
        """

    def admit(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Return the part of a row's next draft that this session verifies, at a fair price.

        row: its place in line. text: all committed tokens of the row, the root last.
        """

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> Tensor:
        """Run one forward over committed-but-unseen tokens and the draft below them.

        pending: for each row the committed tokens not yet in the cache, the root last (the whole
        prompt at first). trees: one draft a row, same row order. Returns logits [B, N + 1, V]:
        row b has the root's first, then its nodes'; what lies beyond its own N is undefined.
        """

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending tokens and these nodes of the last forward, drop all others."""

    def shrink(self) -> None:
        """Free the memory of the rows that nobody has; it is taken again when they are wanted."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


# The keys and values of the first n tokens of a text: a pair [1, heads, n, width] for each layer.
Beginning = Sequence[tuple[Tensor, Tensor]]


@runtime_checkable
class CachedSession(TargetSession, Protocol):
    """A session over a key-value cache that can be cut, shared and read in parts.

    hidden: of the last forward, for each row [copies, n, H] what the output head reads: after
    `verify` at the root and the nodes (beyond a row's own undefined), after `read_prompts` at the
    prompt's last n tokens. cfg_branches: cache rows of a sequence, 2 with guidance, the conditional
    one first. on_read: None, or called with the tokens of the longest prompt that were read and
    those in all; with 0 at first and then after every part. Not for what is read at once.
    """

    hidden: list[Tensor]
    on_read: Callable[[int, int], None] | None

    def resume(self, length: int) -> int:
        """Forget all but the first `length` committed tokens; return how many are left.

        What an interrupt left half done is forgotten too. The session is to be entered again.
        """

    def beginning(self, length: int) -> Beginning | None:
        """Return a copy of the first committed tokens' keys and values; None where not fit."""

    def begin_with(self, beginning: Beginning) -> None:
        """Forget everything and hold these keys and values as committed tokens."""

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[Tensor, list[TopTokens]]:
        """Verify empty trees; return logits [B, 1, V] and the best tokens along the prompts.

        These are, for each row, the k best after the last T' tokens of the prompt, where T' may be
        smaller than the prompt, 0 included. No rows where k is 0.
        """

    def read_states(self, tokens: Sequence[int]) -> Tensor | None:
        """Read more of the one row, as `verify` does without a draft; `commit` is to follow.

        Returns what the output head would read at each of the tokens, [copies, n, H]; None where it
        has no part in the model. No logits but the last are computed.
        """

    def keep_hidden(self) -> None:
        """Keep the hidden states of all forwards from now on."""


@runtime_checkable
class StepSession(TargetSession, Protocol):
    """A session whose forwards choose the target's tokens and run beside the host.

    `verify` is `launch`, then `settle`. What was launched may be abandoned. chosen: of the last
    forward, for each row the target's own tokens after the root and the nodes; below 0 what is to
    be computed from the logits. None where nothing was followed. seconds: that the device took for
    the last forward that has settled, 0 where it does not say.
    """

    chosen: list[list[int]] | None

    @property
    def seconds(self) -> float:
        """The seconds of the device."""

    def follow(
        self, distributions: Sequence[TokenDistribution], texts: Sequence[Sequence[int]]
    ) -> None:
        """Let the next forward choose by these distributions and keep the walk's paths.

        texts: all committed tokens of each row, the root last; lent. `commit` then gets these
        paths, or beginnings of them. Laws that the session does not know are left to the host.
        """

    def launch(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> None:
        """Begin a forward; see `verify`. Rows and their texts stay as they are until it settles."""

    def settle(self) -> Tensor:
        """Wait for the forward that was launched; returns what `verify` does."""
