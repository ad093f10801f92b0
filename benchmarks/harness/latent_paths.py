"""Mean squares of committed paths' steps by variant: a test of lossless rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.image_variants import Variant
from harness.latent_moments import PathMoments, PathTarget
from harness.latent_variants import build_latent_variant
from ragspec.reports.generation import Generation
from ragspec.visual.latents.judged import steps_of
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.pipeline.latents import LatentOutput, LatentPipeline
from ragspec.visual.pipeline.request import ImageConfig

if TYPE_CHECKING:
    from harness.image_timing import ImageSeries


@dataclass
class PathOutput(LatentOutput):
    """A `LatentOutput` with the steps of all paths.

    Attributes:
        steps: Steps that the rule judges; None if it compares no densities.
        squares, ratios: f64 [B * h * w, T], see `PathTarget`.
    """

    steps: int | None = None
    squares: torch.Tensor | None = None
    ratios: torch.Tensor | None = None


class PathPipeline(LatentPipeline):
    """A `LatentPipeline` that returns the sizes of the steps of all committed paths."""

    def _target(self, table: ConditionTable, config: ImageConfig) -> ImageTarget:
        return PathTarget(self.model, table, config.guidance_scale, self.schedule)

    def _output(
        self, generations: list[Generation], seconds: float, output_type: str, target: ImageTarget
    ) -> PathOutput:
        assert isinstance(target, PathTarget)
        output = super()._output(generations, seconds, output_type, target)
        steps = steps_of(self.rule, self.schedule.steps)
        return PathOutput(
            **dict(output.items()),
            steps=steps,
            squares=torch.cat([target.squares(each.tokens, steps) for each in generations]),
            ratios=torch.cat([target.ratios(each.tokens, steps) for each in generations]),
        )


def path_moments(
    variant: Variant, base: LatentPipeline, image: ImageSeries, images: int, budget: Any, batch: int
) -> Iterator[tuple[int, PathMoments]]:
    """Draw images in batches; yield their number and figures after each batch."""
    pipe = build_latent_variant(variant, base, budget, batch, PathPipeline)
    moments = PathMoments(int(base.model.config.latent_dim))
    for start in range(0, images, batch):
        numbers = range(start, min(start + batch, images))
        out = pipe(**image.arguments(numbers), output_type="latent")
        moments.add(out.squares)
        yield numbers.stop, moments


def format_moments(moments: PathMoments) -> Sequence[str]:
    """Return formatted figures: all steps, the last one, the worst deviation."""
    return (
        f"{moments.total:.5f} ± {moments.total_error:.5f}",
        f"{moments.by_step[0]:.4f} ± {moments.error:.4f}",
        f"{moments.worst:.1f}",
    )
