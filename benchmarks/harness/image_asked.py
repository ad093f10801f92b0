"""What one `ragspec bench image` was asked for, and what is ready to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.image_timing import ImageConfig
    from harness.image_ways import Variant
    from ragspec.visual.pipeline.pipeline import ImagePipeline

_SEEDS = 1 << 63  # torch takes twice as many upwards: the images that follow have seeds too


@dataclass(frozen=True, slots=True)
class ImageBench:
    """What one `ragspec bench image` was asked for.

    steps, floor: of the denoising of latents, None for the model's own. prefill: see
    `MaskedLatentPipeline`.
    """

    source: str
    ways: tuple[str, ...]
    images: int
    quality: int
    batches: int
    side_by_side: int
    budget: str
    min_expected_gain: float | None
    guidance: float
    temperature: float
    top_k: int
    seed: int
    device: str
    dtype: str
    features: str | None
    steps: int | None = None
    floor: float | None = None
    prefill: float = 0.0

    def __post_init__(self) -> None:
        from evaluation.frechet import AXES, FeatureNet

        from ragspec.errors import InputError

        if not (self.quality == 0 or self.quality > AXES):
            raise InputError(
                f"--quality is {self.quality}; expected 0 for none, or more than {AXES} images: "
                "fewer have no Frechet distance. Try 400."
            )
        if self.features is not None:
            if not self.quality:
                raise InputError("--features needs a quality: add --quality 400.")
            FeatureNet.load(Path(self.features))  # for its errors, before hours of drawing
        if not -_SEEDS <= self.seed < _SEEDS:
            raise InputError(
                f"--seed is {self.seed}; expected a whole number from -2^63 to 2^63 - 1."
            )


@dataclass(frozen=True, slots=True)
class Prepared:
    """The models, the ways and what is drawn; latents: of a model of continuous latents.

    build: makes the pipeline of a way, given the draft nodes and how many are drawn side by side.
    masked: of a masked model of such.
    """

    base: ImagePipeline
    ways: list[Variant]
    image_config: ImageConfig
    latents: bool
    build: Callable[[Variant, Any, int], ImagePipeline]
    masked: bool = False
