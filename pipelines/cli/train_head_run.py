"""What `ragspec train-head` does once its options are read."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError, StoreError
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragspec.drafters.eagle.head import FeatureHead
    from ragspec.drafters.eagle.states import Reading
    from ragspec.drafters.eagle.training import HeadTrainer, HeadTraining, Progress
    from ragspec.target.causal import CausalTarget

PICTURES = ".npz"
_APART = 20  # one text in so many is kept apart, to see how good the head is
_MOST_APART = 32
EVERY_SECONDS = 60.0  # between two times that the training is written


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

    limit: about how many tokens are read at most. Pictures are never cut, whatever
    `settings.length` says. start: the head to begin with. resume: go on with the training that was
    left in `out`. The head that is written is the best on texts kept apart, also where Ctrl-C or
    SIGTERM ends the training, of which at most a minute is lost. Raises InputError, DocumentError,
    ModelError, StoreError, KeyboardInterrupt.
    """
    from ragspec.drafters.eagle.checkpoint import load_state
    from ragspec.drafters.eagle.head import FeatureHead
    from ragspec.drafters.eagle.training import HeadTrainer
    from ragspec.pipelines.console.options import be_quiet

    be_quiet()
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
    apart, learned = _kept_apart(texts)
    began = time.perf_counter()
    head = None if start is None else FeatureHead.load(start).to(target.device)
    trainer = HeadTrainer(target, learned, settings, head=head)
    judge = Judge(target, apart, settings.length)
    course = Course(trainer, out, lambda: judge.agreement(trainer.head))
    course.prepare(state, terminal)
    with _telling(terminal) as told, _stopping() as stop:
        last = course.run(told, terminal, stop)
    if last is None:
        terminal.note("the training had come to its end; more --steps or --minutes go on with it")
    course.end(terminal)
    judge = judge if apart else Judge(target, learned, settings.length)
    return {
        "out": str(out),
        "texts": len(texts),
        "tokens": sum(len(text) for text in texts),
        "steps": trainer.steps,
        "seconds": round(time.perf_counter() - began, 2),
        "loss": None if last is None else round(last.loss, 4),
        "agreement": round(judge.agreement(trainer.head), 4),
        "kept_apart": len(apart),
        "parameters": sum(weight.numel() for weight in trainer.head.parameters()),
    }


class Judge:
    """How good heads are on some texts, of which the target's states are read but once.

    texts: of these the first 32 that are long enough. length: that they are cut to.
    """

    def __init__(self, target: CausalTarget, texts: Sequence[Sequence[int]], length: int) -> None:
        from ragspec.drafters.eagle.batches import SHORTEST
        from ragspec.drafters.eagle.states import StateReader

        pieces = [text[:length] for text in texts[:_MOST_APART] if len(text) >= SHORTEST]
        self.target, self._reader = target, StateReader(target, pieces)
        self._read: list[Reading] = []

    def agreement(self, head: FeatureHead) -> float:
        """Return how often the best tokens of head and target agree, by text; nan without texts."""
        from ragspec.drafters.eagle.loss import agreement

        if not self._read:
            self._read = [self._reader.read([n]) for n in range(len(self._reader.pieces))]
        return agreement(head, self.target, self._read)


class Course:
    """A training on its way: judged and written every minute, so that the best head is kept.

    judge: how good the head is, on texts that it does not learn from; nan where there are none,
    and then the last head counts.
    """

    def __init__(self, trainer: HeadTrainer, out: Path, judge: Callable[[], float]) -> None:
        self.trainer, self.out, self.judge = trainer, out, judge
        self.best: tuple[float, dict[str, Any]] | None = None
        self._due = 0.0  # when the head is to be judged again

    def prepare(self, state: dict[str, Any] | None, terminal: Terminal) -> None:
        """Make room for what is kept meanwhile, and take up a training that was left, if any."""
        if state is not None:
            self.trainer.go_on(state)
            if (best := state.get("best")) is not None:
                self.best = float(best[0]), best[1]
            terminal.note(f"going on after step {self.trainer.steps}")
        try:  # only now, as the states of another training would be deleted
            self.trainer.keep_states(self.out)
        except StoreError as error:
            terminal.note(str(error), "bold")

    def run(
        self, told: Callable[[Progress], None], terminal: Terminal, stop: threading.Event
    ) -> Progress | None:
        """Train to the end and write the best head; return the last step, None for none.

        stop: set when the training is to end after the step under way; then the best head and where
        to go on are written, and KeyboardInterrupt is raised.
        """
        last, written = None, time.monotonic()
        for last in self.trainer.run():
            told(last)
            if stop.is_set():
                self._due = 0.0
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
        """Write the best head, and delete all else that the training left."""
        from ragspec.drafters.eagle.checkpoint import clear_state
        from ragspec.drafters.eagle.states import drop_states

        drop_states(self.out)  # the head may need their room
        try:
            self.write()
        except StoreError as error:
            self.keep(terminal)
            raise StoreError(f"{error} --resume with the same options writes it again.") from error
        clear_state(self.out)

    def keep(self, terminal: Terminal) -> None:
        """Write where to go on; a full disk is said, and the training goes on."""
        from ragspec.drafters.eagle.checkpoint import save_state

        if time.monotonic() >= self._due:  # judging may take a tenth of the time
            began = time.monotonic()
            self.judged()
            self._due = time.monotonic() + 10.0 * (time.monotonic() - began)
        try:
            save_state(self.out, self.trainer.state() | {"best": self.best})
        except StoreError as error:
            terminal.note(str(error), "bold")

    def judged(self) -> None:
        """Keep the head's weights if it is the best so far."""
        found = self.judge()
        if self.best is None or not found <= self.best[0]:
            weights = {n: w.detach().clone() for n, w in self.trainer.head.state_dict().items()}
            self.best = found, weights

    def write(self) -> None:
        """Write the best head; raises StoreError where it cannot be."""
        if self.best is None:
            return
        self.trainer.head.load_state_dict(self.best[1])
        self.trainer.head.eval().save(self.out)


