"""How `ragspec draw` loads a masked model of latents: plainly, or with drafts for a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragspec.pipelines.cli.drawn import Asked
    from ragspec.visual.pipeline.masked import MaskedLatentPipeline

_DRAFTED = "jacobi"


def load_masked_pipeline(asked: Asked) -> MaskedLatentPipeline:
    """Return the pipeline that was asked for; raises what `MaskedLatentPipeline` does.

    Drawing is plain, as published, unless a rule or a drafter is named; then the last denoising
    step has noise where nothing else is said, as rules that compare densities need it.
    """
    from ragspec.visual.masked.schedule import FLOOR
    from ragspec.visual.pipeline.masked import MaskedLatentPipeline
    from ragspec.visual.pipeline.masked_drafts import window_of

    given = {name: value for name, value in asked.denoising.items() if value is not None}
    drafter = tuple(_DRAFTED if name == "auto" else name for name in asked.drafter)
    if drafter == (_DRAFTED,) and asked.drafter == ("auto",) and asked.rule is None:
        drafter = ()
    if drafter:
        given = {"floor": FLOOR, "window": window_of(asked.budget), **given}
    return MaskedLatentPipeline.from_pretrained(
        asked.source(),
        drafter=drafter or None,
        rule=asked.rule or "aligned",
        device=asked.device,
        dtype="float32" if asked.dtype == "auto" else asked.dtype,
        **given,
        **asked.given(),
    )
