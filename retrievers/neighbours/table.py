"""The neighbour table: the target's best next tokens after every token, learned as it decodes.

Token Recycling, arXiv 2408.08696, section 3: the adjacency matrix. Deviations: rows that were never
learned are empty, not zero, so token 0 is not drafted without evidence; the last one or two tokens
before may be part of the key, and the longest known key counts; each row counts how often its best
token was confirmed, which separates reliable rows from others.

The table is on the host, where trees are grown: [N + 1, k] tokens cross from a device in a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.fingerprints import check_prints, prints_of
from ragspec.sampling.top_tokens import TopTokens
from ragspec.storage.manifest import Verify
from ragspec.storage.store import open_store, publish
from ragspec.trees.draft_tree import Ints

KIND = "neighbours"
LONGEST = 3
MOST_CONTEXTS = 1 << 15
NOTHING = -1
SUREST = 4

Place = tuple[
    int, int, int
]  # the last three tokens, the newest last; NOTHING where there are fewer


class NeighbourRow(NamedTuple):
    """The best tokens after a key, best first.

    Attributes:
        order: Tokens of the key, 1 to 3.
        sure: How often in a row the best token was confirmed, 0 to 4.
    """

    tokens: list[int]
    order: int
    sure: int


class NeighbourRows:
    """A table or a layer over one; shared: whether other texts see what is learned."""

    k: int
    shared: bool

    def find(self, place: Place) -> NeighbourRow | None:
        """Return the row of the longest known key that ends the place, None where there is none."""
        raise NotImplementedError

    def learn(self, place: Place, best: list[int]) -> None:
        """Replace the rows of the place by the tokens that the target ranks best after it [k]."""
        raise NotImplementedError

    def learn_text(self, tokens: Iterable[int], top: Iterable[list[int]]) -> None:
        """Learn from consecutive tokens [T] and the target's best ones after each [T, k]."""
        older, before = NOTHING, NOTHING
        for token, best in zip(tokens, top, strict=True):
            self.learn((older, before, token), best)
            older, before = before, token

    def learn_prompt(self, tokens: Ints, top_tokens: TopTokens) -> None:
        """Learn the best tokens after consecutive tokens i64 [T]."""
        self.learn_text(tokens.tolist(), top_tokens.host()[:, : self.k].tolist())

    def learn_step(
        self, places: Sequence[Place], order: Sequence[int], top_tokens: TopTokens
    ) -> None:
        """Learn the best tokens after the places, in that order of their numbers."""
        best = top_tokens.host()[:, : self.k].tolist()
        for at in order:
            self.learn(places[at], best[at])


