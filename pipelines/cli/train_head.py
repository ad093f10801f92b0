"""`ragspec train-head`: a feature head that drafts for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragspec.errors import InputError
from ragspec.pipelines.cli.store import count_of
from ragspec.pipelines.cli.store_run import at_most, counting
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.console.texts import TextColumns, read_texts

if TYPE_CHECKING:
    from ragspec.training.trainer import HeadTraining, TrainingProgress
    from ragspec.verification.causal import CausalTarget


def train_head(
    data: Annotated[
        Path,
        typer.Option(
            help="Texts to learn from: a folder, documents, jsonl or parquet; for an image model "
            "a .npz with codes and labels or features."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder that the head goes to.")],
    model: o.ModelOption = "starter",
    steps: Annotated[int, typer.Option(min=1, help="Most steps of the optimizer.")] = 2000,
    minutes: Annotated[float | None, typer.Option(help="End the training after so long.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Texts of a step.")] = 8,
    length: Annotated[
        int, typer.Option(min=4, help="Tokens that texts are cut to; pictures stay whole.")
    ] = 256,
    rate: Annotated[
        float | None, typer.Option(help="Learning rate at its height; by the width without it.")
    ] = None,
    depth: Annotated[
        int, typer.Option(min=1, help="Rounds in which the head learns from its own guesses.")
    ] = 1,
    vocabulary: Annotated[
        int | None,
        typer.Option(min=1, help="Draft only so many tokens, the most frequent; all without it."),
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(help="Read about so many tokens at most: 500k, 10M.")
    ] = None,
    seed: Annotated[int, typer.Option(help="With --steps alone the head follows from it.")] = 0,
    start: Annotated[
        Path | None, typer.Option(help="Begin with this trained head, to learn from other texts.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the training that was left in --out.")
    ] = False,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    json: o.JsonOption = False,
) -> None:
    """Train a feature head (EAGLE) that drafts from a model's own hidden states.

    The head is written every minute. Ctrl-C keeps the best head so far, and --resume continues.
    """
    from ragspec.training.trainer import HeadTraining

    _check_positive(minutes, "--minutes")
    _check_positive(rate, "--rate")
    settings = HeadTraining(
        steps=steps,
        seconds=None if minutes is None else 60.0 * minutes,
        batch_size=batch,
        length=length,
        learning_rate=rate,
        depth=depth,
        draft_vocab_size=vocabulary,
        seed=seed,
    )
    terminal = Terminal(quiet=json)
    limit = None if max_tokens is None else count_of(max_tokens, "--max-tokens")
    summary = train_from_files(
        *(model, data, out, settings, terminal),
        limit=limit,
        device=device,
        dtype=dtype,
        start=start,
        resume=resume,
    )
    if json:
        terminal.json(summary)
        return
    terminal.line(
        f"{out}: {summary['parameters']:,} weights after {summary['steps']} steps in "
        f"{summary['seconds']:.0f} s; on held-out texts the head's best token is the model's in "
        f"{summary['agreement']:.0%} of places"
    )


def _check_positive(number: float | None, option: str) -> None:
    """Raise InputError unless a number is finite and above 0."""
    if number is not None and not (isfinite(number) and number > 0.0):
        raise InputError(f"{option} is {number:g}; expected a number above 0, or leave it out.")


def train_from_files(
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
    """Load a model and texts or pictures, and train a head; see `train_head`.

    Args:
        limit: About the most tokens to read; pictures are never cut.

    Raises:
        InputError, DocumentError, ModelError, StoreError: An argument or a file does not fit.
        KeyboardInterrupt: The training was stopped; the best head so far is written.
    """
    from ragspec.training.run import check_out, load_pictures, train_head

    o.silence_transformers()
    check_out(out, resume=resume)
    if data.suffix == ".npz":
        if settings.draft_vocab_size is not None:
            raise InputError("got --vocabulary for pictures; expected texts. Leave it out.")
        target, texts = load_pictures(model, data, settings.seed, device, dtype)
        # A piece of a picture without its condition would teach the head nonsense.
        settings = replace(settings, length=max(settings.length, *map(len, texts)))
    else:
        target, texts = _load_texts(model, data, terminal, limit, device, dtype)
    with _progress(terminal) as on_step:
        return train_head(
            *(target, texts, out, settings),
            notify=terminal.note,
            on_step=on_step,
            start=start,
            resume=resume,
        )


def _load_texts(
    model: str, data: Path, terminal: Terminal, limit: int | None, device: str, dtype: str
) -> tuple[CausalTarget, list[list[int]]]:
    """Return a text model as a target, and documents as token ids."""
    from ragspec.models.load import load_model
    from ragspec.retrievers.corpus.catalogue import tokenized
    from ragspec.verification.open import open_target

    if not data.exists():
        raise InputError(f"{data} is missing; check the path.")
    loaded, tokenizer = load_model(model, device, dtype)
    target = open_target(loaded)
    columns = TextColumns(skipped=terminal.note_skipped)
    with counting(terminal, "reading") as on_progress:
        rows: Iterator[Any] = tokenized(read_texts([str(data)], columns), tokenizer, on_progress)
        if limit is not None:
            rows = at_most(rows, limit)
        return target, [row[: target.max_length].tolist() for row in rows]


@contextmanager
def _progress(terminal: Terminal) -> Iterator[Callable[[TrainingProgress], None]]:
    """Show the progress of training on a terminal, elsewhere as a line at every tenth of it."""
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
    """Return one line about a step, with the estimated minutes to the end."""
    left = step.seconds * (1.0 - step.part) / step.part / 60
    ahead = f", about {left:.0f} min left" if step.step and left >= 1 else ""
    return (
        f"{step.part:.0%}, step {step.step + 1}: loss {step.loss:.3f}, best of its tokens right "
        f"in {step.agreement:.0%} of places, {step.seconds:.0f} s{ahead}"
    )
