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
from ragspec.errors import StoreError
from ragspec.retrievers.indexes.suffix_array import TokenRow
from ragspec.retrievers.methods.token_recycling import NeighbourRow, Place, grow, last_place
from ragspec.storage.filesystem import expect_path, unreadable
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget

LONGEST = 3  # tokens of a key
BITS = 21  # of each of them, the newest lowest; all are set where there is no token
MOST = (1 << BITS) - 1
UNIT = 255  # a chance of 1 in the file
_RECENT = 1 << 13  # places that are looked up once


class NextTokenDrafter(Drafter):
    """Drafts from a table in a file.

    The file is an array of NumPy with the fields key u64, ascending; tokens [K], best first; and
    their chances u8 [K] in 1/255, 0 behind the last.

    Raises:
        StoreError: The file cannot be read, or holds something else.
    """

    method = Method(
        "the model's usual next tokens",
        "N-Grammys",
        make=lambda sources: NextTokenDrafter(sources.table),
        needs=frozenset({"table"}),
        listed=False,
    )
    name = "next-tokens"

    def __init__(self, path: Path | str | None) -> None:
        self.path = expect_path(path, "a table of next tokens").absolute()
        try:
            with self.path.open("rb") as file:
                rows = np.lib.format.read_array(file)
            self._tokens, self._chances = rows["tokens"], rows["chances"]
            keys = np.ascontiguousarray(rows["key"])
            sound = _are_sound(keys, self._tokens, self._chances)
        except OSError as error:
            raise unreadable(self.path, error) from error
        except Exception:  # whatever a damaged header leads to
            sound = False
        if not sound:
            raise StoreError(
                f"{self.path} is damaged, or no table of next tokens. Install ragspec again, or "
                "write the file with training/next_tokens.py."
            )
        self._keys, self._size = memoryview(keys.data), int(self._tokens.max()) + 1
        self.find = lru_cache(_RECENT)(self._find)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the path."""
        return type(self), (self.path,)

    def fits(self, model: object = None, tokenizer: object = None) -> None:
        """Raise StoreError if an engine's target lacks token ids of the table."""
        if isinstance(model, CausalTarget) and self._size > model.vocab_size:
            raise StoreError(
                f"{self.path} has {self._size} token ids; expected the model's {model.vocab_size}."
            )

    def open(self, request: DraftRequest) -> "NextTokenSession":
        """Return a session, which keeps no text."""
        return NextTokenSession(self, request.chains)

    def _find(self, place: Place) -> NeighbourRow | None:
        """Return the row of the longest known key at the end of a place, None without one."""
        older, before, last = (token & MOST for token in place)
        key = older << 2 * BITS | before << BITS | last
        for shorter in reversed(range(LONGEST)):
            at = bisect_left(self._keys, key)
            if at < len(self._keys) and self._keys[at] == key:
                chances = tuple(each / UNIT for each in self._chances[at].tolist() if each)
                return NeighbourRow(self._tokens[at].tolist()[: len(chances)], chances)
            key |= MOST << BITS * shorter
        return None


def _are_sound(keys: TokenRow, tokens: TokenRow, chances: TokenRow) -> bool:
    """Return whether the fields of a table have their types, shapes and orders."""
    kinds = keys.dtype == "<u8" and tokens.dtype in ("<u2", "<u4") and chances.dtype == "u1"
    shapes = keys.ndim == 1 and len(keys) > 0 and tokens.ndim == 2 and tokens.shape == chances.shape
    rising = bool((keys[1:] > keys[:-1]).all())
    falling = bool((chances[:, 1:] <= chances[:, :-1]).all() and (chances[:, 0] > 0).all())
    return kinds and shapes and rising and falling


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
