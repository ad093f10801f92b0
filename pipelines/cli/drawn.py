"""What came of drawing, plain or speculative: images, figures, likeness."""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ragspec.pipelines.cli.asked_image import Asked
    from ragspec.visual.pipeline.pipeline import ImagePipeline


def draw_once(
    pipe: ImagePipeline, asked: Asked, dice: torch.Generator, subject: int | None = None
) -> Any:
    """Return what a pipeline draws of all that was asked for, or one image of a subject.

    Where a part of a picture is kept its own pixels are put back.
    """
    output = pipe(**asked.arguments(subject), generator=dice)
    if asked.kept is not None:
        output.images = [asked.kept.pasted(image) for image in output.images]
    return output


@dataclass(slots=True)
class Drawn:
    """The images of one way of drawing, in order; side by side in one batch or one by one."""

    outputs: list[Any]

    @property
    def images(self) -> list[Image]:
        """All images."""
        return [image for output in self.outputs for image in output.images]

    @property
    def codes(self) -> torch.Tensor:
        """The codes i64 [B, h, w]."""
        import torch

        return torch.cat([output.codes for output in self.outputs])

    @property
    def latents(self) -> torch.Tensor | None:
        """The latents f32 [B, h, w, D] of models that draw such."""
        import torch

        found = [getattr(output, "latents", None) for output in self.outputs]
        known = [each for each in found if each is not None]
        return torch.cat(known) if known else None

    @property
    def forwards(self) -> int:
        """Forward passes over all images."""
        return sum(output.stats.forwards for output in self.outputs)

    @property
    def seconds(self) -> float:
        """Seconds over all images."""
        return float(sum(output.stats.seconds for output in self.outputs))

    @property
    def tv_excess(self) -> float | None:
        """Mean excess a position; None where the rule does not measure it."""
        found = [output.stats.tv_excess for output in self.outputs for _ in output.images]
        return None if any(each is None for each in found) else fmean(found)

    @property
    def surprise(self) -> tuple[float, float] | None:
        """Mean surprise of a code and its error, nats; None where it was not measured."""
        import numpy as np

        found = np.concatenate([output.stats.surprises for output in self.outputs])
        if not found.size:
            return None
        return float(found.mean()), float(np.sqrt((found**2).mean() / found.size))

    @property
    def label(self) -> str:
        """The label that holds for all images."""
        from ragspec.visual.pipeline.output import weakest

        return weakest([output.label for output in self.outputs])

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each image."""
        return [seed for output in self.outputs for seed in output.stats.seeds]

    @property
    def codes_per_forward(self) -> float:
        """Codes by forward pass of decoding, the reading of conditions left out."""
        reports = [report for output in self.outputs for report in output.stats.reports]
        passes = sum(report.forwards for report in reports)
        codes = sum(report.tokens - 1 for report in reports)
        return float(codes / max(1, passes))

    @property
    def distance(self) -> tuple[float, float] | None:
        """Mean and largest distance of kept latents from the target's own, where it is told."""
        import numpy as np

        found = [getattr(output.stats, "distances", None) for output in self.outputs]
        known = [each[~np.isnan(each)] for each in found if each is not None]
        all_known = np.concatenate(known) if known else np.zeros(0)
        return (float(all_known.mean()), float(all_known.max())) if len(all_known) else None

    @property
    def told(self) -> str:
        """What it took, for people."""
        return f"{self.forwards} forwards, {self.seconds:.2f} s"

    def equal(self, plain: Drawn) -> list[bool]:
        """Say of each image whether it has the codes of the plain one, or its latents."""
        if self.latents is not None and plain.latents is not None:
            from ragspec.visual.evaluation.likeness import same_latents

            return same_latents(self.latents, plain.latents)
        return list(map(bool, (self.codes == plain.codes).flatten(1).all(1)))

    def parted(self, plain: Drawn) -> list[int | None]:
        """Return of each image the first code that is not the plain one's; None where all are."""
        other = (self.codes != plain.codes).flatten(1)
        return [int(row.int().argmax()) if bool(row.any()) else None for row in other]

    def psnr(self, plain: Drawn) -> float | None:
        """Return the median peak signal-to-noise ratio to the plain images, in dB, of latents.

        None for codes, and where at least half of the images are the same.
        """
        from ragspec.visual.evaluation.likeness import psnr

        if self.latents is None:
            return None
        found = [psnr(*pair) for pair in zip(self.images, plain.images, strict=True)]
        middle = float(median(found))
        return None if isinf(middle) else middle

    def ratio(self, plain: Drawn) -> float:
        """Return the median over images of plain seconds by ours."""
        pairs = zip(plain.outputs, self.outputs, strict=True)
        return float(median(one.stats.seconds / max(1e-9, two.stats.seconds) for one, two in pairs))
