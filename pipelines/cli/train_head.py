"""The options of `ragspec train-head`: a feature head that drafts for one model."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console import options as o
from ragspec.pipelines.console.terminal import Terminal


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

    It is written every minute; Ctrl-C keeps the best head so far, and --resume goes on.
    """
    from ragspec.pipelines.cli.store import count_of
    from ragspec.pipelines.cli.train_head_run import make_head
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
    result = make_head(
        *(model, data, out, settings, terminal),
        limit=limit,
        device=device,
        dtype=dtype,
        start=start,
        resume=resume,
    )
    if json:
        terminal.json(result)
        return
    terminal.line(
        f"{out}: {result['parameters']:,} weights after {result['steps']} steps in "
        f"{result['seconds']:.0f} s; on texts kept apart the head's best token is the model's in "
        f"{result['agreement']:.0%} of places"
    )


def _check_positive(inputs: float | None, option: str) -> None:
    """Raise InputError for a number that is none, or not above 0."""
    if inputs is not None and not (isfinite(inputs) and inputs > 0.0):
        raise InputError(f"{option} is {inputs:g}; expected a number above 0, or leave it out.")
