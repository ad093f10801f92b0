"""The options of `bench.py image`, and the models and variants that it prepares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.image_timing import ImageSeries
    from harness.image_variants import Variant
    from ragspec.visual import ImagePipeline

_SEEDS = 1 << 63  # torch takes twice as many, so that later images have valid seeds, too


@dataclass(frozen=True, slots=True)
class ImageBenchOptions:
    """The options of one `bench.py image`, see the command's help.

    Attributes:
        steps: Denoising steps of a latent; None for the model's default.
        floor: Least noise of a denoising step; None for the model's default.
        prefill: Share of masked latents to draw before drafting, see `Mar`.
    """

    source: str
    variants: tuple[str, ...]
    images: int
    quality: int
    batches: int
    batch_size: int
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
                f"Expected --quality 0 or more than {AXES} images, got {self.quality}. The Frechet "
                "distance needs more images than axes. Try --quality 400."
            )
        if self.features is not None:
            if not self.quality:
                raise InputError("Expected --quality with --features, got none. Add --quality 400.")
            FeatureNet.load(Path(self.features))  # raises its errors before hours of drawing
        if not -_SEEDS <= self.seed < _SEEDS:
            raise InputError(
                f"Expected --seed from -2^63 to 2^63 - 1, got {self.seed}. Choose a smaller seed."
            )


@dataclass(frozen=True, slots=True)
class Prepared:
    """The loaded models, the variants and the series of images.

    Attributes:
        latents: Whether the model draws continuous latents.
        build: Builds the pipeline of a variant from a budget of draft nodes and a batch size.
        masked: Whether the model is a masked one of continuous latents.
    """

    base: ImagePipeline
    variants: list[Variant]
    series: ImageSeries
    latents: bool
    build: Callable[[Variant, Any, int], ImagePipeline]
    masked: bool = False
