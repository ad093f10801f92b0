"""What a call of the image pipeline may ask for, checked before any work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragspec.errors import InputError

TENSORS = ("codes",)  # what a callback may ask for


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
