"""Sequences that are decoded over a session, without an engine."""

from types import SimpleNamespace
from typing import Any

from ragspec.budget.base import FixedBudget
from ragspec.drafters.base import Drafter, DraftRequest
from ragspec.engine.loop import Loop
from ragspec.engine.request import Request
from ragspec.engine.sequence import Parts, Sequence
from ragspec.rules.target_view import RowView
from ragspec.rules.walk import Walk
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import StopRule
from tests.support import tiny


def sequence(
    prompt: list[int], new: int, distribution: TokenDistribution, drafter: Drafter | None = None
) -> Sequence:
    """Return a sequence whose drafter the caller opens."""
    request = Request(tuple(prompt), Sampling(), StopRule(frozenset(), new), seed=0)
    target: Any = SimpleNamespace(open_view=RowView)
    result = Sequence(request, Parts(target, drafter, Walk(), FixedBudget(3), None, None))
    result.distribution = distribution
    return result


def draft_request(
    prompt: list[int] | tuple[int, ...], sampling: Sampling, seed: int = 0, vocab: int = tiny.VOCAB
) -> DraftRequest:
    """Return what a drafter gets to know of a prompt that is written on with these settings."""
    distribution = TokenDistribution(sampling, NoiseStream(seed), len(prompt))
    return DraftRequest(tuple(prompt), vocab, distribution=distribution)


def decode(session: Any, *sequences: Sequence) -> None:
    """Decode sequences until all have ended; raise the first error of one."""
    loop = Loop(session)
    for each in sequences:
        loop.join(each)
    while loop.sequences:
        loop.step(None)
    for each in sequences:
        if each.error is not None:
            raise each.error
