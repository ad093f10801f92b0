"""Which drafter a pipeline over latents uses; see `drafter_choice` for those of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.errors import InputError, ModelNotFoundError, UnknownNameError
from ragspec.registry import unknown
from ragspec.visual.drafting.jacobi import JacobiDrafter
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.latents.model import LatentModel
from ragspec.visual.latents.target import LatentTarget
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.pipeline.drafter_choice import DrafterSource, DraftSource, FixedSource
from ragspec.visual.pipeline.folder import ImageFolder, check_draft, load_latents

NODES = 12  # of a draft, where nothing is said
DRAFTERS = ("auto", "jacobi", "model", "none")
ROUNDED = 0.01  # by which means and deviations of the same latents may differ: they are bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class LatentModelSource:
    """Drafts with a smaller model of the same latents, guided as the target is."""

    model: LatentModel

    def __call__(self, target: ImageTarget, conditions: DrafterSource) -> Drafter:
        """Return a `LatentDrafter` over the draft model, on the target's schedule."""
        assert isinstance(target, LatentTarget)
        draft = LatentTarget(
            self.model,
            conditions.table(self.model.trunk),
            target.guidance_scale,
            target.sampler.schedule,
            table=target.table,
        )
        return LatentDrafter(draft, target)


def latent_source(
    drafter: Any, model: LatentModel, folder: ImageFolder | None, window: int = NODES
) -> DraftSource:
    """Return what makes the drafters of a pipeline over latents.

    drafter: "jacobi" (also "auto", being the faster one), "model" (of the folder's draft/), the
    folder of a draft model, a `LatentModel`, a Drafter, a list of one of these, or None or "none".
    window: latents that "jacobi" drafts, at most. Raises UnknownNameError, ModelNotFoundError,
    TokenizerMismatchError, InputError.
    """
    if isinstance(drafter, list | tuple):
        if len(drafter) > 1:
            raise InputError(
                f"got {len(drafter)} drafters of latents; expected one: drafts are chains."
            )
        drafter = drafter[0] if drafter else None
    if drafter is None or drafter == "none":
        return FixedSource(None)
    if isinstance(drafter, str) and drafter in ("auto", "jacobi"):
        return FixedSource(JacobiDrafter(max(1, window), width=int(model.trunk.config.grid_size)))
    if isinstance(drafter, str | Path):
        drafter = load_latents(draft_folder(drafter, folder, DRAFTERS), model.device, model.dtype)
    if isinstance(drafter, LatentModel):
        check_latent_draft(model, drafter)
        return LatentModelSource(drafter)
    expect_drafter(drafter)
    return FixedSource(drafter)


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


def draft_folder(drafter: str | Path, folder: ImageFolder | None, names: Sequence[str]) -> Path:
    """Return the folder of a draft model that is given by name or path; names: of drafters.

    Raises UnknownNameError, ModelNotFoundError.
    """
    path = Path(drafter).expanduser()
    if drafter != "model":
        if isinstance(drafter, str) and not path.is_dir() and "/" not in drafter:
            raise UnknownNameError(unknown("latent drafter", drafter, list(names)))
        return path
    if folder is None or folder.draft is None:
        name = "the given model" if folder is None else folder.name
        raise ModelNotFoundError(
            f"drafter 'model': no draft model lies with {name}; expected draft/ beside target/. "
            "Give the folder of one, 'jacobi', or None."
        )
    return folder.draft
