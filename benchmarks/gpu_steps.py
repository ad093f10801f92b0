"""Whole steps of an engine, draft to commit, after a number of committed tokens."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from gpu_models import ONLY_TOKEN, synchronize

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.engine.engine import Engine
from ragspec.engine.loop import Loop
from ragspec.engine.sequence import Sequence as Row
from ragspec.models.device import is_cuda
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.sequence_cache import SequenceCache, slot_bytes
from ragspec.verification.static.layout import MOST_QUERIES, slots_of
from ragspec.verification.tree_session import TreeSession

ACCEPTED = 2  # accepted nodes of a stub's tree
ROOM = 512  # free slots of a session after the committed tokens
DISTRIBUTIONS = {"greedy": Sampling(seed=0), "top-p": Sampling(temperature=0.8, top_p=0.9, seed=0)}


class Stub(Drafter):
    """A drafter without cost: a tree of two chains, the second right to depth `ACCEPTED`.

    So the accepted nodes are not adjacent, and the KV cache needs compaction.
    """

    name = "stub"

    def open(self, request: DraftRequest) -> StubSession:
        """Return a session."""
        return StubSession()


class StubSession(DraftSession):
    """The session of a `Stub`."""

    def __init__(self) -> None:
        self._trees: dict[int, DraftTree] = {}

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a tree of `budget` nodes: one chain of even nodes and one of odd nodes."""
        if budget not in self._trees:
            nodes = range(budget)
            right = [node % 2 == 1 and node // 2 < ACCEPTED for node in nodes]
            tokens = [ONLY_TOKEN if each else ONLY_TOKEN + 1 for each in right]
            self._trees[budget] = DraftTree.build(tokens, [max(i - 2, -1) for i in nodes], "stub")
        return self._trees[budget]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement.

    Attributes:
        part: Part of the probe.
        batch: Sequences of the batch.
        length: Committed tokens of each sequence.
        rows: Query positions of each sequence; None for the drafter's number.
    """

    part: str
    batch: int
    length: int
    rows: int | None
    distribution: str = "greedy"
    drafter: str = "stub"

    @property
    def fields(self) -> dict[str, Any]:
        """The first fields of the cell's row."""
        return {
            "part": self.part,
            "batch": self.batch,
            "length": self.length,
            "rows": self.rows,
            "distribution": self.distribution,
        }

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return random prompts that end with the token that the model generates."""
        noise = torch.Generator().manual_seed(self.length)
        shape = (self.batch, self.length)
        tokens = torch.randint(ONLY_TOKEN + 2, vocab_size, shape, generator=noise)
        tokens[:, -16:] = ONLY_TOKEN
        return [list(map(int, row)) for row in tokens.tolist()]


class CellSession:
    """A session with the sequences of a cell, whose steps can be repeated."""

    def __init__(self, engine: Engine, cell: Cell, session: Any) -> None:
        self.engine, self.cell, self.session = engine, cell, session
        self.target = engine.target
        self._prompts = cell.prompts(engine.target.vocab_size)

    @contextmanager
    def loop(self) -> Iterator[Loop]:
        """Yield a loop over the cell's sequences after its first step."""
        sampling = DISTRIBUTIONS[self.cell.distribution]
        options: Any = {"max_new_tokens": ROOM, "ignore_eos": True}
        requests, _ = self.engine.prepare(self._prompts, sampling, options)
        loop = Loop(self.session)
        rows = [Row(request, self.engine.parts) for request in requests]
        for row in rows:
            row.begin()
            # The contents of the KV cache do not change the cost of a step, so skip prefill.
            row.stop.push(ONLY_TOKEN)
            row.context.tokens.append(ONLY_TOKEN)
            row.context.remaining -= 1
            row.pending = [ONLY_TOKEN]
            row.slot = self.session.join([ONLY_TOKEN], room=self.cell.length + ROOM)[0]
            loop._live.append(row)
        self._rewind([row.slot for row in rows])
        try:
            loop.step(None)
            synchronize(self.target.device)
            yield loop
            self._check(rows)
        finally:
            for row in rows:
                loop.leave(row)

    def sample(self, steps: int) -> dict[str, float]:
        """Return means over steps: milliseconds, also by stage, draft nodes and tokens."""
        stages, nodes, tokens = [], [], []
        with self.loop() as loop:
            began = time.perf_counter()
            for _ in range(steps):
                loop.step(None)
                step = loop.sequences[0].steps[-1]
                stages.append(step.milliseconds)
                nodes.append(len(step.tree))
                tokens.append(len(step.tokens))
            synchronize(self.target.device)
            spent = 1000 * (time.perf_counter() - began) / steps
        by_stage = {f"{name}_ms": mean(each[name] for each in stages) for name in stages[0]}
        return {"ms": spent, **by_stage, "nodes": mean(nodes), "tokens": mean(tokens)}

    def forward(self, steps: int) -> float:
        """Return the mean milliseconds of the forward alone, without sampling."""
        batch = self.cell.batch
        tree = StubSession().propose(DraftContext([], 0, 0), (self.cell.rows or 1) - 1)
        rows = [self.session.join([ONLY_TOKEN])[0] for _ in range(batch)]
        self._rewind(rows)
        spent = 0.0
        for attempt in range(steps + 1):
            synchronize(self.target.device)
            began = time.perf_counter()
            self.session.verify([[ONLY_TOKEN]] * batch, [tree] * batch)
            synchronize(self.target.device)
            spent += (time.perf_counter() - began) * (attempt > 0)
            self.session.commit([()] * batch)
        for row in rows:
            self.session.leave(row, keep=False)
        return 1000 * spent / steps

    def _rewind(self, rows: Sequence[Any]) -> None:
        """Let the rows have the cell's length, whatever their keys and values are."""
        self.session.select_rows(rows)
        config = self.target.model.config
        shape = 1, config.num_key_value_heads, self.cell.length, config.head_dim
        zeros = torch.zeros(shape, dtype=self.target.dtype, device=self.target.device)
        for row in self.session.active_rows:
            if type(self.session) is TreeSession:  # new memory may hold NaN
                layers = range(config.num_hidden_layers)
                row.cache = SequenceCache.of({n: (zeros, zeros) for n in layers})
            row.cache.length = self.cell.length
            row.tokens = [ONLY_TOKEN] * self.cell.length

    def _check(self, rows: Sequence[Row]) -> None:
        """Check the tokens and the number of verified positions of all steps."""
        for row in rows:
            assert set(row.context.tokens[self.cell.length :]) == {ONLY_TOKEN}, "another text"
            if self.cell.rows is not None:
                assert {1 + len(step.tree) for step in row.steps} == {self.cell.rows}, "rows"


@contextmanager
def open_cells(engines: Mapping[str, Engine], cell: Cell, reasons: dict[str, str]) -> Iterator[Any]:
    """Yield a `CellSession` for each mode; add the reason to `reasons` for a mode without one."""
    with ExitStack() as stack:
        sessions = {}
        for mode, engine in engines.items():
            if reason := skip_reason(engine, cell, mode):
                reasons[mode] = reason
                continue
            session = stack.enter_context(engine.target.open(most=cell.batch))
            sessions[mode] = CellSession(engine, cell, session)
        yield sessions


def skip_reason(engine: Engine, cell: Cell, mode: str) -> str:
    """Return why a cell cannot be measured in a mode, "" if it can."""
    target = engine.target
    if mode != target.static:
        return f"the engine runs steps as {target.static!r} here"
    slots = cell.length + ROOM
    if mode != "off":
        slots = slots_of(slots + MOST_QUERIES, 1 << 30)
    needed = cell.batch * slots * slot_bytes(target.model.config, target.dtype)
    needed += 2 * cell.batch * (cell.rows or 1) * 4 * target.vocab_size  # logits and probabilities
    free = free_bytes(target.device)
    if free is not None and needed > 0.9 * free:
        return f"it needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
    return ""


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a CUDA device, None on other devices."""
    if not is_cuda(device):
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return the names rotated by `by` places."""
    shift = by % len(names) if names else 0
    return [*names[shift:], *names[:shift]]
