"""The loss of a feature head: its predicted hidden states, and their distributions.

Depth 1 is EAGLE's loss (arXiv 2401.15077): a state is predicted from the target's own state before
it. Deeper drafts read predictions. Depth d trains d such rounds: a place of round k reads the
target's states up to k places before it and the predictions since, as in HASS (2408.15766) and
EAGLE-3 (2503.01840). All rounds are one forward under a mask.
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
    """Return a function with frozen weights from states to logits f32, of all tokens or some."""
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
    """Return the loss, and the share of places where head and target agree in round one.

    The loss is smooth L1 between states plus `distributions` times the cross-entropy between
    distributions, over the tokens of `output`. They agree if their best tokens are equal.

    Args:
        noise: Added to the target's states as inputs, [R, T - 1, H].
        depth: Number of rounds.
    """
    after, real = read.states[:, 1:], read.real[:, 1:]
    total, agreement = torch.zeros((), device=after.device), 0.0
    for number, guessed in enumerate(rounds(head, read, noise, depth)):
        guessed = guessed[:, number:]
        start = after.shape[1] - guessed.shape[1]
        learned = real[:, start:]  # other places need no distribution
        expected, guessed = after[:, start:][learned], guessed[learned]
        with torch.no_grad():
            theirs = output(expected)
            distribution = theirs.softmax(-1)
        difference = functional.smooth_l1_loss(guessed, expected, reduction="none").mean(-1)
        ours = output(guessed)
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
    """Return the states [R, n, H] predicted in each round, n = T - 1.

    Rounds after the first begin at the first place to learn from: [R, n - start, H]. Place start +
    i of round k is valid from i = k on. Inputs from the round before have no gradient.
    """
    embedded, before = read.embedded[:, 1:], read.states[:, :-1] + noise
    places = None if read.places is None else read.places[:, 1:] - read.places[:, 1:2]
    start = 0
    if depth > 1 and len(learned := read.real[:, 1:].any(0).nonzero()):
        start = int(learned[0])
    inputs = [before]
    for _ in range(1, depth):
        with torch.no_grad():
            last = _forward(head, embedded, inputs, places, start)[-1]
        last = last[:, last.shape[1] - before.shape[1] + start :]
        inputs.append(torch.cat([before[:, start : start + 1], last[:, :-1]], 1))
    return _forward(head, embedded, inputs, places, start)


def _forward(
    head: FeatureHead,
    embedded: torch.Tensor,
    inputs: list[torch.Tensor],
    places: torch.Tensor | None,
    start: int,
) -> list[torch.Tensor]:
    """Return the predictions of several rounds of inputs, in one forward; see `rounds`."""
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
    """Return the attention mask of all rounds, bool [m, m] with m = n + (count - 1) * (n - start).

    Place i of round k sees the places of round 0 up to i - k, and place i - (k - e) of each round e
    from 1 to k. Rounds after the first have the places from `start` on.
    """
    later = torch.arange(start, n, device=device).repeat(count - 1)
    place = torch.cat([torch.arange(n, device=device), later])
    rest = torch.arange(1, count, device=device).repeat_interleave(n - start)
    number = torch.cat([torch.zeros(n, dtype=torch.int64, device=device), rest])
    k, i, e, j = number[:, None], place[:, None], number[None], place[None]
    return ((e == 0) & (j <= i - k)) | ((e > 0) & (e <= k) & (j == i - (k - e)))


@torch.no_grad()
def agreement(head: FeatureHead, target: CausalTarget, reads: Sequence[StateRead]) -> float:
    """Return the share of places where the head's best token is the target's best of all tokens.

    It is the mean over `reads`, each of one text or more; NaN without any.
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
