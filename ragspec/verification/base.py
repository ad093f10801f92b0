"""The interface between the decoding loop and a target model: the session of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor

from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.sequence_cache import SequenceCache


class TargetSession:
    """The caches of sequences of different lengths, as a context manager.

    A forward covers the *selected* rows. These are all at first, later those of the last
    `select_rows`, in the order that it returned. `trim_draft`, `verify` and `commit` address rows
    by their index among these; `join`, `fork`, `leave` and `select_rows` by their numbers.

    Subclasses define `new_row`, `copy_row`, `verify` and `commit`. By default rows share nothing
    and hold only committed tokens, and forwards run in `settle`.

    Args:
        rows: Empty rows to begin with, numbered from 0; `join` adds others.

    Attributes:
        ahead: Whether a launched forward runs while the host does other things.
        chosen: For each row the target's own tokens after the root and the nodes, of the last
            forward. The host computes tokens below 0 from the logits. None if it computes all.
    """

    ahead = False
    chosen: list[list[int]] | None = None

    def __init__(self, rows: int) -> None:
        self._rows: dict[int, Any] = {row: self.new_row() for row in range(rows)}
        self._line = list(self._rows)
        self._waiting: tuple[Sequence[Sequence[int]], Sequence[DraftTree]] = (), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._rows, self._line = {}, []

    @property
    def active_rows(self) -> list[Any]:
        """The selected rows."""
        return [self._rows[row] for row in self._line]

    @property
    def caches(self) -> Mapping[int | None, SequenceCache]:
        """The keys and values of the rows that have buffers of their own, by number."""
        return {}

    @property
    def seconds(self) -> float:
        """Device seconds of the last settled forward, 0 if the device does not measure them."""
        return 0.0

    def new_row(self) -> Any:
        """Return an empty row."""
        raise NotImplementedError

    def copy_row(self, row: Any) -> Any:
        """Return a copy of a row, as of the last commit."""
        raise NotImplementedError

    def join(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> tuple[int, int]:
        """Add a row for a sequence; return its number and the count of cached tokens.

        The cached tokens are the common prefix with an earlier sequence of the same tenant. The
        last token is never among them: it must be read.

        Args:
            room: Tokens for which there should be room behind these.
        """
        return self._add(self.new_row()), 0

    def fork(self, row: int) -> int:
        """Copy the committed tokens of a row to a new row; return the number of the new row."""
        return self._add(self.copy_row(self._rows[row]))

    def leave(self, row: int, keep: bool = True) -> None:
        """Drop a row.

        Args:
            keep: Whether its keys and values may serve sequences with a common prefix.
        """
        del self._rows[row]
        self._line = [other for other in self._line if other != row]

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Select the rows of the next forwards; return them in the order of the batch.

        Uncommitted tokens are discarded.
        """
        self._line = list(rows)
        return list(rows)

    def discard_uncommitted(self) -> list[int]:
        """Discard uncommitted tokens, also of an interrupted forward; return the emptied rows.

        A row is emptied completely if its cache cannot drop single tokens.
        """
        return []

    def shrink(self) -> None:
        """Free the memory of sequences that have left."""

    def trim_draft(self, tree: DraftTree, row: int = 0, text: Sequence[int] = ()) -> DraftTree:
        """Trim a row's next draft to the part that this session can verify.

        Args:
            row: The index of the row among the selected ones.
            text: All committed tokens of the row, the root last.
        """
        return tree

    def verify(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> list[Tensor]:
        """Run one forward over the pending tokens and the draft trees below them.

        Args:
            pending: For each row the committed tokens that the cache lacks, the root last. At first
                this is the whole prompt.
            trees: One draft tree per row.

        Returns:
            Logits [N + 1, V] of each row, the root first, then its nodes. Further entries are
            undefined.
        """
        raise NotImplementedError

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the pending tokens and these nodes of the last forward; drop all other nodes."""
        raise NotImplementedError

    def follow(
        self, distributions: Sequence[TokenDistribution], texts: Sequence[Sequence[int]]
    ) -> None:
        """Let the next forward choose tokens by these distributions and keep the accepted paths.

        `commit` must then receive these paths or prefixes of them. If the session or a distribution
        does not support it, the host chooses.

        Args:
            texts: All committed tokens of each row, the root last. Not modified.
        """

    def launch(self, pending: Sequence[Sequence[int]], trees: Sequence[DraftTree]) -> None:
        """Start a forward, which may be abandoned; `verify` equals this and then `settle`.

        Rows and their texts must not change until `settle`.
        """
        self._waiting = pending, trees

    def settle(self) -> list[Tensor]:
        """Wait for the launched forward; return the logits of `verify`."""
        return self.verify(*self._waiting)

    def _add(self, held: Any) -> int:
        """Add a row under the lowest free number."""
        row = next(number for number in range(len(self._rows) + 1) if number not in self._rows)
        self._rows[row] = held
        return row
