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
from ragspec.rules.base import Rule
from ragspec.visual import ImageOutput, ImagePipeline
from ragspec.visual.call import ImageConfig
from ragspec.visual.families.latents import Latents
from ragspec.visual.latents.rules import Coupled
from ragspec.visual.models.raster import Raster
from ragspec.visual.output import ImageSample

if TYPE_CHECKING:
    from harness.image_timing import ImageSeries


@dataclass(frozen=True, slots=True, eq=False)
class PathOutput:
    """The steps of all paths of a call, and its output.

    Attributes:
        output: Of the pipeline.
        steps: Steps that the rule judges; None if it compares no densities.
        squares, ratios: f64 [B * h * w, T], see `PathTarget`.
    """

    output: ImageOutput
    steps: int | None
    squares: torch.Tensor
    ratios: torch.Tensor


class PathLatents(Latents):
    """The family of causal latents, which keeps the paths of its last call."""

    paths: tuple[int | None, torch.Tensor, torch.Tensor]

    def open(self, model: Any, conditions: Any, config: ImageConfig) -> Any:
        """Return a `PathTarget`."""
        table = conditions.table(model.trunk)
        return PathTarget(model, table, config.guidance_scale, self.schedule)

    def samples(
        self, generations: Sequence[Generation], target: Any, rule: Rule, raster: Raster
    ) -> list[ImageSample]:
        """Return the latents, and keep their paths."""
        steps = int(min(rule.s, self.schedule.steps)) if isinstance(rule, Coupled) else None
        self.paths = (
            steps,
            torch.cat([target.squares(each.tokens, steps) for each in generations]),
            torch.cat([target.ratios(each.tokens, steps) for each in generations]),
        )
        return super().samples(generations, target, rule, raster)


def draw_paths(pipe: ImagePipeline, **call: Any) -> PathOutput:
    """Draw with a pipeline of `PathLatents`."""
    output = pipe(**call)
    assert isinstance(pipe.family, PathLatents)
    return PathOutput(output, *pipe.family.paths)


def path_moments(
    variant: Variant, base: ImagePipeline, image: ImageSeries, images: int, budget: Any, batch: int
) -> Iterator[tuple[int, PathMoments]]:
    """Draw images in batches; yield their number and figures after each batch."""
    pipe = build_latent_variant(variant, base, budget, batch, PathLatents)
    moments = PathMoments(int(base.model.config.latent_dim))
    for start in range(0, images, batch):
        numbers = range(start, min(start + batch, images))
        moments.add(draw_paths(pipe, **image.arguments(numbers), output_type="latent").squares)
        yield numbers.stop, moments


def format_moments(moments: PathMoments) -> Sequence[str]:
    """Return formatted figures: all steps, the last one, the worst deviation."""
    return (
        f"{moments.total:.5f} ± {moments.total_error:.5f}",
        f"{moments.by_step[0]:.4f} ± {moments.error:.4f}",
        f"{moments.worst:.1f}",
    )
