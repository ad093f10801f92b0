"""What a call of the image pipeline may ask for, checked before any work is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.visual.models.raster import Raster

TENSORS = ("codes",)  # what a callback may ask for
OUTPUTS = ("pil", "np", "pt", "latent")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How a target draws: guidance, the grid of codes, and the codes that are given."""

    guidance_scale: float
    guidance_interval: tuple[int, int] | None
    raster: Raster
    fixed: Tensor | None = None


def check_output_type(output_type: Any) -> None:
    """Raise InputError for an output_type that is none of `OUTPUTS`."""
    if output_type not in OUTPUTS:
        raise InputError(f"got output_type {output_type!r}; expected one of {', '.join(OUTPUTS)}.")


def seeds_of(
    generator: torch.Generator | Sequence[torch.Generator] | None, count: int
) -> list[int]:
    """Return a seed for each image, drawn from the generator, or from one an image.

    None is torch's global generator. The seeds of the first images do not depend on how many
    follow. Raises InputError for a wrong number of generators, or for something else.
    """
    source: Any = torch.default_generator if generator is None else generator
    generators = [source] * count if _is_one(source) else [*source]
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


def some(value: Any) -> list[Any]:
    """Return what there is to draw, one thing as a list of one; raises InputError for nothing."""
    many = [value] if _is_one(value) else list(value)
    if not many:
        raise InputError("got an empty list; expected at least one prompt or class to draw.")
    return many


def _is_one(value: Any) -> bool:
    """Tell one thing from a list of them; arrays of no dimension have an __iter__ that raises."""
    if isinstance(value, str) or getattr(value, "ndim", None) == 0:
        return True
    return not hasattr(value, "__iter__")


def padded_features(
    features: Tensor | Sequence[Tensor], length: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Return features of prompts at the end of L places each, and how many stand empty.

    Padding comes first, as LlamaGen has it.

    Args:
        features: Of each prompt [n, d], n from 1 to L.
        length: L.

    Raises:
        InputError: Features are no matrices of one width, or too many.
    """
    prompts = list(features)
    if not all(isinstance(each, Tensor) and each.ndim == 2 for each in prompts):
        raise InputError(
            f"got features {[_shape(each) for each in prompts[:8]]} of the text encoder; expected "
            "a tensor [n, d] of each text."
        )
    sizes, widths = [len(prompt) for prompt in prompts], {prompt.shape[1] for prompt in prompts}
    if min(sizes) < 1 or max(sizes) > length or len(widths) > 1:
        raise InputError(
            f"got prompts of {', '.join(map(str, sizes[:8]))} features of {sorted(widths)} "
            f"numbers; expected 1 to {length} of each, of one width. Cut longer ones."
        )
    if min(sizes) == length:
        return torch.stack(prompts), ()
    padded = prompts[0].new_zeros(len(prompts), length, prompts[0].shape[1])
    for row, prompt in zip(padded, prompts, strict=True):
        row[length - len(prompt) :] = prompt
    return padded, tuple(length - size for size in sizes)


def checked_codes(codes: Any, count: int, size: int) -> Tensor | None:
    """Return the codes that are given i64 [n], -1 where one is to be drawn; None for none.

    codes: a tensor of at most `count` whole numbers below `size`. Raises InputError for others.
    """
    if codes is None:
        return None
    whole = isinstance(codes, Tensor) and codes.dtype == torch.int64
    flat = codes.flatten() if whole else torch.zeros(0, dtype=torch.int64)
    if not (whole and 0 < len(flat) <= count and int(flat.min()) >= -1 and int(flat.max()) < size):
        raise InputError(
            f"got codes {_shape(codes)}; expected whole numbers i64 [h, w] or [n], at most "
            f"{count}, from 0 to {size - 1}, and -1 where one is to be drawn."
        )
    return flat


def _shape(codes: Any) -> str:
    shape = getattr(codes, "shape", None)
    return f"{codes!r}" if shape is None else f"of shape {list(shape)}"


def checked_texts(texts: list[Any]) -> list[str]:
    """Return the prompts; raises InputError for one that is empty or no text."""
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                f"got the prompt {text!r}; expected a few words such as 'red heart', not nothing."
            )
    return texts


def checked_callback(
    callback: Callable[..., Any] | None, names: Sequence[str] | None, known: Sequence[str] = TENSORS
) -> Callable[..., Any] | None:
    """Return the callback as it is told of these tensors alone, or None where there is none.

    names: of `known`; None for all. Raises InputError for others.
    """
    values = [names] if isinstance(names, str) else list(known if names is None else names)
    foreign = [name for name in values if name not in known]
    if foreign or isinstance(names, str):
        raise InputError(
            f"got callback_on_step_end_tensor_inputs={names!r}; expected a list of what there is: "
            f"{list(known)}."
        )
    if callback is None:
        return None

    def on_progress(pipeline: Any, step: int, codes: int, tensors: dict[str, Tensor]) -> Any:
        return callback(pipeline, step, codes, {name: tensors[name] for name in values})

    return on_progress
