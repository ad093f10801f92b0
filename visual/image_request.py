"""What a call of the image pipeline may ask for, checked before any work is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ragspec.errors import InputError
from ragspec.noise import fresh_seed


def class_number(given: int | str, names: Sequence[str], count: int) -> int:
    """Return the number of a class of a model; raises InputError for one that it has not."""
    if isinstance(given, str) and given.strip().lstrip("-").isdecimal():
        given = int(given)
    if isinstance(given, str):
        wanted = given.strip().lower()
        found = [number for number, name in enumerate(names) if name.lower() == wanted]
        found = found or [n for n, name in enumerate(names) if name.lower().endswith(f"/{wanted}")]
        if len(found) == 1:
            return found[0]
        raise InputError(
            f"got the class {given!r}; expected one of {', '.join(names)}, or a number."
            if names
            else f"got the class {given!r}; this model has no names, expected 0 to {count - 1}."
        )
    if not 0 <= int(given) < count:
        raise InputError(f"got the class {given}; expected a number from 0 to {count - 1}.")
    return int(given)


def checked_count(count: int, name: str) -> int:
    """Return a count of images; raises InputError for one below 1."""
    if not isinstance(count, int) or count < 1:
        raise InputError(f"{name} is {count!r}; expected a whole number, at least 1.")
    return count


def seeds_of(
    generator: torch.Generator | Sequence[torch.Generator] | None, count: int
) -> list[int]:
    """Return a seed for each image, drawn from the generator, or from one an image.

    The seeds of the first images do not depend on how many follow. Raises InputError for a wrong
    number of generators.
    """
    if generator is None:
        return [fresh_seed() for _ in range(count)]
    generators = [generator] * count if isinstance(generator, torch.Generator) else [*generator]
    if len(generators) != count:
        raise InputError(
            f"got {len(generators)} generators for {count} images; expected one, or one an image."
        )
    return [
        int(torch.randint(1 << 62, (1,), generator=each, device=each.device)) for each in generators
    ]


def some(given: list[Any]) -> list[Any]:
    """Return what there is to draw; raises InputError for nothing."""
    if not given:
        raise InputError("got an empty list; expected at least one prompt or class to draw.")
    return given


def checked_texts(texts: list[Any]) -> list[str]:
    """Return the prompts; raises InputError for one that is empty or no text."""
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                f"got the prompt {text!r}; expected a few words such as 'red heart', not nothing."
            )
    return texts
