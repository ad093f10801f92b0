"""Checks of the arguments of an image pipeline's call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.visual.models.raster import Raster

TENSORS = ("codes",)  # the tensors that a callback may request
OUTPUTS = ("pil", "np", "pt", "latent")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """The target's settings for a call: guidance, the grid of codes and the fixed codes."""

    guidance_scale: float
    guidance_interval: tuple[int, int] | None
    raster: Raster | None
    fixed: Tensor | None = None


def check_output_type(output_type: Any) -> None:
    """Raise InputError unless the output_type is one of `OUTPUTS`."""
    if output_type not in OUTPUTS:
        raise InputError(f"got output_type {output_type!r}; expected one of {', '.join(OUTPUTS)}.")


def seeds_of(
    generator: torch.Generator | Sequence[torch.Generator] | None, count: int
) -> list[int]:
    """Draw a seed for each image; the first seeds do not depend on the number of images.

    Args:
        generator: One for all images or one for each; None is torch's global one.

    Raises:
        InputError: The number of generators is wrong, or one is no torch.Generator.
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
    """Return prompts or classes as a list, also if there is only one.

    Raises:
        InputError: The list is empty.
    """
    many = [value] if _is_one(value) else list(value)
    if not many:
        raise InputError("got an empty list; expected at least one prompt or class to draw.")
    return many


def _is_one(value: Any) -> bool:
    """Return whether a value is one item; scalar arrays have an __iter__ that raises."""
    if isinstance(value, str) or getattr(value, "ndim", None) == 0:
        return True
    return not hasattr(value, "__iter__")


def padded_features(
    features: Tensor | Sequence[Tensor], length: int
) -> tuple[Tensor, tuple[int, ...]]:
    """Pad the features of prompts on the left to [R, L, d], as LlamaGen does.

    Args:
        features: One [n, d] for each prompt, n from 1 to L.
        length: L.

    Returns:
        The padded features, and the padding of each prompt, empty if no prompt has any.

    Raises:
        InputError: The features are no matrices of one width, or too many.
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


def checked_codes(codes: Any, raster: Raster, size: int) -> Tensor | None:
    """Return the fixed codes of an image as its first tokens, i64 [n]; None for none.

    Args:
        codes i64 [h, w] or [n]: From 0 to size - 1, and -1 for codes to generate.
        raster: The grid of the image.

    Raises:
        InputError: The codes are of another dtype, out of range or too many.
    """
    if codes is None:
        return None
    most, whole = raster.codes, isinstance(codes, Tensor) and codes.dtype == torch.int64
    flat = codes.flatten() if whole else torch.zeros(0, dtype=torch.int64)
    if not (whole and 0 < len(flat) <= most and int(flat.min()) >= -1 and int(flat.max()) < size):
        raise InputError(
            f"got codes {_shape(codes)}; expected whole numbers i64 [h, w] or [n], at most "
            f"{most}, from 0 to {size - 1}, and -1 where one is to be drawn."
        )
    return torch.tensor(raster.laid(flat.tolist()))


def _shape(codes: Any) -> str:
    shape = getattr(codes, "shape", None)
    return f"{codes!r}" if shape is None else f"of shape {list(shape)}"


def checked_texts(texts: list[Any]) -> list[str]:
    """Return the prompts unchanged.

    Raises:
        InputError: A prompt is empty or no text.
    """
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                f"got the prompt {text!r}; expected a few words such as 'red heart', not nothing."
            )
    return texts


def check_negatives(negatives: int, prompts: int) -> None:
    """Raise InputError unless there is one negative prompt for all prompts, or one each."""
    if negatives not in (1, prompts):
        raise InputError(
            f"got {negatives} negative prompts for {prompts} prompts; expected one for all, or one "
            "each."
        )


def checked_callback(
    callback: Callable[..., Any] | None,
    names: Sequence[str] | None,
    allowed: Sequence[str] = TENSORS,
) -> Callable[..., Any] | None:
    """Wrap the callback to receive only the named tensors; None without a callback.

    Args:
        names: Some of `allowed`; None for all.

    Raises:
        InputError: A name is not allowed, or `names` is one text.
    """
    values = [names] if isinstance(names, str) else list(allowed if names is None else names)
    foreign = [name for name in values if name not in allowed]
    if foreign or isinstance(names, str):
        raise InputError(
            f"got callback_on_step_end_tensor_inputs={names!r}; expected a list of what there is: "
            f"{list(allowed)}."
        )
    if callback is None:
        return None

    def on_progress(pipeline: Any, step: int, codes: int, tensors: dict[str, Tensor]) -> Any:
        return callback(pipeline, step, codes, {name: tensors[name] for name in values})

    return on_progress
