"""What `ragspec train-head` does once its options are read."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ragspec.drafters.eagle.head import CONFIG, KIND, FeatureHead
from ragspec.errors import InputError, StoreError
from ragspec.models.load import load_model
from ragspec.pipelines.cli.store_run import counting
from ragspec.pipelines.console.options import silence_transformers
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.console.texts import TextColumns, read_texts
from ragspec.retrievers.corpus.catalogue import tokenized
from ragspec.training.batches import SHORTEST, StateRead, StateReader
from ragspec.training.loss import agreement
from ragspec.training.trainer import (
    CHECKPOINT,
    PART,
    HeadTrainer,
    HeadTraining,
    TrainingProgress,
    load_state,
    save_state,
)
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_target

PICTURES = ".npz"
_HOLD_OUT = 20  # one text in so many is held out, to judge the head
_MOST_HELD_OUT = 32
EVERY_SECONDS = 60.0  # between two checkpoints


def make_head(
    model: str,
    data: Path,
    out: Path,
    settings: HeadTraining,
    terminal: Terminal,
    *,
    limit: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    start: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train a head for a model on texts or pictures, write it, and return what it came to.

    The head that is written is the best on held-out texts, also where Ctrl-C or SIGTERM ends the
    training, of which at most a minute is lost.

    Args:
        limit: About how many tokens are read at most. Pictures are never cut.
        start: The head to begin with.
        resume: Go on with the training that was interrupted in `out`.

    Raises: InputError, DocumentError, ModelError, StoreError, KeyboardInterrupt.
    """
    silence_transformers()
    check_out(out, resume=resume)
    state = load_state(out) if resume else None
    if data.suffix == PICTURES:
        if settings.draft_vocab_size is not None:
            raise InputError("got --vocabulary for pictures; expected texts. Leave it out.")
        target, texts = _pictures(model, data, settings.seed, device, dtype)
        # A piece of a picture without its condition would teach the head nonsense.
        settings = replace(settings, length=max(settings.length, *map(len, texts)))
    else:
        target, texts = _texts(model, data, terminal, limit, device, dtype)
    held_out, learned = _split(texts)
    began = time.perf_counter()
    head = None if start is None else FeatureHead.load(start).to(target.device)
    trainer = HeadTrainer(target, learned, settings, head=head)
    judged = list[StateRead]()

    def judge() -> float:
        if not judged:
            judged.extend(_readings(target, held_out, settings.length))
        return agreement(trainer.head, target, judged)

    course = Course(trainer, out, judge)
    if state is not None:
        course.resume(state)
        terminal.note(f"going on after step {trainer.steps}")
    with _progress(terminal) as on_step, _stopping() as stop:
        last = course.run(on_step, terminal, stop)
    if last is None:
        terminal.note("the training had come to its end; more --steps or --minutes go on with it")
    course.end(terminal)
    if not held_out:
        judged.extend(_readings(target, learned, settings.length))
    return {
        "out": str(out),
        "texts": len(texts),
        "tokens": sum(len(text) for text in texts),
        "steps": trainer.steps,
        "seconds": round(time.perf_counter() - began, 2),
        "loss": None if last is None else round(last.loss, 4),
        "agreement": round(judge(), 4),
        "kept_apart": len(held_out),
        "parameters": sum(weight.numel() for weight in trainer.head.parameters()),
    }


class Course:
    """A training that is judged and written every minute, so that the best head survives.

    judge: returns how good the head is on held-out texts; nan where there are none, and then the
    last head counts.
    """

    def __init__(self, trainer: HeadTrainer, out: Path, judge: Callable[[], float]) -> None:
        self.trainer, self.out, self.judge = trainer, out, judge
        self.best: tuple[float, dict[str, Any]] | None = None
        self._judge_at = 0.0

    def resume(self, state: dict[str, Any]) -> None:
        """Go on with an interrupted training; see `load_state`."""
        self.trainer.go_on(state)
        if (best := state.get("best")) is not None:
            self.best = float(best[0]), best[1]

    def run(
        self, on_step: Callable[[TrainingProgress], None], terminal: Terminal, stop: threading.Event
    ) -> TrainingProgress | None:
        """Train to the end and judge the head; return the last step, None for none.

        stop: ends the training after the current step. The best head and a checkpoint are then
        written, and KeyboardInterrupt is raised.
        """
        last, written = None, time.monotonic()
        for last in self.trainer.run():
            on_step(last)
            if stop.is_set():
                self._judge_at = 0.0
            if stop.is_set() or time.monotonic() - written >= EVERY_SECONDS:
                self.keep(terminal)
                written = time.monotonic()
            if stop.is_set():
                self.write()
                done = f"stopped after step {self.trainer.steps}"
                terminal.note(f"{done}: the best head so far is in {self.out}; --resume goes on")
                raise KeyboardInterrupt
        if last is not None:
            self.judged()
        return last

    def end(self, terminal: Terminal) -> None:
        """Write the best head and delete the checkpoint."""
        try:
            self.write()
        except StoreError as error:
            self.keep(terminal)
            raise StoreError(f"{error} --resume with the same options writes it again.") from error
        for name in (CHECKPOINT, PART):
            (self.out / name).unlink(missing_ok=True)

    def keep(self, terminal: Terminal) -> None:
        """Write a checkpoint; report a full disk and go on."""
        if time.monotonic() >= self._judge_at:  # judging may take a tenth of the time
            began = time.monotonic()
            self.judged()
            self._judge_at = time.monotonic() + 10.0 * (time.monotonic() - began)
        try:
            save_state(self.out, self.trainer.state() | {"best": self.best})
        except StoreError as error:
            terminal.note(str(error), "bold")

    def judged(self) -> None:
        """Remember the head's weights if it is the best so far."""
        score = self.judge()
        if self.best is None or not score <= self.best[0]:
            weights = {n: w.detach().clone() for n, w in self.trainer.head.state_dict().items()}
            self.best = score, weights

    def write(self) -> None:
        """Write the best head; raise StoreError where it cannot be written."""
        if self.best is not None:
            self.trainer.head.load_state_dict(self.best[1])
            self.trainer.head.eval().save(self.out)


