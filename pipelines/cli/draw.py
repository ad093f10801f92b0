"""`ragspec draw`: images from a prompt or a class, with or without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ragspec.errors import InputError
from ragspec.pipelines.console import options as o

NUMBERS = {"neighbours": int, "partition": int, "s": int, "steps": int, "iterations": int}


def draw(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts to draw, such as 'red heart'.")
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", "-c", help="Class to draw by number or name; repeatable."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Folder of a pipeline, or a bundled set: emoji, latent-emoji (prompts), tiles, "
            "latent-tiles, masked-tiles (classes). Default: emoji for prompts, tiles for classes.",
        ),
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(help="Image family by name, default: what the folder holds; else see docs."),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Acceptance rule: exact, lantern, lantern++, gsd, rejection; of latents near, "
            "aligned, horizon, path, cspd-paper. Default: exact, of latents aligned."
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            "-s",
            help="NAME=NUMBER of the rule (delta, lam, neighbours, tv_budget, least_gain, r, s) or "
            "of denoising (steps, floor, iterations); repeatable.",
        ),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(help="auto, starter, head, jacobi, a folder, several joined by +, or none."),
    ] = "auto",
    budget: o.BudgetOption = "12",
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Images of each prompt or class.")] = 1,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Random seed. Chosen at random and printed if omitted."),
    ] = None,
    guidance: Annotated[
        float, typer.Option(min=0.0, help="Scale of classifier-free guidance; 1 for none.")
    ] = 2.0,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Temperature; 0 takes the likeliest code.")
    ] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for the images, default: images.", file_okay=False
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also draw without speculation; compare time and images."),
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write figures to this file.", dir_okay=False)
    ] = None,
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
) -> None:
    """Draw images from a prompt or a class, with or without speculation."""
    from ragspec.pipelines.cli.draw_run import DrawOptions, draw_images
    from ragspec.pipelines.console.terminal import Terminal

    options = DrawOptions(
        prompts=tuple(o.checked_text(each) for each in prompt or ()),
        classes=tuple(classes or ()),
        model=model or ("tiles" if classes else "emoji"),
        family=family,
        rule=rule,
        settings=parse_settings(setting or ()),
        drafter=() if drafter == "none" else tuple(drafter.split("+")),
        budget=o.parse_budget(budget),
        count=n,
        seed=seed,
        guidance=guidance,
        temperature=temperature,
        device=device,
        dtype=dtype,
    )
    draw_images(options, out or Path("images"), json, compare, Terminal())


def parse_settings(texts: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of NAME=NUMBER texts by name.

    Raises:
        InputError: A text has another form.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_").replace("lambda", "lam")
        try:
            settings[name] = NUMBERS.get(name, float)(value)
        except ValueError as error:
            kind = "whole number" if NUMBERS.get(name) is int else "number"
            raise InputError(
                f"Expected --setting NAME=NUMBER, got {text!r}. Give a {kind}, such as delta=0.3."
            ) from error
    return settings