class NeighbourTable(NeighbourRows):
    """For each of V tokens the k best next ones: int32 [V, k], and rows of longer keys.

    Args:
        orders: The longest key, 1 (the paper's) to 3 tokens.
        contexts: The most rows of longer keys that are kept, least recently learned dropped first.

    Attributes:
        fingerprints: Of the model and tokenizer whose table it is, where they are known. May be
            shared by threads.

    Raises:
        InputError: For sizes below 1 or orders outside 1 .. 3.
    """

    def __init__(
        self, vocab_size: int, k: int = 8, *, orders: int = LONGEST, contexts: int = MOST_CONTEXTS
    ) -> None:
        if vocab_size < 1 or k < 1 or not 1 <= orders <= LONGEST or contexts < 1:
            raise InputError(
                f"got vocab_size {vocab_size}, k {k}, orders {orders}, contexts {contexts}; "
                f"expected sizes of at least 1 and orders from 1 to {LONGEST}."
            )
        self.vocab_size = vocab_size
        self.k = min(k, vocab_size)
        self.orders = orders
        self.rows: NDArray[np.int32] = np.full((vocab_size, self.k), NOTHING, dtype=np.int32)
        self.sure: NDArray[np.uint8] = np.zeros(vocab_size, dtype=np.uint8)
        self.longer = LongerKeys(contexts)
        self.fingerprints: dict[str, str] = {}
        self.shared = True
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of tokens whose neighbours are known."""
        return int((self.rows[:, 0] != NOTHING).sum())

    def row(self, token: int) -> NeighbourRow | None:
        """Return what is known after the token alone."""
        result: list[int] = self.rows[token].tolist()
        if result[0] == NOTHING:
            return None
        return NeighbourRow(result, 1, int(self.sure[token]))

    def find(self, place: Place) -> NeighbourRow | None:
        """Return the row of the longest known key; see `NeighbourRows.find`."""
        for order in range(self.orders, 1, -1):
            result = self.longer.get(place, order)
            if result is not None:
                return result
        return self.row(place[2])

    def learn(self, place: Place, best: list[int]) -> None:
        """Replace the rows of the place; see `NeighbourRows.learn`."""
        token = place[2]
        with self._lock:
            if self.rows[token, 0] == best[0]:
                self.sure[token] = min(int(self.sure[token]) + 1, SUREST)
            else:
                self.sure[token] = 0
            self.rows[token] = best[: self.k]
            for order in range(2, self.orders + 1):
                self.longer.learn(place, order, best)

    def layer(self) -> NeighbourLayer:
        """Return what one text may teach without changing the table."""
        return NeighbourLayer(self)

    def save(self, folder: Path | str, *, model: Any = None, tokenizer: Any = None) -> None:
        """Publish the table as a store of this model and tokenizer; None leaves them as they were.

        Raises:
            StoreError: Where the folder holds something else or is being written.
        """
        self.fingerprints |= prints_of(model, tokenizer)
        with self._lock:
            arrays = {"rows": self.rows.copy(), "sure": self.sure.copy(), **self.longer.arrays()}

        def write(build: Path) -> None:
            for name, array in arrays.items():
                np.save(build / f"{name}.npy", array, allow_pickle=False)

        parameters = {"vocab_size": self.vocab_size, "k": self.k, "orders": self.orders}
        parameters["contexts"] = self.longer.most
        prints = self.fingerprints
        publish(Path(folder), KIND, write, parameters=parameters, fingerprints=prints)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        model: Any = None,
        tokenizer: Any = None,
        verify: Verify = "full",
    ) -> NeighbourTable:
        """Read a table that `save` wrote; it is then a copy of its own.

        Raises:
            StoreError: Where it is missing, damaged, or not of this model and tokenizer.
        """
        store = open_store(Path(folder), KIND, verify=verify)
        check_prints(str(folder), store.manifest.fingerprints, prints_of(model, tokenizer))
        try:
            names = ("rows", "sure", "keys", "key_rows", "key_orders", "key_sure")
            read = {name: np.load(store.file(f"{name}.npy"), allow_pickle=False) for name in names}
            sizes = store.manifest.parameters
            table = cls(
                int(sizes["vocab_size"]),
                int(sizes["k"]),
                orders=int(sizes["orders"]),
                contexts=int(sizes["contexts"]),
            )
            table._fill(read)
            table.fingerprints = dict(store.manifest.fingerprints)
        except StoreError:
            raise
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise StoreError(f"{folder} is damaged ({error}); save the table again.") from error
        return table

    def _fill(self, read: Mapping[str, NDArray[np.int64]]) -> None:
        """Take over what was read; raises ValueError where it cannot be a table of this size."""
        rows, sure = read["rows"], read["sure"]
        if rows.shape != self.rows.shape or sure.shape != self.sure.shape:
            raise ValueError(f"rows of shape {rows.shape}, expected {self.rows.shape}")
        for each in (rows, read["key_rows"]):
            if each.size and (int(each.min()) < NOTHING or int(each.max()) >= self.vocab_size):
                raise ValueError("a token outside the vocabulary")
        self.rows[:], self.sure[:] = rows, sure
        self.longer.fill(read, self.k)


class NeighbourLayer(NeighbourRows):
    """What one text teaches, over a table that it reads and never changes."""

    def __init__(self, base: NeighbourTable) -> None:
        self.base = base
        self.k = base.k
        self.orders = base.orders
        self.shared = False
        self._local = LongerKeys(base.longer.most + base.vocab_size)

    def find(self, place: Place) -> NeighbourRow | None:
        """Return the row of the longest known key; see `NeighbourRows.find`."""
        current, older = self._local, self.base.longer
        for order in range(self.orders, 1, -1):
            result = current.get(place, order) or older.get(place, order)
            if result is not None:
                return result
        return current.get(place, 1) or self.base.row(place[2])

    def learn(self, place: Place, best: list[int]) -> None:
        """Replace the text's own rows of the place; see `NeighbourRows.learn`."""
        for order in range(1, self.orders + 1):
            self._local.learn(place, order, best)