def _readings(target: CausalTarget, texts: Sequence[Sequence[int]], length: int) -> list[StateRead]:
    """Return the target's states over the first texts that are long enough, one by one."""
    chunks = [text[:length] for text in texts[:_MOST_HELD_OUT] if len(text) >= SHORTEST]
    reader = StateReader(target, chunks)
    return [reader.read([number]) for number in range(len(chunks))]


def _split(texts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return held-out texts, none where there are few, and those to learn from."""
    texts = [text for text in texts if len(text) >= SHORTEST] or texts
    if len(texts) < _HOLD_OUT:
        return [], texts
    learned = [text for number, text in enumerate(texts) if number % _HOLD_OUT]
    return texts[::_HOLD_OUT][:_MOST_HELD_OUT], learned


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set; the second signal raises KeyboardInterrupt."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def end(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def check_out(out: Path, *, resume: bool = False) -> None:
    """Raise InputError where a folder holds anything but a head, or an interrupted training.

    resume: the training that was interrupted there goes on.
    """
    if (out / CHECKPOINT).is_file():
        if not resume:
            raise InputError(
                f"{out} holds a training that was left; expected --resume to go on with it, or "
                "another folder."
            )
        return
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; expected the name of a folder.")
    if not out.is_dir() or set(out.iterdir()) <= {out / PART}:  # of a kill in its first minute
        return
    config = out / CONFIG
    if not config.is_file() or KIND not in config.read_text(encoding="utf-8", errors="replace"):
        raise InputError(f"{out} holds other files; expected a new folder, or one with a head.")


def _texts(
    model: str, data: Path, terminal: Terminal, limit: int | None, device: str, dtype: str
) -> tuple[CausalTarget, list[list[int]]]:
    """Return a text model as a target, and documents as token ids."""
    if not data.exists():
        raise InputError(f"{data} is missing; check the path.")
    loaded, tokenizer = load_model(model, device, dtype)
    target = open_target(loaded)
    longest = target.max_length
    columns = TextColumns(skipped=lambda path, reason: terminal.note(f"not read: {path} {reason}"))
    texts: list[list[int]] = []
    left = limit
    with counting(terminal, "reading") as on_progress:
        for row in tokenized(read_texts([str(data)], columns), tokenizer, on_progress):
            text = [int(token) for token in (row if left is None else islice(row, left))]
            texts.append(text[:longest])
            left = None if left is None else left - len(text)
            if left is not None and left <= 0:
                break
    return target, texts


def _pictures(
    model: str, data: Path, seed: int, device: str, dtype: str
) -> tuple[CausalTarget, list[list[int]]]:
    """Return an image model as a target, and pictures as ids."""
    from ragspec.training.image_texts import code_texts, read_codes
    from ragspec.visual.pipeline.folder import find_folder, load_model

    codes, inputs = read_codes(data)
    loaded = load_model(find_folder(model).target, device, dtype)
    return code_texts(loaded, codes, inputs, torch.Generator().manual_seed(seed))


@contextmanager
def _progress(terminal: Terminal) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show the training's progress on a terminal; else print a line at every tenth of it."""
    tenths = -1

    def note(step: TrainingProgress) -> None:
        nonlocal tenths
        if int(10 * step.part) > tenths:
            tenths = int(10 * step.part)
            terminal.note(_line(step))

    if terminal.quiet or not terminal.err.is_terminal:
        yield note
        return
    with terminal.err.status("training", spinner="dots") as status:
        yield lambda step: status.update(_line(step))


def _line(step: TrainingProgress) -> str:
    """Return one line about a step, with the expected minutes to the end."""
    left = step.seconds * (1.0 - step.part) / step.part / 60
    ahead = f", about {left:.0f} min left" if step.step and left >= 1 else ""
    return (
        f"{step.part:.0%}, step {step.step + 1}: loss {step.loss:.3f}, best of its tokens right "
        f"in {step.agreement:.0%} of places, {step.seconds:.0f} s{ahead}"
    )
