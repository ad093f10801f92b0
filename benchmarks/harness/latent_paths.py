"""Mean squares of committed paths' steps by way of drawing: whether a rule keeps the law."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.image_ways import Variant
from harness.latent_moments import PathMoments, PathTarget
from harness.latent_ways import build_latent_variant
from ragspec.engine.output import Generation
from ragspec.visual.latents.judged import steps_of
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.pipeline.latents import LatentOutput, LatentPipeline
from ragspec.visual.pipeline.request import ImageConfig

if TYPE_CHECKING:
    from harness.image_timing import ImageConfig


@dataclass
class PathOutput(LatentOutput):
    """See `LatentOutput`. squares, ratios f64 [B * h * w, T]: see `PathTarget`.

    steps: by which the rule judges, None where it compares no densities.
    """

    steps: int | None = None
    squares: torch.Tensor | None = None
    ratios: torch.Tensor | None = None


class PathPipeline(LatentPipeline):
    """A `LatentPipeline` that tells how large the steps of all committed paths are."""

    def _target(self, table: ConditionTable, config: ImageConfig) -> ImageTarget:
        return PathTarget(self.model, table, config.guidance_scale, self.schedule)

    def _output(
        self, sample: list[Generation], seconds: float, output_type: str, target: ImageTarget
    ) -> PathOutput:
        assert isinstance(target, PathTarget)
        instance = super()._output(sample, seconds, output_type, target)
        steps = steps_of(self.rule, self.schedule.steps)
        return PathOutput(
            **dict(instance.items()),
            steps=steps,
            squares=torch.cat([target.squares(each.tokens, steps) for each in sample]),
            ratios=torch.cat([target.ratios(each.tokens, steps) for each in sample]),
        )


def path_moments(
    direction: Variant,
    base: LatentPipeline,
    image: ImageConfig,
    images: int,
    budget: Any,
    batch: int,
) -> Iterator[tuple[int, PathMoments]]:
    """Draw images in batches; after each yield how many there are, and their figures so far."""
    pipe = build_latent_variant(direction, base, budget, batch, PathPipeline)
    result = PathMoments(int(base.model.config.latent_dim))
    for start in range(0, images, batch):
        numbers = range(start, min(start + batch, images))
        out = pipe(**image.arguments(numbers), output_type="latent")
        result.add(out.squares)
        yield numbers.stop, result


def conditioning(moments: PathMoments) -> Sequence[str]:
    """Return the figures of a way, for people: all steps, the last one, the worst deviation."""
    return (
        f"{moments.total:.5f} ± {moments.total_error:.5f}",
        f"{moments.by_step[0]:.4f} ± {moments.error:.4f}",
        f"{moments.worst:.1f}",
    )
