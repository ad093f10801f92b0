"""The variants of drawing with a masked model that `bench.py image` compares.

The names are those of latents, see `latent_variants`. `plain` draws one latent an iteration, and
rules judge drafts under its distribution. `fewer@N` is the target alone in N iterations of several
latents, which speculation has to beat. All variants share the steps and the noise of the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.image_variants import Variant
from harness.latent_variants import FEWER, parse_latent_variants

if TYPE_CHECKING:
    from ragspec.visual import ImagePipeline

USUAL = ("near@0.1", "aligned", "horizon@4", "path", "fewer@32", "fewer@16", "fewer@8")


def parse_masked_variants(texts: Sequence[str]) -> list[Variant]:
    """Return the variants of several names without duplicates, plain first."""
    return parse_latent_variants(texts, "iterations")


def build_masked_variant(
    variant: Variant, base: ImagePipeline, budget: Any, batch_size: int, prefill: float = 0.0
) -> ImagePipeline:
    """Return the pipeline of a variant over the models of `base`.

    Args:
        variant: Variant to build.
        base: Pipeline whose models all variants share.
        budget: Latents of a draft; "auto" for the default.
        batch_size: Images to draw at once.
        prefill: Share of latents to draw before drafting.
    """
    from ragspec.visual import ImagePipeline
    from ragspec.visual.masked.schedule import FLOOR

    family = base.family
    settings: dict[str, Any] = {"iterations": family.raster.codes}
    if variant.rule == FEWER:
        settings = dict(variant.settings)
    elif variant.drafter is not None:
        settings = {**variant.settings, "rule": variant.rule, "budget": budget}
        settings |= {"drafter": variant.drafter, "prefill": prefill}
    pipe = ImagePipeline(
        **base.components,
        steps=family.schedule.steps,
        floor=family.schedule.floor or FLOOR,
        batch_size=batch_size,
        **settings,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
