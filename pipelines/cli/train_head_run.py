"""What `ragspec train-head` does once its options are read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.console.terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ragspec.drafters.eagle.training import HeadTraining, Progress
    from ragspec.target.causal import CausalTarget

PICTURES = ".npz"
_APART = 20  # one text in so many is kept apart, to see how good the head is
_MOST_APART = 32


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
) -> dict[str, Any]:
    """Train a head for a model on texts or pictures, write it, and return what it came to.

    limit: about how many tokens are read at most. Pictures are never cut, whatever
    `settings.length` says. Raises InputError, DocumentError, ModelError.
    """
    from ragspec.drafters.eagle.training import train_head
    from ragspec.pipelines.console.options import be_quiet

    be_quiet()
    check_out(out)
    if data.suffix == PICTURES:
        target, texts = _pictures(model, data, settings.seed, device, dtype)
        # A piece of a picture without its condition would teach the head nonsense.
        settings = replace(settings, length=max(settings.length, *map(len, texts)))
    else:
        target, texts = _texts(model, data, terminal, limit, device, dtype)
    if target.max_length is not None:
        texts = [text[: target.max_length] for text in texts]
    apart = texts[::_APART][:_MOST_APART] if len(texts) >= _APART else []
    learned = [text for number, text in enumerate(texts) if number % _APART] if apart else texts
    began, seen = time.perf_counter(), list[Any]()
    with _telling(terminal, settings.steps) as told:

        def tell(progress: Progress) -> None:
            seen.append(progress)
            told(progress)

        head = train_head(target, learned, settings, on_step=tell)
    if not seen:
        raise InputError(
            f"the training was to end after {settings.seconds:g} s, which was before its first "
            "step; nothing was written. Expected longer: give more --minutes."
        )
    head.save(out)
    return {
        "out": str(out),
        "texts": len(texts),
        "tokens": sum(len(text) for text in texts),
        "steps": len(seen),
        "seconds": round(time.perf_counter() - began, 2),
        "loss": round(seen[-1].loss, 4),
        "agreement": round(_agreement(head, target, apart or learned, settings), 4),
        "kept_apart": len(apart),
        "parameters": sum(weight.numel() for weight in head.parameters()),
    }


def check_out(out: Path) -> None:
    """Raise InputError where a folder holds something else than a head."""
    from ragspec.drafters.eagle.head import CONFIG, KIND

    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; expected the name of a folder.")
    if not out.is_dir() or not any(out.iterdir()):
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
    from ragspec.pipelines.cli.store_texts import Wanted, read_texts
    from ragspec.retrievers.corpus.text import tokenized
    from ragspec.target.open import open_target

    if not data.exists():
        raise InputError(f"{data} is missing; check the path.")
    loaded, tokenizer = load_model(model, device, dtype)
    target = open_target(loaded)
    wanted = Wanted(skipped=lambda path, reason: terminal.note(f"not read: {path} {reason}"))
    texts: list[list[int]] = []
    left = limit
    with counting(terminal, "reading") as told:
        for row in tokenized(read_texts([str(data)], wanted), tokenizer, told):
            text = [int(token) for token in (row if left is None else islice(row, left))]
            texts.append(text)
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


def _agreement(
    head: Any, target: CausalTarget, texts: Sequence[Sequence[int]], settings: HeadTraining
) -> float:
    """Return how often the best tokens of head and target agree on texts, by text."""
    import torch

    from ragspec.drafters.eagle.training import SHORTEST, head_loss, read_states

    quiet, found = replace(settings, noise=0.0), list[float]()
    for text in texts[:_MOST_APART]:
        if len(text) >= SHORTEST:
            embedded, states = read_states(target, [text[: settings.length]])
            with torch.no_grad():
                found.append(head_loss(head, target, embedded, states, quiet, torch.Generator())[1])
    return sum(found) / max(len(found), 1)


@contextmanager
def _telling(terminal: Terminal, steps: int) -> Iterator[Callable[[Progress], None]]:
    """Show the training on its way, on a terminal; else a line now and then."""

    def due(seen: Progress, every: int) -> bool:
        done = seen.step + 1
        return done % every == 0 or done in (1, steps)

    if terminal.quiet or not terminal.err.is_terminal:
        every = max(1, steps // 10)
        yield lambda seen: terminal.note(_told(seen)) if due(seen, every) else None
        return
    with terminal.err.status("training", spinner="dots") as status:
        yield lambda seen: status.update(_told(seen)) if due(seen, 10) else None


def _told(seen: Progress) -> str:
    return (
        f"step {seen.step + 1}: loss {seen.loss:.3f}, best token right in {seen.agreement:.0%} of "
        f"places, {seen.seconds:.0f} s"
    )
