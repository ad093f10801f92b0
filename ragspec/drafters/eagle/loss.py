"""What a feature head is trained on: the states that it guesses, and the laws that come of them.

With depth 1 as EAGLE (arXiv 2401.15077): each place is guessed from the target's own state before
it. Deeper drafts feed on guesses; depth d trains d rounds of that, each place of round k reading
the target's states up to k places before it and the guesses since, as HASS (2408.15766) and
EAGLE-3 (2503.01840) do. All rounds are one forward under a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan

import torch
from torch.func import functional_call
from torch.nn import functional

from ragspec.drafters.eagle.head import FeatureHead
from ragspec.drafters.eagle.states import Reading
from ragspec.drafters.eagle.vocabulary import DraftVocabulary
from ragspec.target.causal import CausalTarget

Output = Callable[[torch.Tensor], torch.Tensor]


def frozen_output(target: CausalTarget, tokens: torch.Tensor | None) -> Output:
    """Return what makes logits f32 of states, for some tokens or all; its weights are frozen."""
    module = target.output_head if tokens is None else DraftVocabulary(target, tokens)
    weights = {name: value.detach() for name, value in module.named_parameters()}

    def logits(states: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional_call(module, weights, (states.to(target.dtype),))
        return made.float()

    return logits


def head_loss(
    head: FeatureHead,
    output: Output,
    read: Reading,
    *,
    laws: float,
    noise: torch.Tensor | float = 0.0,
    depth: int = 1,
) -> tuple[torch.Tensor, float]:
    """Return the loss over texts, and how often both laws have the same best token in round one.

    Smooth L1 between states plus `laws` times the cross-entropy between laws, over the tokens of
    `output`. noise [R, T - 1, H]: added to the target's states before they are read.
    """
    after = read.states[:, 1:]
    with torch.no_grad():
        theirs = output(after)
        law, best = theirs.softmax(-1), theirs.argmax(-1)
    total, agreement = torch.zeros((), device=after.device), 0.0
    for number, guessed in enumerate(rounds(head, read, noise, depth)):
        real = read.real[:, 1:][:, number:]
        guessed = guessed[:, number:]
        apart = functional.smooth_l1_loss(guessed, after[:, number:], reduction="none").mean(-1)
        ours = output(guessed)
        if laws:
            apart = apart - laws * (law[:, number:] * ours.log_softmax(-1)).sum(-1)
        total = total + (apart * real).sum() / real.sum().clamp(min=1)
        if not number:
            hits = (ours.argmax(-1) == best) & real
            agreement = float(hits.sum() / real.sum().clamp(min=1))
    return total / depth, agreement


def rounds(
    head: FeatureHead, read: Reading, noise: torch.Tensor | float, depth: int
) -> list[torch.Tensor]:
    """Return the states [R, n, H] guessed in each round; place i of round k is sound from i = k on.

    n: T - 1. What a round reads of the one before carries no gradient.
    """
    embedded, before = read.embedded[:, 1:], read.states[:, :-1] + noise
    n, given = before.shape[1], [before]
    for _ in range(1, depth):
        with torch.no_grad():
            last = _forward(head, embedded, given, n)[-1]
        given.append(torch.cat([before[:, :1], last[:, :-1]], 1))
    return _forward(head, embedded, given, n)


def _forward(
    head: FeatureHead, embedded: torch.Tensor, given: list[torch.Tensor], n: int
) -> list[torch.Tensor]:
    """Read rounds of states [R, n, H] side by side, and return what each guesses."""
    count = len(given)
    if count == 1:
        return [head(embedded, given[0]).float()]
    places = torch.arange(n, device=embedded.device).repeat(count)[None]
    mask = round_mask(n, count, embedded.device)[None, None]
    guessed = head(embedded.repeat(1, count, 1), torch.cat(given, 1), places, mask=mask)
    return list(guessed.float().split(n, 1))


def round_mask(n: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return bool [count * n, count * n]: what place i of round k sees.

    Of round 0 the places up to i - k; of each round between, the one place on its own way.
    """
    number = torch.arange(count, device=device).repeat_interleave(n)
    place = torch.arange(n, device=device).repeat(count)
    k, i, e, j = number[:, None], place[:, None], number[None], place[None]
    return ((e == 0) & (j <= i - k)) | ((e > 0) & (e <= k) & (j == i - (k - e)))


@torch.no_grad()
def agreement(head: FeatureHead, target: CausalTarget, reads: Sequence[Reading]) -> float:
    """Return in what share of places the head's best token is the best of all the target's.

    The mean over readings, each of one text or more; nan where there are none.
    """
    ours, theirs = (frozen_output(target, tokens) for tokens in (head.tokens, None))
    found = []
    for read in reads:
        best = ours(head(read.embedded[:, 1:], read.states[:, :-1])).argmax(-1)
        best = best if head.tokens is None else head.tokens[best]
        real = read.real[:, 1:]
        hits = (best == theirs(read.states[:, 1:]).argmax(-1)) & real
        found.append(float(hits.sum() / real.sum().clamp(min=1)))
    return sum(found) / len(found) if found else nan
