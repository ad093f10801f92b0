"""The loss of a feature head: the states that it guesses, and their distributions.

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

from ragspec.drafters.eagle.head import DraftVocabulary, FeatureHead
from ragspec.training.batches import StateRead
from ragspec.verification.causal import CausalTarget

Output = Callable[[torch.Tensor], torch.Tensor]


def frozen_output(target: CausalTarget, tokens: torch.Tensor | None) -> Output:
    """Return what makes logits f32 of states, for some tokens or all; its weights are frozen."""
    module = target.output_head if tokens is None else DraftVocabulary(target, tokens)
    weights = {name: value.detach() for name, value in module.named_parameters()}

    def logits(states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = functional_call(module, weights, (states.to(target.dtype),))
        return output.float()

    return logits


def head_loss(
    head: FeatureHead,
    output: Output,
    read: StateRead,
    *,
    distributions: float,
    noise: torch.Tensor | float = 0.0,
    depth: int = 1,
) -> tuple[torch.Tensor, float]:
    """Return the loss, and how often both distributions have one best token in round one.

    Smooth L1 between states plus `distributions` times the cross-entropy between distributions,
    over the tokens of `output`. noise [R, T - 1, H]: added to the target's states before they are
    read.
    """
    after, real = read.states[:, 1:], read.real[:, 1:]
    total, agreement = torch.zeros((), device=after.device), 0.0
    for number, guessed in enumerate(rounds(head, read, noise, depth)):
        guessed = guessed[:, number:]
        start = after.shape[1] - guessed.shape[1]
        learned = real[:, start:]  # elsewhere no distribution need be computed
        expected, result = after[:, start:][learned], guessed[learned]
        with torch.no_grad():
            theirs = output(expected)
            distribution = theirs.softmax(-1)
        difference = functional.smooth_l1_loss(result, expected, reduction="none").mean(-1)
        ours = output(result)
        if distributions:
            difference = difference - distributions * (distribution * ours.log_softmax(-1)).sum(-1)
        total = total + difference.sum() / max(1, len(difference))
        if not number:
            hits = ours.argmax(-1) == theirs.argmax(-1)
            agreement = float(hits.sum() / max(1, len(hits)))
    return total / depth, agreement


def rounds(
    head: FeatureHead, read: StateRead, noise: torch.Tensor | float, depth: int
) -> list[torch.Tensor]:
    """Return the states [R, n, H] guessed in each round, n: T - 1.

    Rounds after the first begin at the first place that is learned from: [R, n - start, H]. Place
    start + i of round k is sound from i = k on. What a round reads of the one before carries no
    gradient.
    """
    embedded, before = read.embedded[:, 1:], read.states[:, :-1] + noise
    places = None if read.places is None else read.places[:, 1:] - read.places[:, 1:2]
    start = _first_learned(read) if depth > 1 else 0
    inputs = [before]
    for _ in range(1, depth):
        with torch.no_grad():
            last = _forward(head, embedded, inputs, places, start)[-1]
        last = last[:, last.shape[1] - before.shape[1] + start :]
        inputs.append(torch.cat([before[:, start : start + 1], last[:, :-1]], 1))
    return _forward(head, embedded, inputs, places, start)


def _first_learned(read: StateRead) -> int:
    """Return the first place that any of the texts is learned from."""
    learned = read.real[:, 1:].any(0).nonzero()
    return int(learned[0]) if len(learned) else 0


def _forward(
    head: FeatureHead,
    embedded: torch.Tensor,
    inputs: list[torch.Tensor],
    places: torch.Tensor | None,
    start: int,
) -> list[torch.Tensor]:
    """Read rounds of states in one batch, and return what each guesses; see `rounds`."""
    count, n = len(inputs), embedded.shape[1]
    if count == 1:
        return [head(embedded, inputs[0], places).float()]
    if places is None:
        places = torch.arange(n, device=embedded.device)[None]
    mask = round_mask(n, count, embedded.device, start)[None, None]
    again = [places, *[places[:, start:]] * (count - 1)]
    tokens = [embedded, *[embedded[:, start:]] * (count - 1)]
    guessed = head(torch.cat(tokens, 1), torch.cat(inputs, 1), torch.cat(again, 1), mask=mask)
    return list(guessed.float().split([n, *[n - start] * (count - 1)], 1))


def round_mask(
    n: int, count: int, device: torch.device | str = "cpu", start: int = 0
) -> torch.Tensor:
    """Return bool [m, m]: what place i of round k sees, m: n + (count - 1) * (n - start).

    Of round 0 the places up to i - k; of each round between, the one place on its own way. Rounds
    after the first have the places from `start` on.
    """
    later = torch.arange(start, n, device=device).repeat(count - 1)
    place = torch.cat([torch.arange(n, device=device), later])
    rest = torch.arange(1, count, device=device).repeat_interleave(n - start)
    number = torch.cat([torch.zeros(n, dtype=torch.int64, device=device), rest])
    k, i, e, j = number[:, None], place[:, None], number[None], place[None]
    return ((e == 0) & (j <= i - k)) | ((e > 0) & (e <= k) & (j == i - (k - e)))


@torch.no_grad()
def agreement(head: FeatureHead, target: CausalTarget, reads: Sequence[StateRead]) -> float:
    """Return in what share of places the head's best token is the best of all the target's.

    The mean over readings, each of one text or more; nan where there are none.
    """
    ours, theirs = (frozen_output(target, tokens) for tokens in (head.tokens, None))
    results = []
    for read in reads:
        places = None if read.places is None else read.places[:, 1:] - read.places[:, 1:2]
        best = ours(head(read.embedded[:, 1:], read.states[:, :-1], places)).argmax(-1)
        best = best if head.tokens is None else head.tokens[best]
        real = read.real[:, 1:]
        hits = (best == theirs(read.states[:, 1:]).argmax(-1)) & real
        results.append(float(hits.sum() / real.sum().clamp(min=1)))
    return sum(results) / len(results) if results else nan
