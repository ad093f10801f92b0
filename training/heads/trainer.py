"""Training of a draft head on texts, as for EAGLE (arXiv 2401.15077) and LANTERN (2410.03355).

The target reads each text once; the head learns to predict its next hidden state (see `loss`).
Uniform noise on the head's inputs simulates its own errors. Deviation: the learning rate is
inversely proportional to the width, so that it serves heads of any size, and falls to a tenth by a
cosine. Order and noise of a step depend on seed and step alone, so that a run can be resumed.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ragspec.drafters.heads.checkpoint import load_pickle
from ragspec.drafters.heads.config import HeadConfig
from ragspec.drafters.heads.fresh import fresh_head
from ragspec.drafters.heads.head import DraftHead, check_head, taps_of
from ragspec.drafters.heads.vocabulary import frequent_tokens
from ragspec.errors import InputError, StoreError
from ragspec.needs import LAST, Needs, match
from ragspec.sampling.settings import checked_count, checked_number, checked_seed
from ragspec.training.batches import SHORTEST, Batches, StateRead, StateReader, seeded
from ragspec.training.files import CHECKPOINT, PART
from ragspec.training.loss import Teacher, head_loss
from ragspec.verification.causal import CausalTarget

_CLIP = 0.5
_RATE = 0.6
_WARM_UP = 0.03
_LEAST = 1e-12  # of rates and seconds, which 0 would make meaningless


@dataclass(frozen=True, slots=True)
class HeadTraining:
    """Settings of a head's training.

    Attributes:
        steps: Steps of the optimizer.
        seconds: Time limit of the run, which may end it before `steps`; None sets no limit.
        batch_size, length: Texts per step, and maximum tokens per text. Longer texts are split,
            which texts behind a condition do not allow.
        learning_rate: Peak rate; None gives 0.6 / H, near the published 1e-4 for H = 4096.
        form: The form of the head, see `fresh_head`; None for "eagle1", or that of a trained one.
        noise: Width of the uniform noise on the states.
        depth: Rounds in which the head reads its own predictions, see `loss`.
        slots: Tokens that a head drafts in one pass; None for 4 of a fresh one of several slots.
        draft_vocab_size: The head only drafts this many of the texts' most frequent tokens, see
            `frequent_tokens`; None for all.

    Raises:
        InputError: A number is out of range.
    """

    steps: int = 2000
    seconds: float | None = None
    batch_size: int = 8
    length: int = 256
    learning_rate: float | None = None
    weight_decay: float = 0.01
    form: str | None = None
    noise: float = 0.2
    depth: int = 1
    slots: int | None = None
    draft_vocab_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {"steps": 1, "batch_size": 1, "length": SHORTEST, "depth": 1}
        sizes = ("slots", "draft_vocab_size")
        counts |= {name: 1 for name in sizes if getattr(self, name) is not None}
        for name, least in counts.items():
            checked_count(getattr(self, name), name, least)
        checked_seed(self.seed)
        limits = [name for name in ("learning_rate", "seconds") if getattr(self, name) is not None]
        for name in ("noise", "weight_decay", *limits):
            checked_number(getattr(self, name), name, _LEAST if name in limits else 0.0)


def _fixed(config: HeadConfig) -> dict[str, object]:
    """Return the settings of a training that the head itself has."""
    return {name: getattr(config, name) for name in ("form", "slots", "draft_vocab_size")}


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """One step of the training.

    Attributes:
        agreement: Share of places where the head's best token is the target's, if it may be.
        part: Completed part of the run after the step, from 0 to 1.
    """

    step: int
    loss: float
    agreement: float
    seconds: float
    part: float


class HeadTrainer:
    """A training that can be interrupted at any step and resumed.

    If steps end it, the head is the same as without interruption; a time limit changes the rate.
    The target's weights stay unchanged.

    Args:
        target: The model, with its hidden states.
        texts: Token ids, the target's own texts or similar ones.
        head: The head to continue with, which is changed; None starts a fresh one.
        read: Returns the states of the texts with some numbers, none of them longer than
            `settings.length`; None reads the texts with the target.

    Attributes:
        steps: Steps taken so far.
    """

    def __init__(
        self,
        target: CausalTarget,
        texts: Sequence[Sequence[int]],
        settings: HeadTraining,
        *,
        head: DraftHead | None = None,
        read: Callable[[Sequence[int]], StateRead] | None = None,
    ) -> None:
        match("the training of a head", Needs(hidden_states=(LAST,)), target.capabilities)
        self.target, self.settings = target, settings
        size, tokens = settings.draft_vocab_size, None
        if head is None and size is not None:
            tokens = frequent_tokens(texts, size, target.vocab_size)
        first, slots = seeded(settings.seed, 0, 0), settings.slots or 4
        form = settings.form or "eagle1"
        self.head = head or fresh_head(target, first, form=form, tokens=tokens, slots=slots)
        config = self.head.config
        for name, fixed in _fixed(config).items():
            if (got := getattr(settings, name)) not in (None, fixed):
                raise InputError(
                    f"got {name}={got!r} for a head of {config.form} with {name}={fixed!r}, which "
                    "a training does not change; expected the same. Leave it out."
                )
        kinds = config.layers.get("layer_types") or ()
        if config.markov_rank or (config.join == "inject" and "sliding_attention" in kinds):
            what = "a Markov part" if config.markov_rank else "layers with windows"
            raise InputError(
                f"got a head with {what}, which cannot be trained here; expected a head of DFlash "
                "without it. Leave this head out."
            )
        if settings.depth > 1 and not config.recurrent:
            raise InputError(
                f"got depth={settings.depth} for a head that does not read its own output; "
                "expected 1. Set slots for the tokens that it drafts in one pass."
            )
        check_head(config, target)
        self.batches = Batches(
            target, texts, size=settings.batch_size, length=settings.length, seed=settings.seed
        )
        chunks, taps = self.batches.chunks, taps_of(config, target)
        self._read = read or StateReader(target, chunks, taps, head=self.head).read
        self._teacher = Teacher(target, self.head)
        self.rate = settings.learning_rate or _RATE / config.hidden_size
        options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": settings.weight_decay}
        options |= {"lr": self.rate, "fused": True}
        self.optimizer = torch.optim.AdamW(self.head.parameters(), **options)
        self.steps = 0
        self._spent = 0.0  # seconds of runs before this one

    def run(self) -> Iterator[TrainingProgress]:
        """Train until the last step or the time limit, yielding the progress of every step."""
        spent, began = self._spent, time.perf_counter()
        while (part := self.part) < 1.0:
            loss, agreement = self._step(self.rate * _schedule(part))
            self.steps += 1
            self._spent = spent + time.perf_counter() - began
            yield TrainingProgress(self.steps - 1, loss, agreement, self._spent, self.part)

    @property
    def part(self) -> float:
        """Return the completed part of the run, by steps or by time: whichever is larger."""
        part = self.steps / self.settings.steps
        return max(part, self._spent / (self.settings.seconds or math.inf))

    def _step(self, rate: float) -> tuple[float, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.head.train()
        read = self._read(self.batches.of(self.steps))
        settings, shape = self.settings, read.taps[:, 1:].shape
        sample = torch.rand(shape, generator=seeded(settings.seed, 2, self.steps))
        noise = settings.noise * (sample - 0.5).to(read.states.device)
        half = self.target.dtype == torch.bfloat16  # needs no scaled loss, unlike float16
        with torch.autocast(read.states.device.type, torch.bfloat16, enabled=half):
            depth = settings.depth
            loss, agreement = head_loss(self.head, self._teacher, read, noise=noise, depth=depth)
        if not math.isfinite(value := float(loss.detach())):
            raise InputError(
                f"got a loss of {value} in step {self.steps + 1}; expected a finite number. Lower "
                f"the learning rate, which is {self.rate:g} at its height."
            )
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_value_(self.head.parameters(), _CLIP)
        self.optimizer.step()
        return value, agreement

    def state(self) -> dict[str, object]:
        """Return the state to resume from, for `torch.save`."""
        return {
            "marks": self._marks(),
            "steps": self.steps,
            "spent": self._spent,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; raise InputError for that of another training."""
        marks = self._marks()
        if other := [name for name in marks if state["marks"].get(name) != marks[name]]:
            raise InputError(
                f"the training that was left differs in {', '.join(other)}; expected the same "
                "texts, model and settings (steps and minutes may differ). Name another folder."
            )
        self.head.load_state_dict(state["head"])
        self._teacher = Teacher(self.target, self.head)  # for the loaded head's tokens
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self._spent = int(state["steps"]), float(state["spent"])

    def _marks(self) -> dict[str, object]:
        """Return all that must be the same to resume a run; steps and seconds may differ."""
        settings = {n: v for n, v in asdict(self.settings).items() if n not in ("steps", "seconds")}
        # Condition ids alone identify nothing, so the embeddings of the first tokens are hashed.
        first = sorted({chunk[0] for chunk in self.batches.chunks})
        with torch.no_grad():
            read = self.target.embed(torch.tensor([first], device=self.target.device))
        conditions = hashlib.sha256(read.float().cpu().numpy().tobytes()).hexdigest()
        texts = {"texts": self.batches.digest(), "conditions": conditions}
        config = self.head.config
        return {**settings, **_fixed(config), **texts, "model": asdict(config)}


def _schedule(part: float) -> float:
    """Return the factor of the learning rate after a part of the run: warm-up, then cosine."""
    if part < _WARM_UP:
        return (part + 0.002) / (_WARM_UP + 0.002)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * (part - _WARM_UP) / (1.0 - _WARM_UP)))


def save_state(folder: Path, state: Mapping[str, object]) -> None:
    """Replace the checkpoint in a folder; raise StoreError where it cannot be written."""
    part = folder / PART
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, part)
        os.replace(part, folder / CHECKPOINT)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
        with suppress(OSError):
            part.unlink()
        raise StoreError(
            f"Cannot write the state of the training to {folder} ({error}). Free some space."
        ) from error


def load_state(folder: Path) -> dict[str, Any]:
    """Return the checkpoint in a folder; raise StoreError where it cannot be read."""
    path = folder / CHECKPOINT
    try:
        state: dict[str, Any] = load_pickle(path)
        [state[name] for name in ("marks", "steps", "head", "optimizer", "spent", "best")]
    except Exception as error:  # a damaged pickle may raise any error
        raise StoreError(
            f"{path} is damaged ({error}). Delete it and start again without --resume."
        ) from error
    return state
