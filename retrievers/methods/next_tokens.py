"""Next tokens: what a model writes on average after the same one to three tokens.

A table of n-grams that comes with a model, made of the model's own distributions over many texts
(`training/next_tokens.py`), as N-Grammys (arXiv 2411.03786) derives bigrams from the weights. A row
already mixes in those of shorter keys. It costs no forward, needs no output of the target, and
learns nothing from a text, so it cannot reveal another.
"""

from bisect import bisect_left
from functools import lru_cache
from pathlib import Path

import numpy as np

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.method import Method
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.methods.token_recycling import NeighbourRow, Place, grow, last_place
from ragspec.storage.filesystem import unreadable
from ragspec.trees.draft_tree import DraftTree

LONGEST = 3  # tokens of a key
BITS = 21  # of each of them, the newest lowest; all are set where there is no token
MOST = (1 << BITS) - 1
UNIT = 255  # a chance of 1 in the file
_RECENT = 1 << 13  # places that are looked up once


class NextTokenDrafter(Drafter):
    """Drafts from a table in a file, which is mapped.

    The file is an array of NumPy with the fields key u64, ascending; tokens [K], best first; and
    their chances u8 [K] in 1/255, 0 behind the last.

    Args:
        path: The file.

    Raises:
        InputError: Without a file.
        StoreError: It cannot be read, or holds something else.
    """

    method = Method("a table of next tokens", "N-Grammys", needs=frozenset({"table"}), listed=False)
    name = "next-tokens"

    def __init__(self, path: Path | str | None = None) -> None:
        if path is None:
            raise InputError("got no table; expected the path of its file.")
        try:
            self._rows = np.load(path, mmap_mode="r")
            self._keys = memoryview(np.ascontiguousarray(self._rows["key"]).data)
            self._size = int(self._rows["tokens"].max()) + 1
            self._rows["chances"].shape[1]
        except OSError as error:
            raise unreadable(Path(path), error) from error
        except (ValueError, IndexError, EOFError) as error:
            raise StoreError(
                f"{path} is damaged, or no table of next tokens. Install ragspec again, or write "
                "the file with training/next_tokens.py."
            ) from error
        self.path, self.find = path, lru_cache(_RECENT)(self._find)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the path."""
        return type(self), (self.path,)

    def open(self, request: DraftRequest) -> "NextTokenSession":
        """Return a session; raise StoreError if the model lacks token ids of the table."""
        if self._size > request.vocab_size:
            raise StoreError(
                f"{self.path} has {self._size} token ids, the model {request.vocab_size}; expected "
                "a table of this model."
            )
        return NextTokenSession(self, request.chains)

    def _find(self, place: Place) -> NeighbourRow | None:
        """Return the row of the longest known key at the end of a place, None without one."""
        older, before, last = (token & MOST for token in place)
        key = older << 2 * BITS | before << BITS | last
        for shorter in reversed(range(LONGEST)):
            at = bisect_left(self._keys, key)
            if at < len(self._keys) and self._keys[at] == key:
                row = self._rows[at]
                chances = tuple(each / UNIT for each in row["chances"].tolist() if each)
                return NeighbourRow(row["tokens"].tolist()[: len(chances)], chances)
            key |= MOST << BITS * shorter
        return None


class NextTokenSession(DraftSession):
    """The drafts of one text; see `NextTokenDrafter`."""

    def __init__(self, drafter: NextTokenDrafter, chains: bool) -> None:
        self._find, self._chains = drafter.find, chains

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the at most `budget` likeliest nodes."""
        place, deepest = last_place(context.tokens), context.remaining - 1
        return grow(self._find, place, budget, deepest, NextTokenDrafter.name, not self._chains)

    def expected_acceptance(self, context: DraftContext) -> float:
        """Return the chance of the best token."""
        row = self._find(last_place(context.tokens))
        return row.chances[0] if row else 0.0
