"""Which drafter a pipeline over latents uses, causal or masked; see `drafter_choice` for codes."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch

from ragspec.drafters.base import Drafter
from ragspec.errors import InputError
from ragspec.visual.checks import checked_count, is_number
from ragspec.visual.drafting.jacobi import JacobiDrafter
from ragspec.visual.drafting.latent_model import LatentDrafter, MaskedJacobiDrafter
from ragspec.visual.latents.model import LatentModel
from ragspec.visual.latents.target import LatentTarget
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.target import MaskedTarget
from ragspec.visual.pipeline.drafter_choice import (
    JACOBI,
    DraftKit,
    DraftSource,
    ImageConditions,
    choose_drafter,
)
from ragspec.visual.pipeline.folder import LATENTS, MASKED, ImageFolder, check_draft, load_model

NODES = 12  # of a draft, where nothing is said
ROUNDED = 0.01  # by which means and deviations of the same latents may differ: they are bfloat16
_SAME = ("latent_dim", "grid_size", "num_classes", "mean", "deviation")


def latent_source(
    drafter: Any, model: LatentModel, folder: ImageFolder | None, window: int = NODES
) -> DraftSource:
    """Return what makes the drafters of a causal model of latents; see `choose_drafter`.

    Args:
        window: Latents that "jacobi" drafts, at most.
    """
    width = int(model.trunk.config.grid_size)
    jacobi = JacobiDrafter(max(1, window), width=width)

    def of(draft: Any) -> DraftSource | None:
        if not isinstance(draft, LatentModel):
            return None
        check_latent_draft(model, draft)

        def make(target: LatentTarget, conditions: ImageConditions) -> Drafter:
            table = conditions.table(draft.trunk)
            scale, schedule = target.guidance_scale, target.sampler.schedule
            smaller = LatentTarget(draft, table, scale, schedule, table=target.table)
            return LatentDrafter(smaller, target)

        return DraftSource("model", make, draft)

    return choose_drafter(
        drafter,
        DraftKit(
            JACOBI,
            lambda: DraftSource(JACOBI, lambda target, conditions: jacobi),
            {"model": None if folder is None else folder.draft},
            lambda path: load_model(path, model.device, model.dtype, LATENTS),
            of,
            several=False,
        ),
    )


def check_latent_draft(target: LatentModel, draft: LatentModel) -> None:
    """Raise InputError or TokenizerMismatchError for a draft of other latents than the target's.

    Their width, means and deviations must be the same, and the images' size and conditions.
    """
    if draft.config.latent_dim != target.config.latent_dim:
        raise InputError(
            f"got a draft model of latents of {draft.config.latent_dim} numbers; expected "
            f"{target.config.latent_dim}, the target's. Draft with a model of the same latents."
        )
    check_draft(target.trunk, draft.trunk)
    for name in ("mean", "deviation"):
        ours, theirs = (getattr(each, name).float() for each in (target, draft))
        if not torch.allclose(ours, theirs.to(ours), atol=ROUNDED, rtol=ROUNDED):
            raise InputError(
                f"got a draft model with another {name} of latents; expected the target's, by "
                "which both standardise. Train it beside its target."
            )


def masked_source(
    drafter: Any, model: MaskedModel, folder: ImageFolder | None, window: int, prefill: float
) -> DraftSource:
    """Return what makes the drafters of a masked model of latents; see `choose_drafter`.

    Args:
        window: Latents of a draft, at most.
        prefill: Share of the latents that the target draws alone before drafting begins.
    """
    checked_count(window, "window")
    if not is_number(prefill) or not 0.0 <= prefill < 1.0:
        raise InputError(
            f"got prefill {prefill!r}; expected a share of the latents from 0 to below 1, such as "
            "0.05."
        )
    begin = ceil(prefill * model.places)

    def jacobi(target: MaskedTarget, conditions: None) -> Drafter:
        return MaskedJacobiDrafter(target, window, begin=begin)

    def of(draft: Any) -> DraftSource | None:
        if not isinstance(draft, MaskedModel):
            return None
        _check_masked_draft(model, draft)

        def make(target: MaskedTarget, conditions: None) -> Drafter:
            smaller = MaskedTarget(
                draft,
                target.schedule,
                target.labels,
                target.noises,
                target.guidance_scale,
                target.temperature,
                table=target.table,
            )
            return LatentDrafter(smaller, target, window, begin=begin)

        return DraftSource("model", make, draft)

    return choose_drafter(
        drafter,
        DraftKit(
            JACOBI,
            lambda: DraftSource(JACOBI, jacobi),
            {"model": None if folder is None else folder.draft},
            lambda path: load_model(path, model.device, model.dtype, MASKED),
            of,
            several=False,
        ),
    )


def _check_masked_draft(model: MaskedModel, draft: MaskedModel) -> None:
    """Raise InputError for a draft of other latents than the target's."""
    for name in _SAME:
        ours, theirs = (
            torch.tensor(getattr(each.config, name), dtype=torch.float64) for each in (model, draft)
        )
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, ROUNDED, ROUNDED):
            raise InputError(
                f"got a draft model with {name} {theirs.tolist()}; expected {ours.tolist()}, the "
                "target's. Draft with a model that was trained on the same latents."
            )
