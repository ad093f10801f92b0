"""The interface between the decoding loop and a target model: the session of a generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from torch import Tensor

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree


class TargetSession(Protocol):
    """The caches of sequences of different lengths, as a context manager.

    A forward covers the *selected* rows: at first all, later those of the last `select_rows`, in
    the order that it returned. `trim_draft`, `verify` and `commit` address rows by their index
    among these; `join`, `fork`, `leave` and `select_rows` by their numbers.
    """

    def join(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> tuple[int, int]:
        """Add a row for a sequence; return its number and the count of cached tokens.

        The cached tokens are the common prefix with an earlier sequence of the same tenant. The
        last token is never among them: it must be read.

        Args:
            room: Tokens for which there should be room behind these.
        """

    def fork(self, row: int) -> int:
        """Copy the committed tokens of a row to a new row; return the number of the new row."""

    def leave(self, row: int, keep: bool = True) -> None:
        """Drop a row.

        Args:
            keep: Whether its keys and values may serve sequences with a common prefix.
        """

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Select the rows of the next forwards; return them in the order of the batch.

        Uncommitted tokens are discarded.
        """

    def discard_uncommitted(self) -> list[int]:
        """Discard uncommitted tokens, also of an interrupted forward; return the emptied rows.

        A row is emptied completely if its cache cannot drop single tokens.
        """

    def trim_draft(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Trim a row's next draft to the part that this session can verify.

        Args:
            row: The index of the row among the selected ones.
            text: All committed tokens of the row, the root last.
        """

    def verify(
        self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]
    ) -> Sequence[Tensor]:
        """Run one forward over the pending tokens and the draft trees below them.

        Args:
            pending: For each row the committed tokens that the cache lacks, the root last. At first
                this is the whole prompt.
            trees: One draft tree per row.

        Returns:
            Logits [N + 1, V] of each row, the root first, then its nodes. Further entries are
            undefined.
        """

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending tokens and these nodes of the last forward; drop all other nodes."""

    def shrink(self) -> None:
        """Free the memory of sequences that have left."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


@runtime_checkable
class CachedSession(TargetSession, Protocol):
    """A session whose hidden states can be read, and prompts along with their best tokens.

    Attributes:
        hidden: Hidden states of the last forward that the output head reads, [copies, n, H] for
            each row. `copies` is 2 with guidance, the conditional one first. After `verify` they
            are those of the root and the nodes, undefined beyond a row's own. After `read_prompts`
            they are those of the prompt's last n tokens.
    """

    hidden: list[Tensor]

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[Sequence[Tensor], list[TopTokens]]:
        """Read the prompts; return the last logits [1, V] of each and the best tokens along it.

        The best tokens are, for each row, the k best after each of the prompt's last T' tokens.
        T' may be shorter than the prompt, even 0. If k is 0, the list is empty.
        """

    def keep_hidden(self) -> None:
        """Keep the hidden states of all later forwards."""


@runtime_checkable
class StepSession(TargetSession, Protocol):
    """A session whose forwards choose the target's tokens and run asynchronously to the host.

    `verify` equals `launch` and then `settle`. A launched forward may be abandoned.

    Attributes:
        chosen: For each row the target's own tokens after the root and the nodes, of the last
            forward. The host computes tokens below 0 from the logits. None without `follow`.
    """

    chosen: list[list[int]] | None

    @property
    def seconds(self) -> float:
        """Device seconds of the last settled forward, 0 if the device does not measure them."""

    def follow(
        self, distributions: Sequence[TokenDistribution], texts: Sequence[Sequence[int]]
    ) -> None:
        """Let the next forward choose tokens by these distributions and keep the accepted paths.

        `commit` must then receive these paths or prefixes of them. If a distribution is not
        supported, the host chooses.

        Args:
            texts: All committed tokens of each row, the root last. Not modified.
        """

    def launch(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> None:
        """Start a forward; see `verify`. Rows and their texts must not change until `settle`."""

    def settle(self) -> Sequence[Tensor]:
        """Wait for the launched forward; return the logits of `verify`."""