def _kept_apart(texts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return texts by which heads are judged, none where there are few, and those to learn from."""
    from ragspec.drafters.eagle.batches import SHORTEST

    texts = [text for text in texts if len(text) >= SHORTEST] or texts
    if len(texts) < _APART:
        return [], texts
    learned = [text for number, text in enumerate(texts) if number % _APART]
    return texts[::_APART][:_MOST_APART], learned


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Yield what Ctrl-C and SIGTERM set, so that no step is left half done; a second one raises."""
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
    """Raise InputError where a folder holds something else than a head.

    resume: a training that was left there is to be gone on with; without it that is refused too.
    """
    from ragspec.drafters.eagle.checkpoint import CHECKPOINT, PART
    from ragspec.drafters.eagle.head import CONFIG, KIND
    from ragspec.drafters.eagle.states import KEPT

    if (out / CHECKPOINT).is_file():
        if not resume:
            raise InputError(
                f"{out} holds a training that was left; expected --resume to go on with it, or "
                "another folder."
            )
        return

    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; expected the name of a folder.")
    left = {*out.glob(KEPT), out / PART}  # by a kill in its first minute
    if not out.is_dir() or set(out.iterdir()) <= left:
        return
    config = out / CONFIG
    if not config.is_file() or KIND not in config.read_text(encoding="utf-8", errors="replace"):
        raise InputError(f"{out} holds other files; expected a new folder, or one with a head.")


def _texts(
    model: str, data: Path, terminal: Terminal, limit: int | None, device: str, dtype: str
) -> tuple[CausalTarget, list[list[int]]]:
    """Return a text model as a target, and documents as token ids."""
    from ragspec.models.load import load_model
    from ragspec.pipelines.cli.store_run import counting
    from ragspec.pipelines.console.texts import Wanted, read_texts
    from ragspec.retrievers.corpus.text import tokenized
    from ragspec.target.open import open_target

    if not data.exists():
        raise InputError(f"{data} is missing; check the path.")
    loaded, tokenizer = load_model(model, device, dtype)
    target = open_target(loaded)
    longest = target.max_length
    wanted = Wanted(skipped=lambda path, reason: terminal.note(f"not read: {path} {reason}"))
    texts: list[list[int]] = []
    left = limit
    with counting(terminal, "reading") as told:
        for row in tokenized(read_texts([str(data)], wanted), tokenizer, told):
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
    import torch

    from ragspec.visual.drafting.head_texts import code_texts, read_codes
    from ragspec.visual.pipeline.folder import find_folder, load_model

    codes, given = read_codes(data)
    loaded = load_model(find_folder(model).target, device, dtype)
    return code_texts(loaded, codes, given, torch.Generator().manual_seed(seed))


@contextmanager
def _telling(terminal: Terminal) -> Iterator[Callable[[Progress], None]]:
    """Show the training on its way, on a terminal; else a line at every tenth of it."""
    told = -1

    def tell(seen: Progress) -> None:
        nonlocal told
        if int(10 * seen.part) > told:
            told = int(10 * seen.part)
            terminal.note(_told(seen))

    if terminal.quiet or not terminal.err.is_terminal:
        yield tell
        return
    with terminal.err.status("training", spinner="dots") as status:
        yield lambda seen: status.update(_told(seen))


def _told(seen: Progress) -> str:
    """Say how far a training is, and about how long it takes to its end."""
    left = seen.seconds * (1.0 - seen.part) / seen.part / 60
    ahead = f", about {left:.0f} min left" if seen.step and left >= 1 else ""
    return (
        f"{seen.part:.0%}, step {seen.step + 1}: loss {seen.loss:.3f}, best of its tokens right "
        f"in {seen.agreement:.0%} of places, {seen.seconds:.0f} s{ahead}"
    )
