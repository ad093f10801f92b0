"""Causal models of continuous latents, and the base of all families of latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafters.base import Drafter
from ragspec.errors import InputError
from ragspec.reports.generation import Generation
from ragspec.reports.report import kind_of_label
from ragspec.rules.base import Rule
from ragspec.visual.call import ImageCall
from ragspec.visual.checks import DENOISING
from ragspec.visual.drafting.jacobi import JacobiDrafter
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.families.base import ImageConfig, without_settings
from ragspec.visual.families.llamagen import CodecFamily, Conditions, LlamaGen, check_trunks
from ragspec.visual.latents.judged import RecordingRule, outcome_of
from ragspec.visual.latents.rules.by_name import make_latent_rule
from ragspec.visual.latents.sampler import NoiseSchedule
from ragspec.visual.latents.target import LatentDraws, LatentTarget
from ragspec.visual.loading import ImageFolder
from ragspec.visual.models.raster import Raster
from ragspec.visual.output import ImageSamples, codes_of, samples_of
from ragspec.visual.rules.tv_budget import APPROXIMATE

ROUNDED = 0.01  # tolerance for means and deviations of the same latents, which are bfloat16


class LatentFamily(CodecFamily):
    """The base of families of continuous latents, whose rules compare densities or distances."""

    default_rule = "aligned"
    dtype = "float32"  # distributions are compared by their densities
    several_drafters = False  # drafts are chains
    unit = "latents"
    unsupported: tuple[str, ...] = ("top_k", "top_p", "min_p", "guidance_interval", "codes")

    def check(self, call: ImageCall) -> None:
        """Raise InputError for what only distributions over codes have."""
        usual = ImageCall()
        for name in self.unsupported:
            value = getattr(call, name)
            if value is not None and value != getattr(usual, name):
                raise InputError(
                    f"got {name}={value!r}; latents are drawn from densities, which have none of "
                    "it. Leave it out, or set guidance_scale."
                )

    def make_rule(self, rule: str | Rule, settings: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
        """Return a rule over latents and its settings."""
        if isinstance(rule, str):
            return make_latent_rule(rule, **settings), settings
        return without_settings(rule, settings), {}

    def judging(self, rule: Rule) -> Rule:
        """Return the rule, whose verdicts the target records."""
        return RecordingRule(rule)

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode latents [B, h, w, D]."""
        images: Tensor = self.codec.decode_latents(codes)
        return images

    def outcomes(
        self, generations: Sequence[Generation], target: LatentDraws, rule: Rule
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return outcomes i64 and distances f64 [B, N] of latents in the order of generation."""
        outcomes = np.full((len(generations), self.raster.codes), -1, dtype=np.int64)
        distances = np.full(outcomes.shape, np.nan)
        for row, generation in enumerate(generations):
            numbers = list(generation.tokens)
            outcomes[row, : len(numbers)] = [
                outcome_of(target.table.judged[n], rule) for n in numbers
            ]
            if kind_of_label(generation.label) == APPROXIMATE and numbers:
                distances[row, : len(numbers)] = target.table.distances(numbers)
        return outcomes, distances


class Latents(LatentFamily, LlamaGen):
    """A `LatentModel` with the `VQTokenizer` whose latents, before the look-up, it generates.

    Args:
        model, tokenizer, folder: See `Family`.
        steps, floor: Of the denoising, for target and draft model; None for the target's own.
    """

    kind = "ragspec-latents"
    options = DENOISING[kind] | {"text_encoder"}
    unsupported = ("temperature", *LatentFamily.unsupported)

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: ImageFolder | None = None,
        *,
        steps: int | None = None,
        floor: float | None = None,
        text_encoder: Any = None,
    ) -> None:
        super().__init__(model, tokenizer, folder, text_encoder=text_encoder)
        config, self._nodes = model.config, self.nodes
        self.schedule = NoiseSchedule(
            config.steps if steps is None else steps, config.floor if floor is None else floor
        )

    @classmethod
    def model_class(cls) -> Any:
        """Return `LatentModel`."""
        from ragspec.visual.latents.model import LatentModel

        return LatentModel

    @property
    def record(self) -> dict[str, Any]:
        """The further arguments of the constructor to save."""
        return {"steps": self.schedule.steps, "floor": self.schedule.floor}

    @property
    def trunk(self) -> Any:
        """The transformer that reads conditions and latents."""
        return self.model.trunk

    def _check_codec(self) -> None:
        width = int(self.codec.codebook().shape[1])
        if self.model.config.latent_dim != width:
            raise InputError(
                f"got a tokenizer with latents of {width} numbers for a model of "
                f"{self.model.config.latent_dim}; expected the one that the model was trained on."
            )

    def open(self, model: Any, conditions: Conditions, config: ImageConfig) -> Any:
        """Return a `LatentTarget`."""
        table = conditions.table(model.trunk)
        return LatentTarget(model, table, config.guidance_scale, self.schedule)

    @torch.no_grad()
    def samples(
        self, generations: Sequence[Generation], target: Any, rule: Rule, raster: Raster
    ) -> ImageSamples:
        """Return the latents, and what became of the drafts."""
        samples = samples_of(generations, raster)
        outcomes, distances = self.outcomes(generations, target, rule)
        latents = self.model.restored(target.table.latents[samples.codes])
        return replace(
            samples,
            codes=None,
            latents=latents,
            outcomes=raster.grid(outcomes),
            distances=raster.grid(distances),
        )

    @torch.no_grad()
    def values(self, target: Any, row: int, tokens: list[int], raster: Raster) -> Tensor:
        """Return the latents [1, h, w, D] of one complete image."""
        latents: Tensor = self.model.restored(target.table.latents[codes_of([tokens], raster)])
        return latents

    def settle(self, rule: Rule, drafter: Any, nodes: int) -> None:
        """Take note of the most latents in a draft of "jacobi"."""
        self._nodes = max(1, nodes)

    def jacobi_drafter(self, target: Any, settings: Any) -> Drafter:
        """Return a drafter from the target's last forward."""
        return JacobiDrafter(self._nodes, width=self.raster.width)

    def model_drafter(self, draft: Any, target: Any, conditions: Any, settings: Any) -> Drafter:
        """Return a drafter that runs a smaller model with the target's steps and guidance."""
        table = conditions.table(draft.trunk)
        scale, schedule = target.guidance_scale, target.sampler.schedule
        smaller = LatentTarget(draft, table, scale, schedule, table=target.table)
        return LatentDrafter(smaller, target)

    def check_draft(self, draft: Any) -> bool:
        """Return whether an object is a model of latents; raise an error if it does not fit."""
        if not isinstance(draft, self.model_class()):
            return False
        if draft.config.latent_dim != self.model.config.latent_dim:
            raise InputError(
                f"got a draft model of latents of {draft.config.latent_dim} numbers; expected "
                f"{self.model.config.latent_dim}. Draft with a model of the same latents."
            )
        check_trunks(self.trunk, draft.trunk)
        for name in ("mean", "deviation"):
            expected, actual = (getattr(each, name).float() for each in (self.model, draft))
            if not torch.allclose(expected, actual.to(expected), atol=ROUNDED, rtol=ROUNDED):
                raise InputError(
                    f"got a draft model with another {name} of latents; expected the target's, by "
                    "which both standardise. Train it beside its target."
                )
        return True
