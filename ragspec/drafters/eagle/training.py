"""Training of a feature head on texts, as for EAGLE (arXiv 2401.15077) and LANTERN (2410.03355).

The target reads each text once; the head learns to guess its next hidden state: smooth L1 between
the states, plus 0.1 times the cross-entropy between the laws that the output head makes of them.
Uniform noise on the states that it is given stands for its own errors. Deviation: the learning
rate goes with one over the width, so that it serves heads of any size, and falls to a tenth by a
cosine.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional

from ragspec.drafters.eagle.head import FeatureHead, check_head
from ragspec.errors import InputError
from ragspec.target.causal import MOST_LOGITS, CausalTarget

SHORTEST = 4
_CLIP = 0.5
_RATE = 0.6
_WARM_UP = 0.03
_TINY = math.ulp(0.0)  # the least number above 0


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """How a head is trained.

    steps: of the optimizer. seconds: the run ends after so many, whatever steps are left; None
    sets no such end. batch_size, length: texts of a step, and tokens that longer ones are cut to
    (texts below a condition cannot be cut).
    learning_rate: at its height; None gives 0.6 / H, near the published 1e-4 for H = 4096.
    noise: width of the uniform noise on the states. laws: weight of the cross-entropy.
    Raises InputError for numbers outside their range.
    """

    steps: int = 2000
    seconds: float | None = None
    batch_size: int = 8
    length: int = 256
    learning_rate: float | None = None
    weight_decay: float = 0.01
    noise: float = 0.2
    laws: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {"steps": 1, "batch_size": 1, "length": SHORTEST}
        limits = [n for n in ("learning_rate", "seconds") if getattr(self, n) is not None]
        least = {"noise": 0.0, "laws": 0.0, "weight_decay": 0.0, **dict.fromkeys(limits, _TINY)}
        wrong = [n for n, low in counts.items() if not _reaches(getattr(self, n), low, Integral)]
        wrong += [n for n, low in least.items() if not _reaches(getattr(self, n), low, Real)]
        if wrong:
            told = ", ".join(f"{name}={getattr(self, name)!r}" for name in wrong)
            raise InputError(
                f"got {told}; expected at least one step and one text a step, texts of "
                f"{SHORTEST} tokens or more, all in whole numbers, a rate and seconds above 0, and "
                "nothing infinite or below 0."
            )


def _reaches(given: Any, least: float, kind: Any) -> bool:
    return isinstance(given, kind) and math.isfinite(given) and given >= least


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of the training. agreement: how often the head's best token is the target's."""

    step: int
    loss: float
    agreement: float
    seconds: float


