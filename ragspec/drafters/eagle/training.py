"""Training of a feature head on texts, as for EAGLE (arXiv 2401.15077) and LANTERN (2410.03355).

The target reads each text once; the head learns to guess its next hidden state: smooth L1 between
the states, plus 0.1 times the cross-entropy between the laws that the output head makes of them.
Uniform noise on the states that it is given stands for its own errors. Deviation: the learning
rate goes with one over the width, so that it serves heads of any size, and falls to a tenth by a
cosine. Order and noise of a step depend on seed and step alone, so that a run can be left and
gone on with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional

from ragspec.drafters.eagle.batches import SHORTEST, Batches, seeded
from ragspec.drafters.eagle.head import FeatureHead, check_head
from ragspec.errors import InputError
from ragspec.target.causal import MOST_LOGITS, CausalTarget

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
    trainer = HeadTrainer(target, texts, settings or HeadTraining(), head=head)
    for progress in trainer.run():
        if on_step is not None:
            on_step(progress)
    return trainer.head.eval()


class HeadTrainer:
    """A training that can be left at any step and gone on with, to the same head.

    steps: those that were taken. See `train_head` for the rest and for what it raises.
    """

    def __init__(
        self,
        target: CausalTarget,
        texts: Sequence[Sequence[int]],
        settings: HeadTraining,
        *,
        head: FeatureHead | None = None,
    ) -> None:
        self.target = target
        self.settings = settings
        self.head = head or FeatureHead.fresh(target, seeded(settings.seed, 0, 0))
        check_head(self.head, target)
        self.batches = Batches(
            target,
            texts,
            size=settings.batch_size,
            length=settings.length,
            seed=settings.seed,
        )
        self.rate = settings.learning_rate or _RATE / self.head.config.hidden_size
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=self.rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )
        self.steps = 0
        self._spent = 0.0  # seconds of runs before this one

    def run(self) -> Iterator[Progress]:
        """Take step after step until the last, or until the time is over."""
        settings, spent, began = self.settings, self._spent, time.perf_counter()
        while True:
            self._spent = spent + time.perf_counter() - began
            part = self.steps / settings.steps
            if settings.seconds is not None:
                part = max(part, self._spent / settings.seconds)
            if part >= 1.0:
                return
            loss, agreement = self._step(self.rate * _schedule(part))
            self.steps += 1
            yield Progress(self.steps - 1, loss, agreement, self._spent)

    def _step(self, rate: float) -> tuple[float, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.head.train()
        embedded, states = read_states(self.target, self.batches.of(self.steps))
        noise = seeded(self.settings.seed, 2, self.steps)
        loss, agreement = head_loss(self.head, self.target, embedded, states, self.settings, noise)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_value_(self.head.parameters(), _CLIP)
        self.optimizer.step()
        return float(loss.detach()), agreement

    def state(self) -> dict[str, Any]:
        """Return all that a later run needs, for `torch.save`."""
        return {
            "marks": self._marks(),
            "steps": self.steps,
            "spent": self._spent,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned; raises InputError where it is of another training."""
        marks = self._marks()
        other = [name for name in marks if state["marks"].get(name) != marks[name]]
        if other:
            raise InputError(
                f"the training that was left differs in {', '.join(other)}; expected the same "
                "texts, model and settings (steps and minutes may differ). Name another folder."
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self._spent = int(state["steps"]), float(state["spent"])

    def _marks(self) -> dict[str, Any]:
        """Return what has to be the same when a run goes on; the end may be put elsewhere."""
        kept = {n: v for n, v in asdict(self.settings).items() if n not in ("steps", "seconds")}
        return {**kept, "texts": self.batches.digest(), "model": asdict(self.head.config)}


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
