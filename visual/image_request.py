"""What a call of the image pipeline may ask for, checked before any work is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from numbers import Real
from operator import index
from typing import Any

import torch

from ragspec.errors import InputError

TENSORS = ("codes",)  # what a callback may ask for


def whole(given: Any) -> int | None:
    """Return what is a whole number by its type (of NumPy and torch too) as one, else None.

    A truth value is none, though Python counts with them.
    """
    if isinstance(given, bool) or getattr(given, "dtype", None) == torch.bool:
        return None
    try:
        return index(given)
    except TypeError:
        return None


def is_number(given: Any) -> bool:
    """Tell whether this is a real number by its type; truth values are none."""
    return isinstance(given, Real) and not isinstance(given, bool)


def class_number(given: int | str, names: Sequence[str], count: int) -> int:
    """Return the number of a class of a model; raises InputError for one that it has not."""
    if isinstance(given, str) and re.fullmatch(r"-?\d{1,18}", given.strip()):
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
    number = whole(given)
    if number is None or not 0 <= number < count:
        raise InputError(f"got the class {given!r}; expected a whole number from 0 to {count - 1}.")
    return number


def checked_count(count: int, name: str) -> int:
    """Return a count; raises InputError for one below 1 or not whole."""
    number = whole(count)
    if number is None or number < 1:
        raise InputError(f"{name} is {count!r}; expected a whole number, at least 1.")
    return number


def seeds_of(
    generator: torch.Generator | Sequence[torch.Generator] | None, count: int
) -> list[int]:
    """Return a seed for each image, drawn from the generator, or from one an image.

    None is torch's global generator. The seeds of the first images do not depend on how many
    follow. Raises InputError for a wrong number of generators, or for something else.
    """
    given: Any = torch.default_generator if generator is None else generator
    generators = [given] * count if _is_one(given) else [*given]
    if not all(isinstance(each, torch.Generator) for each in generators):
        raise InputError(
            f"got generator={generator!r}; expected a torch.Generator, or a list of them. Pass "
            "torch.Generator().manual_seed(0) for the seed 0."
        )
    if len(generators) != count:
        raise InputError(
            f"got {len(generators)} generators for {count} images; expected one, or one an image."
        )
    return [
        int(torch.randint(1 << 62, (1,), generator=each, device=each.device)) for each in generators
    ]


def some(given: Any) -> list[Any]:
    """Return what there is to draw, one thing as a list of one; raises InputError for nothing."""
    many = [given] if _is_one(given) else list(given)
    if not many:
        raise InputError("got an empty list; expected at least one prompt or class to draw.")
    return many


def _is_one(given: Any) -> bool:
    """Tell one thing from a list of them; arrays of no dimension have an __iter__ that raises."""
    if isinstance(given, str) or getattr(given, "ndim", None) == 0:
        return True
    return not hasattr(given, "__iter__")


def checked_features(given: Any) -> torch.Tensor:
    """Return features in place of prompts; raises InputError for what is no tensor, or empty."""
    if isinstance(given, torch.Tensor) and given.numel():
        return given
    told = f"of shape {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given)
    raise InputError(
        f"got prompt_embeds {told}; expected a torch tensor of floats [R, L, d], R at least 1. "
        "torch.from_numpy and torch.stack make one of arrays and lists."
    )


def checked_texts(texts: list[Any]) -> list[str]:
    """Return the prompts; raises InputError for one that is empty or no text."""
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                f"got the prompt {text!r}; expected a few words such as 'red heart', not nothing."
            )
    return texts


def checked_callback(
    callback: Callable[..., Any] | None, names: Sequence[str] | None
) -> Callable[..., Any] | None:
    """Return the callback as it is told of these tensors alone, or None where there is none.

    names: of `TENSORS`; None for all. Raises InputError for others.
    """
    given = [names] if isinstance(names, str) else list(TENSORS if names is None else names)
    foreign = [name for name in given if name not in TENSORS]
    if foreign or isinstance(names, str):
        raise InputError(
            f"got callback_on_step_end_tensor_inputs={names!r}; expected a list of what there is: "
            f"{list(TENSORS)}."
        )
    if callback is None:
        return None

    def told(pipeline: Any, step: int, codes: int, tensors: dict[str, torch.Tensor]) -> Any:
        return callback(pipeline, step, codes, {name: tensors[name] for name in given})

    return told
