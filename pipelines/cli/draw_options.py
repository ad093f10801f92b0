"""The options of `ragspec draw`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ragspec.errors import InputError, UnknownNameError
from ragspec.pipelines.console import checks
from ragspec.pipelines.console import options as o
from ragspec.registry import names, unknown
from ragspec.visual.loading import find_folder

NUMBERS = {"neighbours": int, "partition": int, "s": int, "steps": int, "iterations": int}
PLACE = ("device", "dtype")
DRAFTERS = ("auto", "jacobi", "model", "head")
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """The prompts or classes to draw, and the settings; checked before any model is loaded."""

    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompts to draw, such as 'red heart'.")
    ] = None
    classes: Annotated[
        list[str] | None,
        typer.Option("--class", "-c", help="Class to draw by number or name; repeatable."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="Folder of a pipeline, or a bundled set: emoji, latent-emoji (prompts), tiles, "
            "latent-tiles, masked-tiles (classes). Default: emoji for prompts, tiles for classes.",
        ),
    ] = None
    family: Annotated[
        str | None,
        typer.Option(help="Image family by name, default: what the folder holds; else see docs."),
    ] = None
    rule: Annotated[
        str | None,
        typer.Option(
            help="Acceptance rule: exact, lantern, lantern++, gsd, rejection; of latents near, "
            "aligned, horizon, path. Default: exact, of latents aligned."
        ),
    ] = None
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            metavar="NAME=VALUE",
            help="A setting of the rule (delta, lam, neighbours, tv_budget, least_gain, r, s), of "
            "denoising (steps, floor, iterations), device or dtype; repeatable.",
        ),
    ] = None
    drafter: Annotated[
        str, typer.Option(help="auto, jacobi, model, head, a folder, several joined by +, or none.")
    ] = "auto"
    budget: Annotated[
        str | None,
        typer.Option(help="Draft nodes per step: auto, or a number. Default: 12, of masked 4."),
    ] = None
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Images of each prompt or class.")] = 1
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Random seed. Chosen at random and printed if omitted."),
    ] = None
    guidance: Annotated[
        float | None,
        typer.Option(min=0.0, help="Guidance scale, 1 for none. Default: the family's, mostly 2."),
    ] = None
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0, help="Temperature; 0: the best code.")
    ] = 1.0

    def __post_init__(self) -> None:
        for text in self.prompts:
            if not checks.checked_text(text):
                raise InputError("Expected a prompt of some words, got the prompt ''.")
        _ = self.settings
        alone = self.family == "imagegpt" and not self.prompts  # which draws without conditions
        if bool(self.prompts) == bool(self.labels) and not alone:
            got = "both" if self.prompts else "neither"
            raise InputError(
                f"Expected a prompt or --class, got {got}. Give a prompt such as 'red heart', or "
                "--class 3."
            )
        if self.seed is not None and not LEAST_SEED <= self.seed <= MOST_SEED:
            raise InputError(
                f"Expected --seed of 64 bits, {LEAST_SEED} to {MOST_SEED}, got {self.seed}."
            )
        if {"", "none"} & set(self.drafters):
            raise InputError(
                f"Expected --drafter auto, jacobi, model, head or a folder, several joined by +, "
                f"or none by itself, got {self.drafter!r}."
            )
        if self.budget is not None:
            checks.check_budget(self.budget)
        self._check_names()
        find_folder(self.source)

    def _check_names(self) -> None:
        """Raise UnknownNameError for a rule, family or drafter that nothing has."""
        if self.rule is not None:
            checks.check_rule("rule", self.rule)
        if self.family is not None and self.family not in names("family"):
            raise UnknownNameError(unknown("family", self.family, names("family")))
        for name in self.drafters:
            if name not in DRAFTERS and not Path(name).expanduser().exists():
                raise UnknownNameError(unknown("image drafter", name, (*DRAFTERS, "none")))

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts."""
        return tuple(self.prompt or ())

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, by number or name."""
        return tuple(self.classes or ())

    @property
    def subjects(self) -> list[str]:
        """The prompts, or the classes in words."""
        if self.prompts:
            return list(self.prompts)
        if not self.labels:
            return ["image"]
        return [f"class {name}" if name.strip().isdecimal() else name for name in self.labels]

    @property
    def source(self) -> str:
        """The folder or bundled set of the model."""
        return self.model or ("tiles" if self.classes else "emoji")

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names or folders of drafters; empty draws plainly."""
        return () if self.drafter == "none" else tuple(self.drafter.split("+"))

    @property
    def nodes(self) -> int | str | None:
        """The budget of draft nodes; None for the family's."""
        return None if self.budget is None else o.number_or_name(self.budget)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of rule and denoising by name."""
        every = parse_settings(self.setting or ())
        return {name: value for name, value in every.items() if name not in PLACE}

    @property
    def place(self) -> o.PlaceOptions:
        """The device and the data type."""
        every = parse_settings(self.setting or ())
        return o.PlaceOptions(**{name: every[name] for name in PLACE if name in every})

    def arguments(self) -> dict[str, Any]:
        """Return a pipeline's call arguments."""
        name, every = ("prompt", self.prompts) if self.prompts else ("class_labels", self.labels)
        return {
            name: list(every) or None,
            "guidance_scale": self.guidance,
            "temperature": self.temperature,
            "num_images_per_prompt": self.n,
        }


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings of NAME=VALUE texts by name.

    Raises:
        InputError: A text has another form.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_").replace("lambda", "lam")
        if name in PLACE and value:
            settings[name] = value
            continue
        try:
            settings[name] = NUMBERS.get(name, float)(value)
        except ValueError as error:
            kind = "whole number" if NUMBERS.get(name) is int else "number"
            raise InputError(
                f"Expected --set NAME=VALUE, got {text!r}. Give a {kind}, such as delta=0.3."
            ) from error
    return settings
