"""Checks of numbers, class labels and images that users pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from math import isqrt
from numbers import Real
from typing import Any

import torch

from ragspec.errors import InputError
from ragspec.sampling.settings import whole


def is_number(value: Any) -> bool:
    """Return whether the value's type is a real number's; booleans do not count."""
    return isinstance(value, Real) and not isinstance(value, bool)


def class_number(inputs: int | str, names: Sequence[str], count: int) -> int:
    """Return the number of a class that is given by number or by name.

    Args:
        inputs: A number, also as text, or a name, of which the part after a slash may do.
        names: Of all `count` classes in order; empty if the model has none.

    Raises:
        InputError: No class, or more than one, has this name or number.
    """
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


def check_images(images: Any, channels: int, reduction: int) -> None:
    """Raise InputError unless images are floats [B, C, H, W] in [-1, 1], sides in whole codes.

    Args:
        channels: C.
        reduction: Pixels per code or latent along one side.
    """
    shape = list(getattr(images, "shape", ()))
    if (
        not isinstance(images, torch.Tensor)
        or not images.is_floating_point()
        or images.ndim != 4
        or shape[1] != channels
        or any(side % reduction or not side for side in shape[2:])
    ):
        raise InputError(
            f"got pictures of {getattr(images, 'dtype', type(images))} with shape {shape}; "
            f"expected a tensor of floats [B, {channels}, H, W] whose sides are multiples of "
            f"{reduction}. For a file or a Pillow image, call diffusers' VaeImageProcessor("
            f"vae_scale_factor={reduction}).preprocess(load_image(image)); load_image heeds EXIF."
        )
    # Resampling may exceed the range a little; bytes (0 .. 255) and NaN are mistakes.
    if images.numel() and not bool((images.abs() <= 1.01).all()):
        raise InputError(
            f"got pictures with values from {float(images.min()):g} to {float(images.max()):g}; "
            "expected [-1, 1]. Divide bytes by 127.5, subtract 1."
        )


def bounded(values: torch.Tensor, most: float = 1.0) -> torch.Tensor:
    """Return values cut to [-most, most]; infinite ones become NaN, which is an error later."""
    return values.clamp(-most, most) + 0.0 * values


def side_of(places: int) -> int | None:
    """Return the side of a square of this many places; None if they form no square."""
    side = isqrt(places)
    return side if side and side * side == places else None


def check_settings(rule: str, settings: Iterable[str], allowed: Set[str]) -> None:
    """Raise InputError if the settings of a rule, by name, are not all among those allowed."""
    foreign = sorted(set(settings) - allowed)
    if foreign:
        raise InputError(
            f"rule {rule!r} has no {', '.join(foreign)}; it takes "
            f"{', '.join(sorted(allowed)) or 'no settings'}."
        )
