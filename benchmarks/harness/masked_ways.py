"""The ways of drawing with a masked model that `ragspec bench image` compares.

The names are those of latents, see `latent_ways`; `plain` is the law that drafts are judged under,
one latent an iteration, and `fewer@N` the target alone in N iterations, several latents each: what
speculation has to beat. All share the steps and the noise of the last one, so that rules which
compare densities follow the law of `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.image_ways import Variant
from harness.latent_ways import FEWER, parse_latent_variant, parse_latent_ways

if TYPE_CHECKING:
    from ragspec.visual.pipeline.masked import MaskedLatentPipeline

USUAL = ("near@0.1", "aligned", "horizon@4", "path", "fewer@32", "fewer@16", "fewer@8")


def parse_masked_variant(text: str) -> Variant:
    """Return the way that a short name stands for; raises InputError, UnknownNameError."""
    return parse_latent_variant(text, "iterations")


def parse_masked_ways(texts: Sequence[str]) -> list[Variant]:
    """Return the ways of several names, plain first, each once."""
    return parse_latent_ways(texts, "iterations")


def build_masked_variant(
    direction: Variant,
    base: MaskedLatentPipeline,
    budget: Any,
    batch_size: int,
    prefill: float = 0.0,
) -> MaskedLatentPipeline:
    """Return the pipeline of a way, over the models of `base`; raises what its class does.

    budget: latents of a draft, "auto" for the usual number. prefill: see `MaskedLatentPipeline`.
    """
    from ragspec.visual.pipeline.masked import MaskedLatentPipeline
    from ragspec.visual.pipeline.masked_drafts import window_of

    settings: dict[str, Any] = {"iterations": base.side**2}
    if direction.rule == FEWER:
        settings = dict(direction.settings)
    elif direction.drafter is not None:
        settings = {**direction.settings, "rule": direction.rule, "window": window_of(budget)}
        settings |= {"drafter": direction.drafter, "prefill": prefill}
    pipe = MaskedLatentPipeline(
        **base.components,
        steps=base.schedule.steps,
        floor=base.schedule.floor,
        batch_size=batch_size,
        **settings,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