def train_head(
    target: CausalTarget,
    texts: Sequence[Sequence[int]],
    settings: HeadTraining | None = None,
    *,
    head: FeatureHead | None = None,
    on_step: Callable[[Progress], None] | None = None,
) -> FeatureHead:
    """Return a head trained on token ids of texts, the target's own or such as it will write.

    head: goes on from this one, which is changed; None starts a fresh one. The target's weights
    stay as they are. Raises InputError where there is no text of a few tokens, or one that the
    target cannot read in pieces of `settings.length`.
    """
    settings = settings or HeadTraining()
    generator = torch.Generator().manual_seed(settings.seed)
    if head is None:
        head = FeatureHead.fresh(target, generator)
    check_head(head, target)
    batches = _batches(target, texts, settings, generator)
    rate = settings.learning_rate or _RATE / head.config.hidden_size
    optimizer = torch.optim.AdamW(
        head.parameters(),
        lr=rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
    )
    head.train()
    began = time.perf_counter()
    for step in range(settings.steps):
        spent = time.perf_counter() - began
        part = step / settings.steps
        if settings.seconds is not None:
            part = max(part, spent / settings.seconds)
        if part >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * _schedule(part)
        embedded, states = read_states(target, next(batches))
        loss, agreement = head_loss(head, target, embedded, states, settings, generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_value_(head.parameters(), _CLIP)
        optimizer.step()
        if on_step is not None:
            on_step(Progress(step, float(loss.detach()), agreement, spent))
    return head.eval()


def read_states(
    target: CausalTarget, texts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the target read texts of one length: what it embeds and its states, f32 [R, T, H] each.

    R: texts times copies. Of texts with too many logits to be kept at once, only the ends.
    """
    length = len(texts[0])
    most = max(1, MOST_LOGITS // (length * target.vocab_size))
    embedded, states = [], []
    for first in range(0, len(texts), most):
        part = texts[first : first + most]
        with target.open(len(part), length) as session, torch.no_grad():
            session.keep_hidden()
            session.read_prompts(part, 0)
            kept = torch.cat(session.hidden)
            states.append(kept.float())
            tokens = torch.tensor([list(text) for text in part], device=target.device)
            read = target.embed(tokens)  # copy by copy; the states are text by text
            order = torch.arange(len(read), device=read.device).view(-1, len(part)).T.flatten()
            embedded.append(read[order, -kept.shape[1] :].float())
    return torch.cat(embedded), torch.cat(states)


def head_loss(
    head: FeatureHead,
    target: CausalTarget,
    embedded: torch.Tensor,
    states: torch.Tensor,
    settings: HeadTraining,
    generator: torch.Generator,
) -> tuple[torch.Tensor, float]:
    """Return the loss over texts, and how often both laws have the same best token.

    embedded [R, T, E], states [R, T, H]: of the texts' tokens, by the target.
    """
    before, after = states[:, :-1], states[:, 1:]
    if settings.noise:
        drawn = torch.rand(before.shape, generator=generator).to(before.device)
        before = before + (drawn - 0.5) * settings.noise
    guessed = head(embedded[:, 1:], before).float()
    loss = functional.smooth_l1_loss(guessed, after)
    ours, theirs = _logits(target, guessed), _logits(target, after)
    if settings.laws:
        law = theirs.softmax(-1)
        loss = loss - settings.laws * (law * ours.log_softmax(-1)).sum(-1).mean()
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return loss, float(agreement)


def _logits(target: CausalTarget, states: torch.Tensor) -> torch.Tensor:
    """Return the output head's logits, of which no gradient reaches its own weights."""
    head = target.output_head
    weights = {name: value.detach() for name, value in head.named_parameters()}
    logits: torch.Tensor = functional_call(head, weights, (states.to(target.dtype),))
    return logits.float()


def _schedule(part: float) -> float:
    """Return the factor of the learning rate after a part of the run: warm-up, then cosine."""
    if part < _WARM_UP:
        return (part + 0.002) / (_WARM_UP + 0.002)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (part - _WARM_UP) / (1.0 - _WARM_UP)))


def _batches(
    target: CausalTarget,
    texts: Sequence[Sequence[int]],
    settings: HeadTraining,
    generator: torch.Generator,
) -> Iterator[list[list[int]]]:
    """Return texts of one length in endless random order; raises InputError where there is none.

    Longer texts are cut; the last piece overlaps the one before, so that all have full length.
    """
    pieces: defaultdict[int, list[list[int]]] = defaultdict(list)
    for text in texts:
        size = min(len(text), settings.length)
        for start in range(0, len(text), settings.length) if size >= SHORTEST else ():
            start = min(start, len(text) - size)
            piece = list(text[start : start + size])
            _check_piece(target, piece, len(text))
            pieces[size].append(piece)
    if not pieces:
        raise InputError(
            f"got {len(texts)} texts, none of {SHORTEST} tokens or more; expected text to learn "
            "from."
        )
    return _endless(list(pieces.values()), settings.batch_size, generator)


def _check_piece(target: CausalTarget, piece: list[int], whole: int) -> None:
    """Raise InputError for a piece, of a text of `whole` tokens, that the target cannot read."""
    try:
        target.check_prompt(piece)
    except InputError as error:
        if len(piece) == whole:
            raise
        raise InputError(
            f"got a text of {whole} tokens that length={len(piece)} cuts into pieces which the "
            f"target cannot read ({error}); expected it whole. Set length to {whole} or more."
        ) from error


def _endless(
    groups: list[list[list[int]]], size: int, generator: torch.Generator
) -> Iterator[list[list[int]]]:
    while True:
        batches = []
        for group in groups:
            order = torch.randperm(len(group), generator=generator).tolist()
            batches += [
                [group[i] for i in order[at : at + size]] for at in range(0, len(order), size)
            ]
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[i]
