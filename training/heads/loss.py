"""The loss of a draft head: its predicted hidden states, and their distributions.

Depth 1 is EAGLE's loss (arXiv 2401.15077): a state is predicted from the target's own state before
it. Deeper drafts read predictions. Depth d trains d such rounds: a place of round k reads the
target's states up to k places before it and the predictions since. Heads that project learn states
and read predictions without gradient, as in HASS (2408.15766); the others learn distributions
alone, with the gradient of all rounds, as in EAGLE-3 (2503.01840). Heads of several slots learn
them too: round k is slot k (P-EAGLE reads a mask token in it), and every place begins a pass.
"""

from collections.abc import Callable, Iterator, Sequence
from math import nan

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from ragspec.drafters.heads.head import DraftHead, HeadStates, RecurrentHead
from ragspec.drafters.heads.parallel import BlockHead, MedusaHead
from ragspec.drafters.heads.vocabulary import linear_of, output_rows
from ragspec.models.block_linear import BlockLinear
from ragspec.training.batches import StateRead
from ragspec.verification.causal import CausalTarget

Output = Callable[[Tensor], Tensor]


def frozen_output(target: CausalTarget, tokens: Tensor | None) -> Output:
    """Return a function with frozen weights from states to logits f32, of all tokens or some."""
    module = target.output_head if tokens is None else output_rows(target, tokens)
    if isinstance(module, BlockLinear):  # its forward gives no gradient
        module = linear_of(module.weight, module.bias)
    weights = {name: value.detach() for name, value in module.named_parameters()}

    def logits(states: Tensor) -> Tensor:
        output: Tensor = functional_call(module, weights, (states.to(target.dtype),))
        return output.float()

    return logits


class Teacher:
    """The parts of a target that a head learns from, beside the states of texts.

    Attributes:
        output: From states to logits f32 of the head's tokens, with frozen weights.
        mask: Embedding of the head's mask token, f32 [1, 1, E]; None without one.
    """

    def __init__(self, target: CausalTarget, head: DraftHead) -> None:
        self.output = frozen_output(target, head.tokens)
        self.mask: Tensor | None = None
        if (token := head.config.mask_token) is not None:
            with torch.no_grad():
                mask = head.embed(target, torch.tensor([[token]], device=target.device))
            self.mask = mask.float()


def head_output(head: DraftHead, output: Output, number: int = 0) -> Output:
    """Return the function from a head's states in a round to its logits f32, by the target's."""
    rows = head.outputs[number] if isinstance(head, MedusaHead) else head.output
    return output if rows is None else lambda states: rows(states).float()


def head_loss(
    head: DraftHead, teacher: Teacher, read: StateRead, *, noise: Tensor | float = 0.0, depth: int
) -> tuple[Tensor, float]:
    """Return the loss, and the share of places where head and target agree in round one.

    The loss compares the head's tokens. Head and target agree if their best tokens are equal.

    Args:
        noise: Added to the target's states as inputs, [R, T - 1, W].
        depth: Number of rounds of a head that reads its own output.
    """
    learns_states = head.config.join == "project"
    # As published: the weight of distributions, to 1 of states, and of a round, to the one before.
    distributions, decay = (0.1, 1.0) if learns_states else (1.0, 0.8)
    after, real = read.states[:, 1:], read.real[:, 1:]
    total, agreement = torch.zeros((), device=after.device), 0.0
    weight, whole = 1.0, 0.0
    for number, guessed in enumerate(rounds(head, read, noise, depth, teacher.mask)):
        states = guessed.read.float()[:, number:]
        start = after.shape[1] - states.shape[1]
        learned = real[:, start:]  # other places need no distribution
        expected, states = after[:, start:][learned], states[learned]
        with torch.no_grad():
            theirs = teacher.output(expected)
        ours = head_output(head, teacher.output, number)(states)
        loss = -distributions * (theirs.softmax(-1) * ours.log_softmax(-1)).sum(-1)
        if learns_states:
            loss = loss + functional.smooth_l1_loss(states, expected, reduction="none").mean(-1)
        total = total + weight * loss.sum() / max(1, len(loss))
        weight, whole = weight * decay, whole + weight
        if not number:
            hits = ours.argmax(-1) == theirs.argmax(-1)
            agreement = float(hits.sum() / max(1, len(hits)))
    return total / whole, agreement


def rounds(
    head: DraftHead, read: StateRead, noise: Tensor | float, depth: int, mask: Tensor | None = None
) -> Iterator[HeadStates]:
    """Yield the head's output [R, n, H] of each round, n = T - 1, or of each slot.

    Rounds after the first begin at the first place to learn from: [R, n - start, H]. Place start +
    i of round k is valid from i = k on. A round attends to the keys of those before it.
    """
    from transformers import DynamicCache

    embedded, inputs = read.embedded[:, 1:], head.project(read.taps[:, :-1] + noise)
    if isinstance(head, MedusaHead | BlockHead):
        yield from (HeadStates(each, each) for each in head.slot_states(embedded, inputs, mask))
        return
    assert isinstance(head, RecurrentHead)
    depth = depth if head.config.recurrent else head.config.slots
    n, device = embedded.shape[1], embedded.device
    places = torch.arange(n, device=device)[None]
    start = 0
    if depth > 1 and len(learned := read.real[:, 1:].any(0).nonzero()):
        start = int(learned[0])
    visible, keys, before = round_mask(n, depth, device, start), DynamicCache(), inputs
    for number in range(depth):
        first = start if number else 0
        end = n + number * (n - start)
        rows = visible[end - (n - first) : end, :end][None, None]
        options = {"mask": rows, "keys": keys if depth > 1 else None}
        guessed = head(embedded[:, first:], inputs, places[:, first:], **options)
        yield guessed
        if head.mask_taps is not None:
            assert mask is not None
            embedded = mask.expand(embedded.shape)
            inputs = head.project(head.mask_taps).expand(len(embedded), n - start, -1)
            continue
        fed = guessed.fed[:, guessed.fed.shape[1] - n + start :]
        fed = fed.detach() if head.config.join == "project" else fed
        inputs = torch.cat([before[:, start : start + 1], fed[:, :-1]], 1)


def round_mask(n: int, count: int, device: torch.device | str = "cpu", start: int = 0) -> Tensor:
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
def agreement(head: DraftHead, target: CausalTarget, reads: Sequence[StateRead]) -> float:
    """Return the share of places where the head's best token is the target's best of all tokens.

    It is the mean over `reads`, each of one text or more; NaN without any.
    """
    theirs, teacher = frozen_output(target, None), Teacher(target, head)
    ours, results = head_output(head, teacher.output), []
    for read in reads:
        guessed = next(rounds(head, read, 0.0, 1, mask=teacher.mask))
        best = ours(guessed.read.float()).argmax(-1)
        best = best if head.tokens is None else head.tokens[best]
        real = read.real[:, 1:]
        hits = (best == theirs(read.states[:, 1:]).argmax(-1)) & real
        results.append(float(hits.sum() / real.sum().clamp(min=1)))
    return sum(results) / len(results) if results else nan
