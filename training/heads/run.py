"""A training of a head from beginning to end: held-out texts, checkpoints, signals."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import nan
from pathlib import Path
from typing import Any

from ragspec.drafters.heads.files import open_head, save_head
from ragspec.drafters.heads.head import taps_of
from ragspec.errors import StoreError, pluralize
from ragspec.training.batches import SHORTEST, StateRead, StateReader
from ragspec.training.files import CHECKPOINT, PART, check_out, lock_out
from ragspec.training.loss import agreement
from ragspec.training.trainer import (
    HeadTrainer,
    HeadTraining,
    TrainingProgress,
    load_state,
    save_state,
)
from ragspec.verification.causal import CausalTarget

HOLD_OUT = 20  # one text in this many is held out, to judge the head
MOST_HELD_OUT = 32
EVERY_SECONDS = 60.0  # between two checkpoints

Notify = Callable[[str], None]


def train_head(
    target: CausalTarget,
    texts: list[list[int]],
    out: Path,
    settings: HeadTraining,
    *,
    notify: Notify = lambda message: None,
    on_step: Callable[[TrainingProgress], None] = lambda step: None,
    start: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train a head for a model on token ids, write it, and return a summary.

    The head that is written is the best on held-out texts. Ctrl-C or SIGTERM ends the training
    after the current step; at most a minute of it is lost to a kill.

    Args:
        start: The head to begin with.
        resume: Continue the training that was interrupted in `out`.

    Raises:
        InputError, ModelError: The loss, or the head at last, is not finite.
        StoreError, KeyboardInterrupt: See `lock_out` and `HeadRun`.
    """
    check_out(out, resume=resume)
    with stop_signals() as stop, lock_out(out):
        state = load_state(out) if resume else None
        held_out, learned = _split(texts)
        began = time.perf_counter()
        head = None if start is None else open_head(start, target).to(target.device)
        trainer = HeadTrainer(target, learned, settings, head=head)
        states = _read_states(trainer, held_out)
        run = HeadRun(trainer, out, states, notify)
        if state is not None:
            run.resume(state)
            notify(f"going on after step {trainer.steps}")
        if stop.is_set():
            raise KeyboardInterrupt
        last = run.run(on_step, stop)
        run.finish(last)
    if not held_out:
        states.extend(_read_states(trainer, learned))
    return {
        "out": str(out),
        "texts": len(texts),
        "tokens": sum(len(text) for text in texts),
        "steps": trainer.steps,
        "seconds": round(time.perf_counter() - began, 2),
        "loss": None if last is None else round(last.loss, 4),
        "agreement": round(agreement(trainer.head, target, states), 4),
        "held_out": len(held_out),
        "parameters": sum(weight.numel() for weight in trainer.head.parameters()),
    }


class HeadRun:
    """A training that judges and saves the head every minute, so that the best one survives.

    Args:
        states: Those of held-out texts, by which heads are judged; without any the last is best.
    """

    def __init__(
        self, trainer: HeadTrainer, out: Path, states: Sequence[StateRead], notify: Notify
    ) -> None:
        self.trainer, self.out, self.states, self.notify = trainer, out, states, notify
        self.best: tuple[float, dict[str, Any]] = nan, {}  # its score and weights
        self._judge_at = 0.0

    def resume(self, state: dict[str, Any]) -> None:
        """Continue an interrupted training; see `load_state`."""
        self.trainer.resume(state)
        self.best = state["best"]

    def run(
        self, on_step: Callable[[TrainingProgress], None], stop: threading.Event
    ) -> TrainingProgress | None:
        """Train to the end and judge the head; return the last step, None for none.

        Args:
            stop: Ends the training after the current step. The best head and a checkpoint are then
                written, and KeyboardInterrupt is raised.
        """
        last, saved_at = None, time.monotonic()
        for last in self.trainer.run():
            on_step(last)
            if stop.is_set():
                self._judge_at = 0.0
                self.save_checkpoint()
                self.write()
                done = f"stopped after step {self.trainer.steps}"
                self.notify(f"{done}: the best head so far is in {self.out}; --resume goes on")
                raise KeyboardInterrupt
            if time.monotonic() - saved_at >= EVERY_SECONDS:
                self.save_checkpoint()
                saved_at = time.monotonic()
        if last is not None:
            self.update_best()
        return last

    def finish(self, last: TrainingProgress | None) -> None:
        """Write the best head; delete the checkpoint, unless fewer steps were asked for."""
        if last is None and self.trainer.part > 1.0:
            self.write()
            done = f"{pluralize(self.trainer.steps, 'step')} done, more than were asked for"
            self.notify(f"{done}; --resume with more --steps or --minutes goes on")
            return
        if last is None:
            self.notify(f"the training had ended; --start {self.out} learns on from its head")
        try:
            self.write()
        except StoreError as error:
            self.save_checkpoint()
            if not (self.out / CHECKPOINT).is_file():
                raise
            raise StoreError(f"{error} --resume with the same options writes it again.") from error
        for name in (CHECKPOINT, PART):
            (self.out / name).unlink(missing_ok=True)

    def save_checkpoint(self) -> None:
        """Write a checkpoint; report a full disk and go on."""
        if time.monotonic() >= self._judge_at:  # judging may take a tenth of the time
            began = time.monotonic()
            self.update_best()
            self._judge_at = time.monotonic() + 10.0 * (time.monotonic() - began)
        try:
            save_state(self.out, self.trainer.state() | {"best": self.best})
        except StoreError as error:
            self.notify(str(error))

    def update_best(self) -> None:
        """Judge the head, and keep its weights if it is the best so far."""
        score = agreement(self.trainer.head, self.trainer.target, self.states)
        if not score <= self.best[0]:
            weights = {n: w.detach().clone() for n, w in self.trainer.head.state_dict().items()}
            self.best = score, weights

    def write(self) -> None:
        """Write the best head; raise StoreError where it cannot be written."""
        self.trainer.head.load_state_dict(self.best[1])
        save_head(self.trainer.head.eval(), self.out)


def _read_states(trainer: HeadTrainer, texts: Sequence[Sequence[int]]) -> list[StateRead]:
    """Return the target's states over the first texts, one by one."""
    length, target, head = trainer.settings.length, trainer.target, trainer.head
    chunks = [text[:length] for text in texts[:MOST_HELD_OUT]]
    reader = StateReader(target, chunks, taps_of(head.config, target), head=head)
    return [reader.read([number]) for number in range(len(chunks))]


def _split(texts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the held-out texts, none of fewer than `HOLD_OUT`, and those to learn from."""
    texts = [text for text in texts if len(text) >= SHORTEST] or texts
    if len(texts) < HOLD_OUT:
        return [], texts
    held_out = range(0, len(texts), HOLD_OUT)[:MOST_HELD_OUT]
    learned = [text for number, text in enumerate(texts) if number not in held_out]
    return [texts[number] for number in held_out], learned


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set; a second signal is a KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def end(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
