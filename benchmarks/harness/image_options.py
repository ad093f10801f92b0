"""The options of `bench.py image`, and the models and variants that it prepares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError
from ragspec.pipelines.console.records import option, split

if TYPE_CHECKING:
    from harness.image_timing import ImageSeries
    from harness.image_variants import Variant
    from ragspec.visual import ImagePipeline

_SEEDS = 1 << 63  # torch takes twice as many, so that later images have valid seeds, too


@dataclass(frozen=True, slots=True)
class ImageBenchOptions:
    """The options of one `bench.py image` but its files; see `Mar` for `prefill`."""

    source: str = option("tiles", "Bundled image set or folder of a pipeline.", "--model", "-m")
    variants: str = option(
        "",
        "Comma-separated: RULE[@VALUE][:DRAFTER], sjd, scd, draft-only; of latents also "
        "fewer@N, the target alone with N denoising steps, or iterations of a masked model.",
    )
    images: int = option(64, "Images to time, one at a time.", min=1)
    quality: int = option(0, "Images of a batch for the Frechet distance; 0 for none.", min=0)
    batches: int = option(5, "Independent plain batches for the Frechet distance.", min=5)
    batch_size: int = option(32, "Images to draw at once for the Frechet distance.", min=1)
    budget: str = option("12", "Draft nodes per step: auto, or a number.")
    min_expected_gain: float | None = option(
        None, "Least expected gain, in accepted codes, of a draft model's next level.", min=0.0
    )
    guidance: float = option(2.0, "Scale of classifier-free guidance.", min=0.0)
    temperature: float = option(1.0, "Temperature of sampling; 0 is greedy.", min=0.0)
    top_k: int = option(0, "Codes to sample from; 0 for all.", min=0)
    seed: int = option(0, "Random seed of the first image.")
    device: str = option("auto", "Device: auto, cpu, or an accelerator.")
    dtype: str = option("auto", "Data type: auto, float32, bfloat16, float16 or float64.")
    features: str | None = option(
        None, "Saved feature network; default: the model's, else a new one."
    )
    steps: int | None = option(None, "Denoising steps of a latent; default: the model's.", min=1)
    floor: float | None = option(
        None, "Least noise of a denoising step; default: the model's.", min=0.0
    )
    prefill: float = option(0.0, "Share of masked latents to draw before drafting.", min=0.0)

    def __post_init__(self) -> None:
        from evaluation.frechet import AXES, FeatureNet

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

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the variants."""
        return split(self.variants)


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
