"""`ImageCall`: the arguments of one call of an image pipeline; and how a pipeline drafts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ragspec.engine.prompts import well_formed
from ragspec.errors import InputError, pluralize
from ragspec.registry import did_you_mean
from ragspec.sampling.settings import checked_count, checked_seed, plain_value
from ragspec.visual.checks import check_setting
from ragspec.visual.models.raster import Raster

OUTPUTS = ("pil", "np", "pt", "latent")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageCall:
    """The images to draw and their settings, checked when it is created.

    Attributes:
        prompt: A text or several, of any lengths, for models of prompts.
        class_labels: Numbers or names, for models of classes.
        negative_prompt: The text that guidance leads away from, one for all or one each. None for
            the model's equivalent of no prompt, as are blank texts alone.
        height, width: In pixels, of Emu3 and Lumina-mGPT; None for the model's usual size.
        guidance_scale: One for all images or one for each; None for the family's, 1 for none, 0 to
            leave the condition out. Images of one scale share forward passes.
        guidance_interval: (first, last) indices of the codes under guidance, last excluded;
            LlamaGen's cfg_interval=i is (0, i + 2).
        seed: One for each image, or that of the first, to which the numbers of the others are
            added. `stats.seeds` has the seeds of a call.
        generator: The source of the seeds, or one for each image; None for torch's global one.
        num_images_per_prompt: Images of each prompt or class, next to each other.
        temperature: 0 is greedy.
        top_k, top_p, min_p: See `Sampling`; top_k None for the family's, 0 for all codes.
        codes i64 [h, w] or [n]: Fixed codes, -1 for codes to generate, each from those before it.
        output_type: "pil", "np", "pt" or "latent", see `ImageOutput`.
        callback_on_step_end: Called after each forward with (pipeline, step, count, tensors). Steps
            count the forwards of the call. The count is of the codes or latents of the image that
            is furthest behind in the forward, so it falls when an image begins. The tensors are of
            all images of the call: {"codes": i64 [B, h * w]}, -1 for missing ones, or
            {"latents": f32 [B, h * w, D]}, 0 for missing ones. The call ends early if it returns
            True, also NumPy's or torch's.
        on_image: Called with (number, PIL image) as soon as an image is complete.
    """

    prompt: Any = None
    class_labels: Any = None
    negative_prompt: Any = None
    height: int | None = None
    width: int | None = None
    guidance_scale: float | Sequence[float] | None = None
    guidance_interval: tuple[int, int] | None = None
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    num_images_per_prompt: int = 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    codes: Tensor | None = None
    output_type: str = "pil"
    callback_on_step_end: Callable[..., Any] | None = None
    on_image: Callable[[int, Any], None] | None = None

    def __post_init__(self) -> None:
        check_output_type(self.output_type)
        checked_count(self.num_images_per_prompt, "num_images_per_prompt")
        for name in ("callback_on_step_end", "on_image"):
            if not callable(callback := getattr(self, name)) and callback is not None:
                raise InputError(f"got {name}={callback!r}; expected a function, or None.")
        if self.seed is not None and self.generator is not None:
            raise InputError("got seed and generator; expected one of them. Leave one out.")
        for name in ("guidance_scale", "guidance_interval"):
            value = getattr(self, name)
            several = value if _is_one(value) else tuple(map(plain_value, value))
            object.__setattr__(self, name, plain_value(several))
        negative = self.negative_prompt
        texts = [] if negative is None else [negative] if _is_one(negative) else list(negative)
        blank = all(isinstance(text, str) and not text.strip() for text in texts)
        object.__setattr__(self, "negative_prompt", None if blank else texts)

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> "ImageCall":
        """Return the call of some keywords; raise InputError for one that does not exist."""
        names = [field.name for field in fields(cls)]
        if foreign := sorted(inputs.keys() - set(names)):
            raise InputError(
                f"got {', '.join(foreign)} for a call.{did_you_mean(foreign[0], names)} expected "
                f"some of {', '.join(names)}."
            )
        return cls(**inputs)

    def seeds(self, count: int) -> list[int]:
        """Return the seed of each image; raise InputError unless there is one, or one each.

        The first seeds from a generator do not depend on the number of images.
        """
        if self.seed is None:
            source = torch.default_generator if self.generator is None else self.generator
            generators = one_each(source, count, "generator")
            if not all(isinstance(each, torch.Generator) for each in generators):
                raise InputError(
                    f"got generator={source!r}; expected a torch.Generator or several. Pass seed=0."
                )
            draws = (torch.randint(1 << 62, (1,), generator=g, device=g.device) for g in generators)
            return [int(draw) for draw in draws]
        if _is_one(self.seed):
            first = checked_seed(self.seed, count)
            return list(range(first, first + count))
        return [checked_seed(each) for each in one_each(self.seed, count, "seed")]

    def scales(self, usual: float, count: int) -> list[float]:
        """Return each image's guidance scale; raise InputError for wrong ones, or not one each."""
        scale = usual if self.guidance_scale is None else self.guidance_scale
        scales: list[float] = one_each(scale, count, "guidance scale")
        for each in scales:
            check_setting("guidance_scale", each)
        return scales

    def fixed(self, raster: Raster, size: int) -> Tensor | None:
        """Return the fixed ones of `size` codes as an image's first tokens, i64 [n]; None for none.

        Raises:
            InputError: The codes are of another dtype or shape, out of range or too many.
        """
        if (codes := self.codes) is None:
            return None
        fits = isinstance(codes, Tensor) and codes.dtype == torch.int64
        fits = fits and (codes.ndim == 1 or tuple(codes.shape) == raster.shape)
        flat = codes.flatten() if fits else torch.zeros(0, dtype=torch.int64)
        if not (0 < len(flat) <= raster.codes and -1 <= int(flat.min()) <= int(flat.max()) < size):
            shape, kind = getattr(codes, "shape", None), type(codes).__name__
            got = f"{codes!r}" if shape is None else f"as {kind} of {codes.dtype}, {list(shape)}"
            raise InputError(
                f"got codes {got}; expected a tensor of i64, {list(raster.shape)} or [n], at most "
                f"{raster.codes}, from 0 to {size - 1}, and -1 where one is to be drawn."
            )
        return torch.tensor(raster.laid(flat.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class ImageConfig:
    """The settings of one call's target.

    Attributes:
        guidance_scale, guidance_interval: See `ImageTarget`.
        fixed: The fixed codes, as the first tokens of an image.
        rows: The number of the condition of each image.
    """

    guidance_scale: float
    guidance_interval: tuple[int, int] | None
    raster: Raster
    fixed: Tensor | None = None
    rows: Sequence[int] = ()
    seeds: Sequence[int] = ()
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How a pipeline drafts, whatever the family.

    Attributes:
        budget: A number of draft nodes, "auto" (slow to learn: an image is short), or a policy;
            None for the family's number.
        draft_mode: How a model or a head drafts, see `HeadDrafter`; None takes the first mode that
            the rule accepts, or "deterministic" for a rule with a budget of total variation.
        min_expected_gain: The accepted codes that a further draft forward must promise, see
            `ModelDrafter` and `LatentDrafter`. 0 uses up the budget, which pays if a draft forward
            is nearly free.
        batch_size: Images side by side; None for the family's number.
    """

    budget: Any = None
    draft_mode: Any = None
    min_expected_gain: float | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.min_expected_gain is not None:
            check_setting("min_expected_gain", self.min_expected_gain)


def check_output_type(output_type: object) -> None:
    """Raise InputError unless images can be returned as this."""
    if output_type not in OUTPUTS:
        raise InputError(f"got output_type {output_type!r}; expected one of {', '.join(OUTPUTS)}.")


def one_each(value: Any, count: int, what: str, of: str = "image") -> list[Any]:
    """Return the values of some images, or prompts; raise InputError unless one for all or each."""
    values = [value] * count if _is_one(value) else list(value)
    if len(values) != count:
        raise InputError(
            f"got {pluralize(len(values), what)} for {pluralize(count, of)}; expected one for all, "
            "or one each."
        )
    return values


def some(value: Any, least: int = 1) -> list[Any]:
    """Return prompts or classes as a list, also a single one; raise InputError below `least`."""
    many = [value] if _is_one(value) else list(value)
    if len(many) < least:
        raise InputError("got an empty list; expected at least one prompt or class to draw.")
    return many


def _is_one(value: object) -> bool:
    """Return whether a value is one item; sets and mappings are no lists, so each is refused."""
    plain = plain_value(value)  # scalar arrays have an __iter__ that raises
    one = isinstance(plain, str | bytes | set | frozenset | Mapping)
    return one or not hasattr(plain, "__iter__")


def checked_texts(texts: Sequence[object]) -> list[str]:
    """Return the prompts; raise InputError if one is empty or no text."""
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise InputError(
                f"got the prompt {text!r}; expected a few words such as 'red heart', not nothing."
            )
    return [well_formed(str(text)) for text in texts]


def negatives_of(negative: Sequence[object] | None, prompts: int) -> list[str]:
    """Return a negative prompt for each prompt, "" for none; raise InputError for other numbers."""
    texts = [""] if negative is None else negative
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"got negative_prompt {negative!r}; expected texts.")
    texts = [well_formed(str(text)) for text in texts]
    return one_each(texts[0] if len(texts) == 1 else texts, prompts, "negative prompt", "prompt")
