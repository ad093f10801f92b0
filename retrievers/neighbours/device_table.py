"""DeviceNeighbourTable: the neighbour table where the target is, for keys of one token.

Token Recycling, arXiv 2408.08696, section 3, whose matrix is on the GPU: rows are replaced by one
scatter and a draft's rows are gathered level by level, with one copy to the host for a draft. What
it tells is what the table of the host tells, token for token and confirmation for confirmation.
Deviation: where tokens occur twice in what is learned, the last one counts, on every device.

Keys of two and three tokens stay on the host (`table`): they are looked up by hash, at places
that are known only as the tree grows. A text that learns for itself gets a copy of the rows, V * k
integers, 4 MB for a vocabulary of 128,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from ragspec.errors import InputError
from ragspec.models.device import without_autograd
from ragspec.retrievers.neighbours.rows import (
    NOTHING,
    SUREST,
    Count,
    Find,
    Neighbours,
    Place,
    Shape,
)
from ragspec.retrievers.neighbours.table import NeighbourTable
from ragspec.sampling.top_tokens import TopTokens
from ragspec.storage.manifest import Verify
from ragspec.trees.draft_tree import ROOT, Ints

_LATE = 16  # observations that wait for the next copy to the host, at most


class _Path(NamedTuple):
    """How the rows of a shape are reached.

    nodes: slots of parents, and the ranks below them, of the nodes whose rows are wanted, level by
    level; slot 0 is the root, slot i + 1 is node i. levels: the same on the device, the parents
    counted in the level above.
    """

    nodes: list[tuple[int, int]]
    levels: list[tuple[torch.Tensor, torch.Tensor]]


class TopKFeedback(NamedTuple):
    """Rows i32 [n, k + 1] that were looked up before they changed, and whom to tell of them."""

    rows: torch.Tensor
    tokens: Sequence[int]
    notify: Count


class DeviceNeighbourTable:
    """For each of V tokens the k best next ones, on a device: int32 [V, k].

    device: of the target; the CPU is one, too. May be shared by threads. Raises InputError for
    sizes below 1.
    """

    orders = 1

    def __init__(self, vocab_size: int, k: int = 8, *, device: torch.device | str) -> None:
        self._take(NeighbourTable(vocab_size, k, orders=1), torch.device(device))

    @classmethod
    def of(cls, table: NeighbourTable, device: torch.device | str) -> DeviceNeighbourTable:
        """Return a copy of a table on a device; raises InputError where it has longer keys."""
        if table.orders != 1:
            raise InputError(
                f"got a neighbour table with keys of up to {table.orders} tokens; a device holds "
                "those of one token. Leave the table on the host, or learn one with orders=1."
            )
        instance = cls.__new__(cls)
        instance._take(table, torch.device(device))
        return instance

    @without_autograd
    def _take(self, table: NeighbourTable, device: torch.device) -> None:
        self.vocab_size, self.k = table.vocab_size, table.k
        self.device = device
        self.shared = True
        self.fingerprints: dict[str, str] = dict(table.fingerprints)
        # Rows and, in the last column, how sure they are. Two rows more than tokens: the first
        # takes what is no token, the second is what nobody has learned, which index -1 finds.
        cells = torch.full((self.vocab_size + 2, self.k + 1), NOTHING, dtype=torch.int32)
        cells[:, -1] = 0
        cells[:-2, :-1] = torch.from_numpy(table.rows)
        cells[:-2, -1] = torch.from_numpy(table.sure)
        self._cells = cells.to(device)
        self._local: torch.Tensor | None = None
        self._paths: dict[Shape, _Path] = {}
        self._untold: list[TopKFeedback] = []
        self._around: tuple[tuple[int, Shape], Find] | None = None
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of tokens whose neighbours are known."""
        return int((self._cells[:-2, 0] != NOTHING).sum())

    @property
    def rows(self) -> torch.Tensor:
        """The best tokens after every token, on the device: i32 [V, k]."""
        return self._cells[:-2, :-1]

    @property
    def sure(self) -> torch.Tensor:
        """How often in a row every row's best token was confirmed, on the device: i32 [V]."""
        return self._cells[:-2, -1]

    def row(self, token: int) -> Neighbours | None:
        """Return what is known after the token; a copy to the host of its own."""
        return _neighbours(_to_host(self._cells[token]))

    def layer(self) -> DeviceNeighbourTable:
        """Return a copy for one text; what it confirms first is as sure as what nobody knew."""
        instance = copy(self)
        instance._cells = self._cells.clone()
        instance._local = torch.zeros(len(instance._cells), dtype=torch.bool, device=self.device)
        instance._untold, instance._around, instance._lock = [], None, Lock()
        instance.shared = False
        return instance

    # --- drafting -------------------------------------------------------------------------------

    def around(self, root: int, shape: Shape) -> Find:
        """Return a look-up of the rows of a token and of the shape below it.

        They are those of now, gathered level by level and brought to the host by one copy, which
        also brings what `count` has to tell. Rows outside the shape are as good as unknown.
        """
        with self._lock:
            if self._around is None or self._around[0] != (root, shape):
                self._around = (root, shape), self._fetched(root, shape)
            return self._around[1]

    def _fetched(self, root: int, shape: Shape) -> Find:
        path = self._paths.get(shape)
        if path is None:
            path = self._paths[shape] = self._path(shape)
        start = root if 0 <= root < self.vocab_size else NOTHING
        level = self._cells[start][None]
        results = [level]
        for parents, ranks in path.levels:
            level = self._cells[level[parents, ranks].long()]
            results.append(level)
        rows = self._settle(torch.cat(results))
        known = {start: _neighbours(rows[0])}
        for (slot, rank), row in zip(path.nodes, rows[1:], strict=True):
            known[rows[slot][rank]] = _neighbours(row)
        known.pop(NOTHING, None)

        def find(place: Place) -> Neighbours | None:
            return known.get(place[2])

        return find

    def _path(self, shape: Shape) -> _Path:
        """Return how to reach the rows of a shape, of ranks that the table has."""
        selection = set(range(len(shape.nodes))) if shape.leaves else {p for p, _ in shape.nodes}
        places = {ROOT: (0, 0)}  # of a node: its level, and its number in the level
        levels: list[list[tuple[int, int]]] = []
        for node, (parent, rank) in enumerate(shape.nodes):
            if node in selection and parent in places and rank < self.k:
                level, place = places[parent]
                if level == len(levels):
                    levels.append([])
                places[node] = level + 1, len(levels[level])
                levels[level].append((place, rank))
        nodes: list[tuple[int, int]] = []
        start = 0  # the slot of the first node of the level above
        for pairs in levels:
            below = len(nodes) + 1
            nodes += [(start + place, rank) for place, rank in pairs]
            start = below
        moved = [_moved(torch.tensor(pairs), self.device).T for pairs in levels]
        return _Path(nodes, [(parents, ranks) for parents, ranks in moved])

    # --- learning -------------------------------------------------------------------------------

    def learn(self, tokens: torch.Tensor, top: torch.Tensor) -> None:
        """Replace the rows of tokens i64 [T] by the target's best ones after them [T, >= k].

        As if one were learned after the other: the last of equal tokens stays, and its row is as
        sure as the run of equal best tokens that ends with it. What is outside the vocabulary
        teaches nothing. Nothing is copied to the host.
        """
        if not len(tokens):
            return
        with self._lock:
            self._around = None
            self._learn(_moved(tokens, self.device), _moved(top, self.device)[:, : self.k])

    def _learn(self, tokens: torch.Tensor, top: torch.Tensor) -> None:
        size, cells = self.vocab_size, self._cells
        known = (tokens >= 0) & (tokens < size) & (top < size).all(1)
        tokens, order = torch.where(known, tokens, size).sort(stable=True)
        top = top[order].int()
        # Equal tokens are neighbours now, in the order in which they are learned: of each its
        # number, and those of the first and the last one of its token.
        number = torch.arange(len(tokens), device=self.device)
        first = torch.searchsorted(tokens, tokens)
        last = torch.searchsorted(tokens, tokens, right=True) - 1
        opens = number == first
        before, best = cells[tokens], top[:, 0]
        held = before[:, 0]
        if self._local is not None:
            held = torch.where(self._local[tokens], held, NOTHING)
        confirmed = best == torch.where(opens, held, best.roll(1))
        refuted = torch.where(confirmed, NOTHING, number).cummax(0).values
        run = number - torch.maximum(refuted, first - 1)
        run = run + torch.where(refuted < first, before[:, -1], 0)
        new = torch.cat((top, run.clamp(max=SUREST).int()[:, None]), 1)
        # Every one of equal tokens writes what the last one has: no order of writing matters.
        cells[tokens] = new[last]
        if self._local is not None:
            self._local[tokens] = True

    def learn_prompt(self, tokens: Ints, top_tokens: TopTokens) -> None:
        """Learn the best tokens after a prompt's tokens i64 [T]."""
        self.learn(torch.from_numpy(tokens), top_tokens.there())

    def learn_step(
        self, places: Sequence[Place], order: Sequence[int], top_tokens: TopTokens
    ) -> None:
        """Learn the best tokens after the places, in that order of their numbers."""
        pairs = torch.tensor([[places[at][2] for at in order], list(order)])
        pairs, top = _moved(pairs, self.device), _moved(top_tokens.there(), self.device)
        self.learn(pairs[0], top[pairs[1]])

    def count(self, places: Sequence[Place], tokens: Sequence[int], count: Count) -> None:
        """Tell `count` of the rows of places and the tokens that came, with the next copy.

        The rows are those of now. They are told before anything else is looked up.
        """
        spots = [place[2] for place, _ in zip(places, tokens, strict=False)]
        known = [spot if 0 <= spot < self.vocab_size else NOTHING for spot in spots]
        with self._lock:
            rows = self._cells[_moved(torch.tensor(known, dtype=torch.int64), self.device)]
            self._untold.append(TopKFeedback(rows, tokens, count))
            self._around = None
            if len(self._untold) >= _LATE:
                self._settle()

    def _settle(self, further: torch.Tensor | None = None) -> list[list[int]]:
        """Copy what is untold and further rows [n, k + 1] to the host; return the latter."""
        untold, self._untold = self._untold, []
        parts = [note.rows for note in untold] + ([] if further is None else [further])
        rows: list[list[int]] = _to_host(torch.cat(parts))
        done = 0
        for message in untold:
            for level, token in zip(range(len(message.rows)), message.tokens, strict=False):
                result = _neighbours(rows[done + level])
                if result is not None:
                    message.notify(result, level, token)
            done += len(message.rows)
        return rows[done:]

    # --- on disk --------------------------------------------------------------------------------

    def host(self) -> NeighbourTable:
        """Return a copy of the table on the host."""
        instance = NeighbourTable(self.vocab_size, self.k, orders=1)
        with self._lock:
            cells = self._cells[:-2].cpu().numpy()
        instance.rows[:], instance.sure[:] = cells[:, :-1], cells[:, -1]
        instance.fingerprints = dict(self.fingerprints)
        return instance

    def save(self, folder: Path | str, *, model: Any = None, tokenizer: Any = None) -> None:
        """Publish the table as a store, the same as one of the host; see `NeighbourTable.save`."""
        instance = self.host()
        instance.save(folder, model=model, tokenizer=tokenizer)
        self.fingerprints = instance.fingerprints

    @classmethod
    def open(
        cls,
        folder: Path | str,
        *,
        device: torch.device | str,
        model: Any = None,
        tokenizer: Any = None,
        verify: Verify = "full",
    ) -> DeviceNeighbourTable:
        """Read a table that `save` wrote, of either form, onto a device.

        Raises StoreError as `NeighbourTable.open` does, InputError where it has longer keys.
        """
        read = NeighbourTable.open(folder, model=model, tokenizer=tokenizer, verify=verify)
        return cls.of(read, device)


def _neighbours(row: list[int]) -> Neighbours | None:
    """Return the row [k + 1] of one token as it is told, None where it is empty."""
    return None if row[0] == NOTHING else Neighbours(row[:-1], 1, row[-1])


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device; nobody waits for the device if it comes from the host."""
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def _to_host(cells: torch.Tensor) -> Any:
    """Return the numbers of a tensor: the one way by which a draft's rows leave the device."""
    return cells.tolist()
