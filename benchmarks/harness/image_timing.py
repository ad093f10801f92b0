"""The measuring of `ragspec bench image`: seconds one image at a time, quality in large batches.

Seconds: every image is drawn in all ways with one seed before the next one is, the order changing
from image to image. Quality: images with other seeds than any plain batch has, so that an exact way
is one more independent batch of plain images. A relaxed rule's images depend on its drafts, so the
quality runs keep the number of draft nodes that the timed runs used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.image_ways import DRAFT_ONLY, PLAIN, Variant

if TYPE_CHECKING:
    import numpy as np
    from evaluation.frechet import FeatureNet, Interval
    from numpy.typing import NDArray

    from ragspec.visual.pipeline.pipeline import ImagePipeline
    from ragspec.visual.pipeline.stats import LatentStats

Progress = Callable[[str], None]
_WARM_UP = 3
_FAR = 1 << 20  # between the seeds of quality batches


@dataclass(slots=True)
class Timed:
    """What the timed images of one way came to, one entry an image.

    forwards: of the target, reading the condition included. lengths: codes by forward pass of
    decoding. sizes: draft nodes of all steps. surprises f64 [n] of each image's codes, empty where
    it was not measured. Of continuous latents alone: psnr, in dB to the plain
    picture of the seed, and figures, all that a call told of them.
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
    figures: list[LatentStats] = field(default_factory=list)

    @property
    def usual_size(self) -> int:
        """The mean number of draft nodes of a step, rounded."""
        steps = sum(self.sizes.values())
        return round(sum(size * n for size, n in self.sizes.items()) / steps) if steps else 0


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What is drawn: subjects (labels or prompts) in turn, and how they are sampled."""

    subjects: Sequence[Any]
    by_class: bool
    guidance: float
    temperature: float
    top_k: int
    seed: int

    def arguments(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return what a pipeline is called with to draw these images of the series."""
        subjects = [self.subjects[number % len(self.subjects)] for number in numbers]
        return {
            "class_labels" if self.by_class else "prompt": subjects,
            "guidance_scale": self.guidance,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "generator": [_dice(self.seed + number) for number in numbers],
        }


@dataclass(frozen=True, slots=True)
class Quality:
    """Frechet distances by way, and that of plain decoding from itself.

    batches: the distance of each plain batch from the others. excess: mean tv_excess of a way's
    images.
    """

    null: Interval
    batches: list[float]
    distances: dict[str, Interval]
    excess: dict[str, float | None]
    images: int


def time_ways(
    pipes: Mapping[Variant, ImagePipeline], image: ImageConfig, images: int, progress: Progress
) -> dict[Variant, Timed]:
    """Draw `images` images in every way, in turns, one at a time."""
    ways = list(pipes)
    record = {variant: Timed() for variant in ways}
    for direction in ways:
        for number in range(_WARM_UP):
            pipes[direction](**image.arguments([number]), output_type="latent")
    for number in range(images):
        progress(f"seconds: image {number + 1} of {images}")
        shift = number % len(ways)
        sample = {}
        for direction in ways[shift:] + ways[:shift]:
            sample[direction] = pipes[direction](**image.arguments([number]), output_type="latent")
            _note(record[direction], direction, sample[direction])
        plain = next(sample[variant] for variant in ways if variant.name == PLAIN)
        for direction in ways:
            _compare(record[direction], sample[direction], plain, pipes[direction])
    return record


def judge_ways(
    pipes: Mapping[Variant, ImagePipeline],
    image: ImageConfig,
    images: int,
    batches: int,
    net: Callable[[NDArray[np.uint8], NDArray[np.int64]], FeatureNet],
    progress: Progress,
) -> Quality:
    """Draw `batches` plain batches of `images` images and one in every other way; compare them.

    net: returns the network of features, given all plain images and the numbers of their subjects.
    """
    import numpy as np
    from evaluation.frechet import PlainReference

    plain = next(pipe for variant, pipe in pipes.items() if variant.name == PLAIN)
    sample = []
    for batch in range(batches):
        progress(f"quality: plain batch {batch + 1} of {batches}")
        sample.append(_batch(plain, image, images, batch + 1)[0])
    subjects = np.arange(images) % len(image.subjects)
    features = net(np.concatenate(sample), np.tile(subjects, batches))
    reference = PlainReference([features.features(batch) for batch in sample], subjects)
    distances, excess = {}, {}
    for direction, pipe in pipes.items():
        if direction.name == PLAIN:
            continue
        progress(f"quality: {direction.name}")
        pictures, excess[direction.name] = _batch(pipe, image, images, batches + 1)
        distances[direction.name] = reference.distance(features.features(pictures))
    return Quality(reference.null, reference.batches, distances, excess, images)


def _batch(
    pipe: ImagePipeline, image: ImageConfig, images: int, number: int
) -> tuple[NDArray[np.uint8], float | None]:
    """Return the pictures u8 [n, H, W, 3] of one batch of seeds, and their mean tv_excess."""
    numbers = range(number * _FAR, number * _FAR + images)
    # Subjects go round from the first, whatever the number of the batch.
    turned = [n - number * _FAR for n in numbers]
    arguments = image.arguments(turned)
    arguments["generator"] = [_dice(image.seed + n) for n in numbers]
    out = pipe(**arguments, output_type="np")
    pictures: NDArray[np.uint8] = (out.images * 255.0).round().astype("uint8")
    return pictures, out.stats.tv_excess


def _note(timed: Timed, direction: Variant, out: Any) -> None:
    stats = out.stats
    current = direction.name != DRAFT_ONLY  # the target does nothing there
    timed.label = out.label if current else "approximate"
    timed.seconds.append(stats.seconds)
    timed.forwards.append(stats.forwards if current else 0)
    timed.lengths.append(stats.codes_per_forward if current else float("nan"))
    timed.excess.append(stats.tv_excess if current else None)
    if current:
        timed.nll_gaps.append(stats.nll_gaps)
    for report in stats.reports:
        timed.sizes.update(report.budget_sizes)


def _compare(timed: Timed, out: Any, plain: Any, pipe: ImagePipeline) -> None:
    """Take note of how like one picture is to the plain one of its seed."""
    if getattr(out, "latents", None) is None:
        timed.equal.append(bool((out.codes == plain.codes).all()))
        return
    from evaluation.likeness import psnr, same_latents

    ours, theirs = (pipe.decode(each.latents, "np") * 255.0 for each in (out, plain))
    timed.equal += same_latents(out.latents, plain.latents)
    timed.psnr.append(psnr(ours.round(), theirs.round()))
    timed.figures.append(out.stats)


def _dice(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)
