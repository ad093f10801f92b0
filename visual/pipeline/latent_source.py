"""The choice of a drafter over causal or masked latents; see `drafter_choice` for codes."""

from __future__ import annotations

from collections.abc import Callable
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
    NODES,
    Conditions,
    DraftKit,
    DraftSource,
    choose_drafter,
)
from ragspec.visual.pipeline.folder import LATENTS, MASKED, ImageFolder, check_draft, load_model

ROUNDED = 0.01  # tolerance for means and deviations of the same latents, which are bfloat16


def latent_source(
    drafter: Any, model: LatentModel, folder: ImageFolder | None, window: int = NODES
) -> DraftSource:
    """Return the source of the drafters of a causal model of latents; see `choose_drafter`.

    Args:
        window: The most latents in a draft of "jacobi".
    """
    width = int(model.trunk.config.grid_size)
    jacobi = JacobiDrafter(max(1, window), width=width)

    def of(draft: Any) -> DraftSource | None:
        if not isinstance(draft, LatentModel):
            return None
        check_latent_draft(model, draft)

        def make(target: LatentTarget, conditions: Conditions) -> Drafter:
            table = conditions.table(draft.trunk)
            scale, schedule = target.guidance_scale, target.sampler.schedule
            smaller = LatentTarget(draft, table, scale, schedule, table=target.table)
            return LatentDrafter(smaller, target)

        return DraftSource("model", make, draft)

    return _choose(drafter, model, folder, LATENTS, lambda target, conditions: jacobi, of)


def _choose(
    drafter: Any,
    model: Any,
    folder: ImageFolder | None,
    kind: str,
    jacobi: Callable[[Any, Any], Drafter],
    of: Callable[[Any], DraftSource | None],
) -> DraftSource:
    """Return the source of one drafter over latents; see `choose_drafter`."""
    kit = DraftKit(
        JACOBI,
        lambda: DraftSource(JACOBI, jacobi),
        {"model": None if folder is None else folder.draft},
        lambda path: load_model(path, model.device, model.dtype, kind),
        of,
        several=False,
    )
    return choose_drafter(drafter, kit)


def check_latent_draft(target: LatentModel, draft: LatentModel) -> None:
    """Raise InputError or TokenizerMismatchError for a draft model that does not fit the target.

    Both must agree in the width, means and deviations of latents, the image size and conditions.
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
    """Return the source of the drafters of a masked model of latents; see `choose_drafter`.

    Args:
        window: The most latents in a draft.
        prefill: The share of latents, from 0 to below 1, that the target generates before drafting.

    Raises:
        InputError: window or prefill is out of range, or `choose_drafter` refuses the drafter.
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

    return _choose(drafter, model, folder, MASKED, jacobi, of)


def _check_masked_draft(model: MaskedModel, draft: MaskedModel) -> None:
    """Raise InputError for a draft model of other latents, grids or classes than the target's."""
    for name in ("latent_dim", "grid_size", "num_classes", "mean", "deviation"):
        ours, theirs = (
            torch.tensor(getattr(each.config, name), dtype=torch.float64) for each in (model, draft)
        )
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, ROUNDED, ROUNDED):
            raise InputError(
                f"got a draft model with {name} {theirs.tolist()}; expected {ours.tolist()}, the "
                "target's. Draft with a model that was trained on the same latents."
            )
