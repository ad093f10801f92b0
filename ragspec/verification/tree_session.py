"""Verification of draft trees over one cache per sequence."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import accumulate
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.needs import LAST, HiddenStates
from ragspec.sampling.top_tokens import TopTokens, best_tokens
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import Bools, ancestors, depths
from ragspec.verification.base import Pending, TargetModel, TargetSession
from ragspec.verification.batch import Batch, TreeView
from ragspec.verification.cpu_weights import Packed, pack
from ragspec.verification.prefix_cache import PrefixCache, Row
from ragspec.verification.reading import LONG, Taps
from ragspec.verification.sequence_cache import SequenceCache, commit_slots
from ragspec.verification.tree_attention import Configs, lease, model_configs

MOST_ROOM = 320  # slots beyond the prompt in a first buffer; a longer text grows it
MOST_LOGITS = 1 << 24  # logits of a prompt that are held at once to find its best tokens
Input = tuple[SequenceCache, Sequence[int], DraftTree]  # of one row; its pending tokens


class TreeSession(TargetSession):
    """Verifies draft trees. Hidden states can be read, and prompts along with their best tokens.

    Args:
        rows, capacity, prefix_cache: See `CausalTarget.open`.

    Attributes:
        hidden: Hidden states of the last forward, of each row. After `verify` they are those of the
            root and the nodes, undefined beyond a row's own. After `read_prompts` they are those of
            the prompt's last n tokens.
    """

    _rows: dict[int, Row]

    def __init__(
        self, target: TargetModel, rows: int, capacity: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.hidden: list[HiddenStates] = []
        self._capacity = capacity
        super().__init__(target, rows)
        self._prefix_cache = prefix_cache if target.divisible else None
        self._inputs: list[tuple[Sequence[int], DraftTree]] = []
        self._packs: Packed | None = None  # of the weights, from the first forward that needs them
        self._taps: Taps | None = None

    def __enter__(self) -> Self:
        if self._prefix_cache is not None:
            self._prefix_cache.check(self.target.loaded)
        return self

    def __exit__(self, *raised: object) -> None:
        self._packs = None
        for row in list(self._rows):
            self.leave(row)

    @cached_property
    def _configs(self) -> Configs:
        """The model's configurations, for its leases."""
        return model_configs(self.target.loaded)

    @property
    def caches(self) -> dict[int | None, SequenceCache]:
        """The keys and values of the rows, by number."""
        return {number: row.cache for number, row in self._rows.items()}

    def keep_hidden(self, taps: Sequence[int] = (LAST,)) -> None:
        """Keep hidden states of all later forwards, beside those kept before.

        Args:
            taps: Their numbers, see `Needs.hidden_states`.
        """
        before = () if self._taps is None else self._taps.modules
        self._taps = self._tapped({*before, *taps})

    def _tapped(self, taps: Collection[int]) -> Taps:
        return Taps.of(self.target.loaded, self.target.output_head, sorted(taps))

    def new_row(self) -> Row:
        """Return an empty row."""
        return Row(self._empty_cache(self._capacity))

    def copy_row(self, row: int) -> Row:
        """Return a copy of a row, as of the last commit."""
        held, room = self._rows[row], min(self._capacity, MOST_ROOM)
        return Row(self._adopt(held.cache.prefix(held.length, room)), held.tokens, held.tenant)

    def join(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> tuple[int, int]:
        """Add a row for a sequence; see `TargetSession.join`."""
        cache, size = None, len(tokens) + min(room, MOST_ROOM)
        if self._prefix_cache is not None:
            cache = self._prefix_cache.take(tokens[:-1], tenant, size, self._rows.values())
        cache = self._adopt(cache) if cache else self._empty_cache(size)
        return self._add(Row(cache, tokens[: cache.length], tenant)), cache.length

    def leave(self, row: int, keep: bool = True) -> None:
        """Drop a row; see `TargetSession.leave`."""
        held = self._rows[row]
        super().leave(row)
        if self._prefix_cache is None:
            return
        count = len(held.tokens) if keep else held.cached
        held.cache.truncate(count)
        if held.cache.length == count:
            self._prefix_cache.keep(held.tokens[:count], held.tenant, self._detach(held.cache))

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Select the rows of the next forwards; see `TargetSession.select_rows`."""
        TreeSession.discard_uncommitted(self)
        return super().select_rows(rows)

    def discard_uncommitted(self) -> None:
        """Discard uncommitted tokens; see `TargetSession.discard_uncommitted`."""
        for row in self.active_rows:
            row.cache.pending = 0

    def shrink(self) -> None:
        """Free the memory of texts that have ended; see `TargetSession.shrink`."""
        if self._prefix_cache is not None:
            self._prefix_cache.clear()

    def verify(self, pending: Pending, trees: Sequence[DraftTree]) -> list[Tensor]:
        """Run one forward; see `TargetSession.verify`."""
        rows = zip(self.active_rows, pending, trees, strict=True)
        self._inputs = [([*row.tokens[row.length :], *head], tree) for row, head, tree in rows]
        queries = [range(len(head) - 1, len(head) + len(tree)) for head, tree in self._inputs]
        return self._forward(queries)

    def read_prompts(self, pending: Pending, k: int) -> tuple[list[Tensor], list[TopTokens]]:
        """Read the prompts; return the last logits [1, V] of each and the best tokens along it.

        The best tokens are, for each row, the k best after each of the prompt's last T' tokens.
        T' may be shorter than the prompt, even 0: see `MOST_LOGITS`. If k is 0, the list is empty.
        """
        self._inputs = [(tokens, DraftTree.empty()) for tokens in pending]
        counts = [len(tokens) for tokens in pending]
        if not k:
            return self._forward([range(count) for count in counts], ends=True), []
        most = MOST_LOGITS // (len(counts) * self.target.vocab_size)
        logits = self._forward([range(max(0, count - max(most, 1)), count) for count in counts])
        best = [TopTokens.of(best_tokens(row[max(0, len(row) - most) :], k)[1]) for row in logits]
        return [each[-1:] for each in logits], best

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep pending tokens and accepted nodes; see `TargetSession.commit`."""
        rows = self.active_rows
        slots = [self._slots(row, path) for row, path in enumerate(paths)]
        commit_slots([row.cache for row in rows], slots)
        for row, (head, tree), path in zip(rows, self._inputs, paths, strict=True):
            start = row.length - len(head) - len(path)
            row.tokens[start:] = [*head, *(int(tree.tokens[node]) for node in path)]

    def _slots(self, row: int, path: Sequence[int]) -> list[int]:
        """Return the uncommitted slots of a selected row's pending tokens and of a path's nodes."""
        pending = len(self._inputs[row][0])
        return [*range(pending), *(pending + node for node in path)]

    def _empty_cache(self, capacity: int) -> SequenceCache:
        return SequenceCache(capacity, self.target.copies)

    def _adopt(self, cache: SequenceCache) -> SequenceCache:
        """Return a cache of this session with the contents of one from outside."""
        return cache

    def _detach(self, cache: SequenceCache) -> SequenceCache:
        """Return a cache that outlives this session, of a row that has left."""
        return cache

    def _forward(self, queries: Sequence[range], ends: bool = False) -> list[Tensor]:
        """Run a forward over the inputs, or one for each row if the model cannot pack them.

        Args:
            queries: Those of each row whose hidden states are kept.
            ends: Whether only the logits of the last of all tokens are returned.

        Returns:
            Logits [k, V] of each row.
        """
        self._expect_one_table()
        self.chosen, self.hidden = None, []
        pairs = zip(self.active_rows, self._inputs, strict=True)
        inputs = [(row.cache, head, tree) for row, (head, tree) in pairs]
        logits = list[Tensor]()
        size = len(inputs) if self.target.packs or self._runs_alone else 1
        for start in range(0, len(inputs), size):
            some = slice(start, start + size)
            logits += self._run(inputs[some], queries[some], ends)
        return logits

    def _run(self, inputs: Sequence[Input], queries: Sequence[range], ends: bool) -> list[Tensor]:
        """Run one forward over packed rows; see `_forward` and `_layout`.

        The model is leased for this forward only. Between forwards it is in its original state.
        """
        self.target.check_mode()
        modules = nullcontext() if self._runs_alone else self._through_modules()
        taps, device = self._taps, self.target.device
        tokens, views = _layout(inputs, device, self.target.divisible)
        batch = Batch([cache for cache, _, _ in inputs], views, taps)
        starts = list(accumulate(batch.counts[:-1], initial=0))
        last = [each[-1:] for each in queries]
        heard = taps is not None and LAST in taps.modules
        computed = last if ends and not heard else queries
        keep = _places(starts, computed, device)
        narrows = ends and heard and self.target.selects_logits
        if taps is not None:
            taps.selected = torch.tensor(_flat(starts, last), device=device) if narrows else None
        with modules:
            logits = self.target.forward(tokens, batch, keep)
        states = {} if taps is None else taps.taken()
        among = _places(starts, queries, device) if states else 0
        index = slice(-among, None) if isinstance(among, int) else among
        for tap, each in states.items():
            if tap != LAST or not self.target.keeps_logits:
                states[tap] = each[:, index]
        parts = [_split(each, list(map(len, queries)), 1) for each in states.values()]
        by_row = zip(*parts, strict=True)
        self.hidden += [HiddenStates(dict(zip(states, row, strict=True))) for row in by_row]
        returned = last if narrows and LAST in states else computed
        return [each[-1:] if ends else each for each in _split(logits[0], list(map(len, returned)))]

    @property
    def _runs_alone(self) -> bool:
        """Whether a forward needs no module of the model."""
        return self.target.runs_alone(() if self._taps is None else self._taps.modules)

    @contextmanager
    def _through_modules(self) -> Iterator[None]:
        """Lease the model, with packed weights, and record its states inside the block."""
        model = self.target.model
        if self._packs is None:
            self._packs = Packed(pack(model))
            if self._taps is not None:  # of modules that may not have been loaded
                self._taps.modules = self._tapped(self._taps.modules).modules
        with lease(model, self._configs), self._packs, self._taps or nullcontext():
            yield

    def _expect_one_table(self) -> None:
        """Raise InputError if a text is read across the rotary border in one forward."""
        border = self.target.border
        if border is None:
            return
        for row, (head, tree) in zip(self.active_rows, self._inputs, strict=True):
            length = row.cache.length
            end = length + len(head) + int(depths(tree.parents).max(initial=0))
            if end > border and (length or len(head) - 1) < border:
                raise InputError(
                    f"got tokens on both sides of {border}, where the model changes its rotary "
                    "table; expected one side a forward. Use open_target(model)."
                )


def _flat(starts: Sequence[int], queries: Sequence[range]) -> list[int]:
    """Return the queries of rows that begin at these places."""
    return [start + i for start, each in zip(starts, queries, strict=True) for i in each]


def _places(starts: Sequence[int], queries: Sequence[range], device: torch.device) -> int | Tensor:
    """Return the places of queries: of one row how many last ones."""
    one = len(queries) == 1
    return len(queries[0]) if one else torch.tensor(_flat(starts, queries), device=device)


def _split(states: Tensor, counts: list[int], dim: int = 0) -> Sequence[Tensor]:
    return [states] if len(counts) == 1 else torch.split(states, counts, dim)


def _layout(
    rows: Sequence[Input], device: torch.device, divisible: bool
) -> tuple[Tensor, list[TreeView]]:
    """Lay out the pending tokens and the nodes of packed rows, with two copies to the device.

    Args:
        divisible: Long chains need no table of ancestors.

    Returns:
        Tokens i64 [1, N] and the view of each row's attention.
    """
    numbers, positions, tables = list[int](), list[int](), list[Bools | None]()  # of all rows
    counts = [len(head) + len(tree) for _, head, tree in rows]
    for (cache, head, tree), n in zip(rows, counts, strict=True):
        numbers += [*head, *tree.tokens.tolist()]
        chain = n == 1 or np.array_equal(tree.parents, np.arange(-1, len(tree) - 1))
        plain = chain and (n == 1 or not cache.length or (divisible and n > LONG))
        table = None if plain else _related(len(head), tree)
        places = range(1, n + 1) if table is None else table.sum(-1).tolist()
        positions += [cache.length - 1 + place for place in places]
        tables.append(table)
    moved = torch.from_numpy(np.array([numbers, positions])).to(device)
    flat = [table.ravel() for table in tables if table is not None]
    visible: Iterator[Tensor] = iter(())
    if flat:
        related = torch.from_numpy(np.concatenate(flat)).to(device)
        visible = iter(torch.split(related, list(map(len, flat))))
    # The positions of a chain are its slots.
    parts = zip(rows, counts, _split(moved[1:], counts, 1), tables, strict=True)
    return moved[:1], [
        TreeView(cache.length, at, at, None if table is None else next(visible).view(1, n, n))
        for (cache, _, _), n, at, table in parts
    ]


def _related(start: int, tree: DraftTree) -> Bools:
    """Return the new slots that each query attends to, after `start` pending ones: bool [n, n]."""
    n = start + len(tree)
    related = np.zeros((n, n), dtype=np.bool_)
    related[:start, :start] = True if start == 1 else np.tri(start, dtype=np.bool_)
    related[start:, :start] = True
    related[start:, start:] = ancestors(tree.parents)
    return related
