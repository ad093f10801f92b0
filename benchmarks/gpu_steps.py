"""Whole steps of an engine after a given number of committed tokens, draft to commit."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from gpu_models import SAID, synchronize

from ragspec.drafters.base import DraftContext, DraftRequest, DraftSession
from ragspec.engine.engine import Engine
from ragspec.engine.loop import Loop
from ragspec.engine.rows import Run
from ragspec.models.device import is_cuda
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.verification.kv_cache import slot_bytes
from ragspec.verification.static.layout import MOST_QUERIES, slots_of

ACCEPTED = 2  # nodes of a stub's tree
ROOM = 512  # tokens that a session has beyond its first ones
DISTRIBUTIONS = {"greedy": Sampling(seed=0), "top-p": Sampling(temperature=0.8, top_p=0.9, seed=0)}


class Stub:
    """Drafts at no cost a tree of chains, of which the second is right to depth `ACCEPTED`.

    So accepted nodes do not lie side by side, and the cache is to be compacted.
    """

    name = "stub"
    kind = DraftKind.DETERMINISTIC

    def open(self, request: DraftRequest) -> StubSession:
        """Return a session; it has no state."""
        return StubSession()


class StubSession(DraftSession):
    """See `Stub`."""

    def __init__(self) -> None:
        self._trees: dict[int, DraftTree] = {}

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the tree of `budget` nodes: even ones are one chain, odd ones the other."""
        if budget not in self._trees:
            nodes = range(budget)
            right = [node % 2 == 1 and node // 2 < ACCEPTED for node in nodes]
            tokens = [SAID if each else SAID + 1 for each in right]
            self._trees[budget] = DraftTree.build(tokens, [max(i - 2, -1) for i in nodes], "stub")
        return self._trees[budget]


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: `batch` texts of `length` committed tokens, `rows` queries of each.

    rows None: as many as the drafter gives. part: which part of the probe it belongs to.
    """

    part: str
    batch: int
    length: int
    rows: int | None
    distribution: str = "greedy"
    drafter: str = "stub"

    @property
    def reported(self) -> dict[str, Any]:
        """The cell as a row of the table begins."""
        return {
            "part": self.part,
            "batch": self.batch,
            "length": self.length,
            "rows": self.rows,
            "distribution": self.distribution,
        }

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return random texts whose ends are what the model goes on with."""
        noise = torch.Generator().manual_seed(self.length)
        shape = (self.batch, self.length)
        tokens = torch.randint(SAID + 2, vocab_size, shape, generator=noise)
        tokens[:, -16:] = SAID
        return [list(map(int, row)) for row in tokens.tolist()]


class Seat:
    """The texts of a cell in a session of their own, whose steps are taken and taken again."""

    def __init__(self, engine: Engine, cell: Cell, session: Any) -> None:
        self.engine, self.cell, self.session = engine, cell, session
        self.target = engine.target
        self._prompts = cell.prompts(engine.target.vocab_size)
        empty = [DraftTree.empty()] * cell.batch
        session.verify([[SAID]] * cell.batch, empty)  # the buffers are made
        session.commit([()] * cell.batch)

    @contextmanager
    def begun(self) -> Iterator[Loop]:
        """Lend a loop over the cell's texts, one step after they were read."""
        sample = DISTRIBUTIONS[self.cell.distribution]
        options: Any = {"max_new_tokens": ROOM, "ignore_eos": True}
        encoded, settings = self.engine.prepare(self._prompts, sample, options)
        run = Run(self.engine.parts, encoded.ids, settings, 0)
        loop = Loop(self.session, run.forward)
        for row in run.rows:
            # What is in the cache does not matter to what a step costs: nothing is read.
            row.stop.push(SAID)
            row.context.tokens.append(SAID)
            row.context.remaining -= 1
            row.pending = [SAID]
            row.slot = self.session.join([SAID])[0]
            loop.join([row], self.engine.rule)
        self._rewind()
        try:
            loop.step()
            synchronize(self.target.device)
            yield loop
            self._check(run)
        finally:
            for row in run.rows:
                loop.leave(row)

    def sample(self, steps: int) -> dict[str, float]:
        """Return the mean of some steps: milliseconds, by stage too, and draft nodes and tokens."""
        stages, nodes, tokens = [], [], []
        with self.begun() as loop:
            began = time.perf_counter()
            for _ in range(steps):
                step = loop.step()[0].step
                stages.append(step.milliseconds)
                nodes.append(len(step.tree))
                tokens.append(len(step.tokens))
            synchronize(self.target.device)
            spent = 1000 * (time.perf_counter() - began) / steps
        record = {f"{name}_ms": mean(each[name] for each in stages) for name in stages[0]}
        return {"ms": spent, **record, "nodes": mean(nodes), "tokens": mean(tokens)}

    def forward(self, steps: int) -> float:
        """Return the mean milliseconds of the forward alone: its logits, and nobody chooses."""
        batch = self.cell.batch
        tree = StubSession().propose(DraftContext([], 0, 0), (self.cell.rows or 1) - 1)
        self._rewind()
        spent = 0.0
        for attempt in range(steps + 1):
            synchronize(self.target.device)
            began = time.perf_counter()
            self.session.verify([[SAID]] * batch, [tree] * batch)
            synchronize(self.target.device)
            spent += (time.perf_counter() - began) * (attempt > 0)
            self.session.commit([()] * batch)
        return 1000 * spent / steps

    def _rewind(self) -> None:
        self.session.line_up(range(self.cell.batch))
        book = self.session.cache.book
        book.lengths = [self.cell.length] * self.cell.batch
        book.moved()

    def _check(self, run: Run) -> None:
        """See to it that all steps wrote what this model says, and verified what was asked for."""
        for row in run.rows:
            assert set(row.context.tokens[self.cell.length :]) == {SAID}, "another text"
            if self.cell.rows is not None:
                assert {1 + len(step.tree) for step in row.steps} == {self.cell.rows}, "rows"


@contextmanager
def seats(engines: Mapping[str, Engine], cell: Cell, reasons: dict[str, str]) -> Iterator[Any]:
    """Lend a seat for each mode that has one; why another has none is put into `reasons`."""
    with ExitStack() as stack:
        record = {}
        for mode, engine in engines.items():
            if reason := hindrance(engine, cell, mode):
                reasons[mode] = reason
                continue
            session = stack.enter_context(engine.target.open(cell.batch, cell.length + ROOM))
            record[mode] = Seat(engine, cell, session)
        yield record


def hindrance(engine: Engine, cell: Cell, mode: str) -> str:
    """Return why a cell cannot be measured in a mode, "" where it can."""
    target = engine.target
    if mode != target.static:
        return f"steps are taken as {target.static!r} here"
    slots = cell.length + ROOM
    if mode != "off":
        slots = slots_of(slots + MOST_QUERIES, 1 << 30)
    needed = cell.batch * slots * slot_bytes(target.model.config, target.dtype)
    needed += 2 * cell.batch * (cell.rows or 1) * 4 * target.vocab_size  # logits, and their law
    free = free_bytes(target.device)
    if free is not None and needed > 0.9 * free:
        return f"it needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
    return ""


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be had on a CUDA device, None elsewhere."""
    if not is_cuda(device):
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return the names beginning with another one each round."""
    shift = by % len(names) if names else 0
    return [*names[shift:], *names[:shift]]
