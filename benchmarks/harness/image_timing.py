"""Measurements of `bench.py image`: seconds of single images, quality of large batches.

Seconds: all variants draw an image with one seed, in changing order, before the next image.
Quality: the images have other seeds than any plain batch. An exact variant is thus one more
independent batch of plain images. A relaxed rule's images depend on its drafts, so the quality runs
keep the number of draft nodes that the timed runs used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.image_variants import DRAFT_ONLY, PLAIN, Variant

if TYPE_CHECKING:
    import numpy as np
    from evaluation.frechet import FeatureNet, Interval
    from numpy.typing import NDArray

    from ragspec.visual.output import ImageStats
    from ragspec.visual.pipeline import ImagePipeline

Progress = Callable[[str], None]
_WARM_UP = 3
_SEED_STEP = 1 << 20  # distance between the seeds of quality batches


@dataclass(slots=True)
class TimedImages:
    """Measurements of the timed images of one variant; lists have one entry for each image.

    Attributes:
        forwards: Forward passes of the target, prefill of the condition included.
        lengths: Codes by forward pass of decoding.
        excess: tv_excess.
        equal: Whether the image equals the plain one of its seed.
        sizes: Draft nodes of all steps, counted.
        nll_gaps: f64 [n], of each code; empty if it was not measured.
        psnr: Of continuous latents: dB to the plain picture of the seed.
        figures: Of continuous latents: the stats of the call.
    """

    label: str = ""
    seconds: list[float] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    excess: list[float | None] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    sizes: Counter[int] = field(default_factory=Counter)
    nll_gaps: list[NDArray[np.float64]] = field(default_factory=list)
    psnr: list[float] = field(default_factory=list)
    figures: list[ImageStats] = field(default_factory=list)

    @property
    def usual_size(self) -> int:
        """The mean number of draft nodes of a step, rounded."""
        steps = sum(self.sizes.values())
        return round(sum(size * n for size, n in self.sizes.items()) / steps) if steps else 0


@dataclass(frozen=True, slots=True)
class ImageSeries:
    """A series of images: subjects (labels or prompts) in turn, and sampling settings."""

    subjects: Sequence[Any]
    by_class: bool
    guidance: float
    temperature: float
    top_k: int
    seed: int

    def arguments(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of a pipeline for these images of the series."""
        subjects = [self.subjects[number % len(self.subjects)] for number in numbers]
        return {
            "class_labels" if self.by_class else "prompt": subjects,
            "guidance_scale": self.guidance,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "seed": [self.seed + number for number in numbers],
        }


@dataclass(frozen=True, slots=True)
class Quality:
    """Frechet distances of all variants to plain images.

    Attributes:
        null: Distance of plain decoding from itself.
        batches: Distance of each plain batch from the others.
        distances: By name of the variant.
        excess: Mean tv_excess by name of the variant.
        images: Images of a batch.
    """

    null: Interval
    batches: list[float]
    distances: dict[str, Interval]
    excess: dict[str, float | None]
    images: int


def time_variants(
    pipes: Mapping[Variant, ImagePipeline], image: ImageSeries, images: int, progress: Progress
) -> dict[Variant, TimedImages]:
    """Draw `images` images in every variant, interleaved, one at a time."""
    variants = list(pipes)
    timed = {variant: TimedImages() for variant in variants}
    for variant in variants:
        for number in range(_WARM_UP):
            pipes[variant](**image.arguments([number]), output_type="latent")
    for number in range(images):
        progress(f"seconds: image {number + 1} of {images}")
        shift = number % len(variants)
        outputs = {}
        for variant in variants[shift:] + variants[:shift]:
            outputs[variant] = pipes[variant](**image.arguments([number]), output_type="latent")
            _record(timed[variant], variant, outputs[variant])
        plain = next(outputs[variant] for variant in variants if variant.name == PLAIN)
        for variant in variants:
            _compare(timed[variant], outputs[variant], plain, pipes[variant])
    return timed


def measure_quality(
    pipes: Mapping[Variant, ImagePipeline],
    image: ImageSeries,
    images: int,
    batches: int,
    net: Callable[[NDArray[np.uint8], NDArray[np.int64]], FeatureNet],
    progress: Progress,
) -> Quality:
    """Compare a batch of images of every variant with plain batches.

    Args:
        pipes: Pipelines by variant, plain among them.
        image: Series of images.
        images: Images of a batch.
        batches: Number of plain batches.
        net: Returns the feature network for all plain images and the numbers of their subjects.
        progress: Called with a line for each batch.
    """
    import numpy as np
    from evaluation.frechet import PlainReference

    plain = next(pipe for variant, pipe in pipes.items() if variant.name == PLAIN)
    plain_batches = []
    for batch in range(batches):
        progress(f"quality: plain batch {batch + 1} of {batches}")
        plain_batches.append(_batch(plain, image, images, batch + 1)[0])
    subjects = np.arange(images) % len(image.subjects)
    features = net(np.concatenate(plain_batches), np.tile(subjects, batches))
    reference = PlainReference([features.features(batch) for batch in plain_batches], subjects)
    distances, excess = {}, {}
    for variant, pipe in pipes.items():
        if variant.name == PLAIN:
            continue
        progress(f"quality: {variant.name}")
        pictures, excess[variant.name] = _batch(pipe, image, images, batches + 1)
        distances[variant.name] = reference.distance(features.features(pictures))
    return Quality(reference.null, reference.batches, distances, excess, images)


def _batch(
    pipe: ImagePipeline, image: ImageSeries, images: int, number: int
) -> tuple[NDArray[np.uint8], float | None]:
    """Return the pictures u8 [n, H, W, 3] of one batch of seeds, and their mean tv_excess."""
    numbers = range(number * _SEED_STEP, number * _SEED_STEP + images)
    # Every batch begins with the first subject.
    arguments = image.arguments(range(images))
    arguments["seed"] = [image.seed + n for n in numbers]
    out = pipe(**arguments, output_type="np")
    pictures: NDArray[np.uint8] = (out.images * 255.0).round().astype("uint8")
    return pictures, out.stats.tv_excess


def _record(timed: TimedImages, variant: Variant, out: Any) -> None:
    stats = out.stats
    has_target = variant.name != DRAFT_ONLY
    timed.label = out.label if has_target else "approximate"
    timed.seconds.append(stats.seconds)
    timed.forwards.append(stats.forwards if has_target else 0)
    timed.lengths.append(stats.codes_per_forward if has_target else float("nan"))
    timed.excess.append(stats.tv_excess if has_target else None)
    if has_target:
        timed.nll_gaps.append(stats.nll_gaps)
    for report in stats.reports:
        timed.sizes.update(report.budget_sizes)


def _compare(timed: TimedImages, out: Any, plain: Any, pipe: ImagePipeline) -> None:
    """Record how much a picture resembles the plain one of its seed."""
    if out.latents is None:
        timed.equal.append(bool((out.codes == plain.codes).all()))
        return
    from evaluation.likeness import psnr, same_latents

    ours, theirs = (pipe.decode(each.latents, "np") * 255.0 for each in (out, plain))
    timed.equal += same_latents(out.latents, plain.latents)
    timed.psnr.append(psnr(ours.round(), theirs.round()))
    timed.figures.append(out.stats)
