"""Records of a pretended accelerator for the steps of text generation, without the first ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from ragspec import Engine, Sampling
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.engine.loop import Loop
from ragspec.trees.draft_tree import DraftTree
from tests.support.pretend import Pretend
from tests.support.pretend_record import Cause, Record

_BEGUN = 2  # steps in which distributions and shapes are new
_NEW = 6


@dataclass(slots=True)
class Steps:
    """The records of steps, and the largest of any number among them."""

    records: list[Record] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the whole table of the step with most kernels."""
        return max(self.records, key=lambda each: each.kernels).table()

    def most(self, number: Callable[[Record], int]) -> int:
        """Return the largest of a number among the steps."""
        return max(map(number, self.records))


class Bushes(Drafter, DraftSession):
    """Drafts a tree of one size with random tokens, so that few of them are accepted.

    The first nine nodes are children of the root.
    """

    name = "bushes"

    def __init__(self, nodes: int, vocab_size: int) -> None:
        self._nodes, self._vocab = nodes, vocab_size

    def open(self, request: DraftRequest) -> Bushes:
        """Return itself; it has no state."""
        return self

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a tree whose nodes have other tokens in every step."""
        dice = np.random.default_rng(len(context.tokens))
        tokens = dice.choice(self._vocab, self._nodes, replace=False).tolist()
        parents = [(node - 1) // 2 if node > 8 else -1 for node in range(self._nodes)]
        return DraftTree.build(tokens, parents, "test")


def count_steps(
    device: Pretend,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    new: int = _NEW,
) -> Steps:
    """Return the records of the steps that decode all prompts, without the first ones."""
    result = Steps()
    with _recording(device, result, len(prompts)):
        engine.generate(prompts, sampling, max_new_tokens=new, ignore_eos=True)
    assert len(result.records) > _BEGUN, "too few steps"
    result.records = result.records[_BEGUN:]
    return result


def check_drafting(
    device: Pretend, session: DraftSession, beside: int, nodes: int = 5, steps: int = 5
) -> None:
    """Check the waits of each step of a draft, and its launches beside model and graph."""
    context = DraftContext([1, 2, 3, 4, 5, 6], 5, 40)
    session.propose(context, nodes)
    with device.recording() as record:
        assert len(session.propose(context, nodes)) == nodes
    assert (record.waits, record.asynchronous) == (steps, steps)
    within = [each for each in record.of(Cause.KERNEL) if "_step.py" in each.where]  # of a graph
    assert record.kernels_beside - len(within) <= beside * steps


@contextmanager
def _recording(device: Pretend, result: Steps, rows: int) -> Iterator[None]:
    """Record each step of a loop that decodes this number of rows."""
    step = Loop.step

    def recorded(self: Loop, *inputs: Any, **options: Any) -> None:
        sequences = self.sequences
        before = sum(len(each.steps) for each in sequences)
        with device.recording() as record:
            step(self, *inputs, **options)
        if len(self._live) == rows == sum(len(each.steps) for each in sequences) - before:
            result.records.append(record)

    with patch.object(Loop, "step", recorded):
        yield