class LongerKeys:
    """Rows by the last few tokens, the least recently learned dropped first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._rows: dict[Place | tuple[int, int] | int, NeighbourRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, place: Place, order: int) -> NeighbourRow | None:
        """Return the row of the last `order` tokens of a place."""
        return self._rows.get(place if order == 3 else place[1:] if order == 2 else place[2])

    def learn(self, place: Place, order: int, best: list[int]) -> None:
        """Replace the row of the last `order` tokens, unless the text has fewer."""
        if order > 1 and place[3 - order] == NOTHING:
            return
        key = place if order == 3 else place[1:] if order == 2 else place[2]
        before = self._rows.pop(key, None)
        sure = 0
        if before is not None and before.tokens[0] == best[0]:
            sure = min(before.sure + 1, SUREST)
        elif len(self._rows) >= self.most:
            del self._rows[next(iter(self._rows))]
        self._rows[key] = NeighbourRow(best, order, sure)

    def arrays(self) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
        """Return keys i64 [C, 3], their rows i32 [C, k], orders and sureness, oldest first."""
        whole = [key if isinstance(key, tuple) else (key,) for key in self._rows]
        keys = [(NOTHING,) * (3 - len(key)) + key for key in whole]
        held = list(self._rows.values())
        rows = [row.tokens for row in held] or np.zeros((0, 0))
        return {
            "keys": np.array(keys, dtype=np.int64).reshape(len(keys), 3),
            "key_rows": np.array(rows, dtype=np.int32),
            "key_orders": np.array([row.order for row in held], dtype=np.int32),
            "key_sure": np.array([row.sure for row in held], dtype=np.int32),
        }

    def fill(self, read: Mapping[str, NDArray[np.int64]], k: int) -> None:
        """Take over what `arrays` gave; raises ValueError where the parts do not fit together."""
        keys, rows = read["keys"], read["key_rows"]
        orders, sure = read["key_orders"], read["key_sure"]
        count = len(keys)
        shapes = (keys.shape, rows.shape, orders.shape, sure.shape)
        if count and shapes != ((count, 3), (count, k), (count,), (count,)):
            raise ValueError(f"keys and rows of shapes {shapes}")
        if count and not set(np.unique(orders)) <= {2, 3}:
            raise ValueError("keys of other lengths than two and three tokens")
        parts = (keys.tolist(), rows.tolist(), orders.tolist(), sure.tolist())
        for (a, b, c), row, order, times in zip(*parts, strict=True):
            key = (a, b, c) if order == 3 else (b, c)
            self._rows[key] = NeighbourRow(row, order, min(max(times, 0), SUREST))


# How often the best token of a row comes true, by length of the key and by how often it was
# confirmed, and how the other ranks share what it leaves. Measured on small Llama models.
FIRST = ((0.22, 0.3, 0.4, 0.45, 0.5), (0.3, 0.45, 0.65, 0.7, 0.75), (0.47, 0.73, 0.85, 0.93, 0.96))
OTHERS = (0.16, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)

_PRIOR = 16.0
_DECAY = 0.99


class RankRates:
    """How often each rank of a row comes true, by key length, sureness and depth.

    Counts are of tokens that the target chose after rows that were known, drafted or not, so what
    is learned does not depend on which trees were grown. They decay by 1 % with each observation.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._hits: dict[int, list[float]] = {}
        self._visible: dict[int, float] = {}
        self._rates: dict[int, list[float]] = {}

    def of(self, row: NeighbourRow, level: int) -> list[float]:
        """Return the probability of each rank, non-increasing [k]; level: 0 below the root."""
        key = _row_kind(row, level)
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = self._estimate(row, key)
        return rates

    def learn(self, row: NeighbourRow, level: int, token: int) -> None:
        """Count which rank of the row the target's token has, if any."""
        key = _row_kind(row, level)
        hits = self._hits.setdefault(key, [0.0] * self.k)
        for rank in range(self.k):
            hits[rank] *= _DECAY
        self._visible[key] = self._visible.get(key, 0.0) * _DECAY + 1.0
        if token in row.tokens:
            hits[row.tokens.index(token)] += 1.0
        self._rates.pop(key, None)

    def _estimate(self, row: NeighbourRow, key: int) -> list[float]:
        hits = self._hits.get(key, [0.0] * self.k)
        weight = _PRIOR + self._visible.get(key, 0.0)
        first = FIRST[row.order - 1][row.sure]
        rates = [(_PRIOR * first + hits[0]) / weight]
        for rank in range(1, self.k):
            prior = (1.0 - first) * OTHERS[min(rank, len(OTHERS)) - 1]
            rates.append((_PRIOR * prior + hits[rank]) / weight)
        return _non_increasing(rates)


def _non_increasing(values: Sequence[float]) -> list[float]:
    """Return the nearest values that never grow: runs that do share their mean."""
    runs: list[tuple[float, int]] = []
    for value in values:
        total, size = value, 1
        while runs and runs[-1][0] * size < total * runs[-1][1]:
            before = runs.pop()
            total, size = total + before[0], size + before[1]
        runs.append((total, size))
    return [total / size for total, size in runs for _ in range(size)]


def _row_kind(row: NeighbourRow, level: int) -> int:
    """Return the number of the counts that a row at a depth belongs to."""
    return (row.order * (SUREST + 1) + row.sure) * 2 + (level > 0)
