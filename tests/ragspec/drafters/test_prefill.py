"""Sessions observe the part of the prefill that their drafter needs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.budget.base import FixedBudget
from ragspec.drafters.base import Drafter, DraftRequest, Prefill
from ragspec.drafters.fuse import Fuse
from ragspec.engine.sequence import Sequence
from ragspec.needs import LAST, Needs
from ragspec.retrievers.methods.hierarchy_drafting import HierarchyDrafter
from ragspec.retrievers.methods.rasd import Rasd
from ragspec.retrievers.methods.sam_decoding import Select
from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter
from ragspec.rules.base import Step
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.verification.causal import CausalTarget
from tests.support import loops, tiny
from tests.support.fixed import FixedDrafter, FixedSession

PROMPT = tiny.prompt(9, seed=3)
BEST, HIDDEN = Needs(top_tokens=2, prompt_top_tokens=True), Needs(hidden_states=(LAST,))


class Recording(FixedDrafter):
    """Declares needs, and records the prefill and the steps that its session observes."""

    def __init__(self, name: str, needs: Needs | None = None) -> None:
        super().__init__([1], name, matched=1, needs=needs or Needs())

    def open(self, request: DraftRequest) -> RecordingSession:
        return RecordingSession(self)

    @property
    def prompts(self) -> list[Prefill]:
        return [message for message in self.observed if isinstance(message, Prefill)]


class RecordingSession(FixedSession):
    def observe(self, step: Step) -> None:
        if self.drafter.needs.hidden_states:  # valid only during this call
            assert step.hidden is not None and step.view is not None
        super().observe(step)

    def observe_prefill(self, prefill: Prefill) -> None:
        self.drafter.observed.append(prefill)


HOLDERS: dict[str, Callable[[Drafter, Drafter], Drafter]] = {
    "fuse": lambda one, two: Fuse([one, two]),
    "fuse of fuses": lambda one, two: Fuse([Fuse([one], "a"), Fuse([two], "b")]),
    "hierarchy": lambda one, two: HierarchyDrafter(one, two, lookahead=False),
    "select": lambda one, two: Select([one], two, threshold=9.0),
    "rasd": lambda one, two: Rasd(one, [two]),
    "suffix": lambda one, two: SuffixDrafter(Fuse([one, two])),
}


def generate(drafter: Drafter) -> None:
    engine = Engine(tiny.model("llama", dtype=torch.float64), drafter=drafter, budget=3)
    result = engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
    assert result.report.faults == {}


def check_prefills(best: Recording, hidden: Recording, text: list[int], other: list[int]) -> None:
    """Check that one drafter observed the best tokens of its prompt, the other hidden states."""
    (first,), (second,) = best.prompts, hidden.prompts
    assert (first.tokens.tolist(), second.tokens.tolist()) == (text, other)
    assert first.best is not None and first.hidden is None
    assert second.hidden is not None and second.best is None
    assert first.best.host().shape == (len(text), 2)
    assert second.hidden.of((LAST,)).shape[:2] == (1, len(other))


@pytest.mark.parametrize("holder", HOLDERS)
def test_each_drafter_receives_the_prefill_data_that_it_needs(holder: str) -> None:
    best, hidden = Recording("best", BEST), Recording("hidden", HIDDEN)
    generate(HOLDERS[holder](best, hidden))
    check_prefills(best, hidden, PROMPT, PROMPT)
    for first, *steps in (best.observed, hidden.observed):
        assert isinstance(first, Prefill)
        assert steps and all(isinstance(step, Step) for step in steps)


@pytest.mark.parametrize("holder", HOLDERS)
def test_drafters_without_prompt_needs_observe_no_prefill(holder: str) -> None:
    greedy, quiet = Recording("greedy", Needs.union([BEST, HIDDEN])), Recording("quiet")
    late = Recording("late", Needs(top_tokens=2))
    generate(HOLDERS[holder](greedy, Fuse([quiet, late])))
    (message,) = greedy.prompts
    assert message.best is not None and message.hidden is not None
    assert quiet.observed and late.observed
    assert quiet.prompts == late.prompts == []


def row_of(drafter: Drafter, prompt: list[int]) -> Sequence:
    distribution = TokenDistribution(Sampling(), NoiseStream(0), len(prompt))
    row = loops.sequence(prompt, 4, distribution, drafter)
    row.needs = drafter.needs
    row.drafter = drafter.open(DraftRequest(tuple(prompt), tiny.VOCAB, distribution=distribution))
    row.budget = FixedBudget(3).open(None)
    return row


def test_each_row_of_a_batch_observes_its_prefill_data() -> None:
    best, hidden, steps = Recording("best", BEST), Recording("hidden", HIDDEN), FixedDrafter([1])
    drafters: list[Drafter] = [best, hidden, steps]
    prompts = [PROMPT[:4], PROMPT[:6], PROMPT[:5]]
    rows = [row_of(each, text) for each, text in zip(drafters, prompts, strict=True)]
    with CausalTarget(tiny.model("llama", dtype=torch.float64)).open() as session:
        loops.decode(session, *rows)
    check_prefills(best, hidden, *prompts[:2])
    assert steps.observed
