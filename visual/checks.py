"""Numbers and classes as users give them, checked before any work is done."""

from __future__ import annotations

import re
from collections.abc import Sequence
from numbers import Real
from operator import index
from typing import Any

import torch

from ragspec.errors import InputError


def whole(value: Any) -> int | None:
    """Return what is a whole number by its type (of NumPy and torch too) as one, else None.

    A truth value is none, though Python counts with them.
    """
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return index(value)
    except TypeError:
        return None


def is_number(value: Any) -> bool:
    """Tell whether this is a real number by its type; truth values are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def class_number(inputs: int | str, names: Sequence[str], count: int) -> int:
    """Return the number of a class of a model; raises InputError for one that it has not."""
    if isinstance(inputs, str) and re.fullmatch(r"-?\d{1,18}", inputs.strip()):
        inputs = int(inputs)
    if isinstance(inputs, str):
        label = inputs.strip().lower()
        results = [number for number, name in enumerate(names) if name.lower() == label]
        results = results or [
            n for n, name in enumerate(names) if name.lower().endswith(f"/{label}")
        ]
        if len(results) == 1:
            return results[0]
        raise InputError(
            f"got the class {inputs!r}; expected one of {', '.join(names)}, or a number."
            if names
            else f"got the class {inputs!r}; this model has no names, expected 0 to {count - 1}."
        )
    number = whole(inputs)
    if number is None or not 0 <= number < count:
        raise InputError(
            f"got the class {inputs!r}; expected a whole number from 0 to {count - 1}."
        )
    return number


def checked_count(count: int, name: str) -> int:
    """Return a count; raises InputError for one below 1 or not whole."""
    number = whole(count)
    if number is None or number < 1:
        raise InputError(f"{name} is {count!r}; expected a whole number, at least 1.")
    return number
