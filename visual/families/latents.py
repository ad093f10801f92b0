"""Causal models of continuous latents, and the base of all families of latents."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.base import Drafter
from ragspec.reports.generation import Generation
from ragspec.reports.report import kind_of_label
from ragspec.rules.base import Rule
from ragspec.rules.walk import Walk
from ragspec.visual.call import ImageConfig, PipelineOptions
from ragspec.visual.checks import DENOISING
from ragspec.visual.drafting.jacobi import JacobiDrafter
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.families.llamagen import CodecFamily, Conditions, LlamaGen
from ragspec.visual.latents.model import LatentModel
from ragspec.visual.latents.rules import Aligned, make_latent_rule
from ragspec.visual.latents.sampler import NoiseSchedule
from ragspec.visual.latents.target import Judged, LatentDraws, LatentTarget
from ragspec.visual.loading import ImageFolder
from ragspec.visual.models.autoencoder import KLAutoencoder
from ragspec.visual.models.captions import Captions
from ragspec.visual.models.llamagen import LlamaGenModel
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.output import UNFINISHED, ImageSample, codes_of, samples_of
from ragspec.visual.rules.tv_budget import APPROXIMATE

_REASON = (
    "latents are drawn from densities, which have none of it. Leave it out, or set guidance_scale."
)


class LatentFamily(CodecFamily):
    """The base of families of continuous latents, whose rules compare densities or distances."""

    default_rule = "aligned"
    dtype = "float32"  # distributions are compared by their densities
    unit = "latents"
    codecs, shared_size = (KLAutoencoder, VQTokenizer), ("width", "latent_dim")
    unsupported = dict.fromkeys(("top_k", "top_p", "min_p", "guidance_interval", "codes"), _REASON)

    def make_rule(self, rule: str, settings: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
        """Return a rule over latents and its settings."""
        return make_latent_rule(rule, **settings), settings

    def pixels(self, codes: Tensor) -> Tensor:
        """Decode latents [B, h, w, D]."""
        return cast(Tensor, self.codec.decode_latents(codes))

    def step_values(self, target: LatentDraws, tokens: Tensor) -> Tensor:
        """Return the latents [B, n, D] by place, 0 for missing ones."""
        return target.by_place(tokens)

    def samples(
        self, generations: Sequence[Generation], target: LatentDraws, rule: Rule, raster: Raster
    ) -> list[ImageSample]:
        """Return the latents by place, and what became of the drafts."""
        samples = samples_of(generations, raster)
        for row, sample in enumerate(samples):
            generation, table = generations[row], target.table
            outcomes = np.full(raster.codes, -1, dtype=np.int64)
            distances = np.full(raster.codes, np.nan)
            judged = [table.judged.get(number) for number in generation.tokens]
            outcomes[: len(judged)] = [outcome_of(each, rule) for each in judged]
            if kind_of_label(generation.label) == APPROXIMATE:
                accepted = [each for each in judged if each is not None and each.accepted]
                distances[outcomes == 1] = table.distances(accepted)
            # Without drafts latents in order are the plain ones, whatever would judge drafts.
            plain = target.orders is None and not generation.report.drafted
            order = np.arange(raster.codes) if target.orders is None else target.orders[row].numpy()
            places = order.argsort().reshape(raster.shape)
            samples[row] = replace(
                sample,
                label=Walk.label if plain and sample.label != UNFINISHED else sample.label,
                values=self.values(target, row, generation.tokens, raster),
                map=sample.map.reshape(-1)[places],
                outcomes=outcomes[places],
                distances=distances[places],
            )
        return samples


def outcome_of(judged: Judged | None, rule: Rule) -> int:
    """Return the index in `OUTCOMES` of a verdict; `Aligned` reflects drafts."""
    if judged is None or judged.drafted is None:
        return 0
    if judged.accepted:
        return 1
    return 2 if isinstance(rule, Aligned) and judged.emitted != judged.target_number else 3


class Latents(LatentFamily, LlamaGen):
    """A `LatentModel` with the `VQTokenizer` whose latents, before the look-up, it generates.

    Args:
        steps, floor: Of the denoising, for target and draft model; None for the target's own.
    """

    kind = "ragspec-latents"
    model: LatentModel
    model_class = LatentModel
    options = DENOISING[kind] | {"text_encoder"}
    unsupported = LatentFamily.unsupported | {"temperature": _REASON}

    def __init__(
        self,
        model: LatentModel,
        tokenizer: VQTokenizer,
        folder: ImageFolder | None = None,
        *,
        steps: int | None = None,
        floor: float | None = None,
        text_encoder: str | Path | Captions | None = None,
    ) -> None:
        super().__init__(model, tokenizer, folder, text_encoder=text_encoder)
        config = model.config
        self.schedule = NoiseSchedule(
            config.steps if steps is None else steps, config.floor if floor is None else floor
        )

    @property
    def record(self) -> dict[str, object]:
        """The further arguments of the constructor to save."""
        return super().record | {"steps": self.schedule.steps, "floor": self.schedule.floor}

    @property
    def trunk(self) -> LlamaGenModel:
        """The transformer that reads conditions and latents."""
        return self.model.trunk

    def open(self, model: LatentModel, conditions: Conditions, config: ImageConfig) -> LatentTarget:
        """Return a `LatentTarget`."""
        table = conditions.table(model.trunk)
        return LatentTarget(model, table, config.guidance_scale, self.schedule)

    @torch.no_grad()
    def values(self, target: LatentTarget, row: int, tokens: list[int], raster: Raster) -> Tensor:
        """Return the latents [h, w, D] of one image."""
        return self.model.restored(target.table.latents[codes_of(tokens, raster)])

    def make_drafter(
        self, draft: Any, target: LatentTarget, conditions: Conditions, settings: PipelineOptions
    ) -> Drafter:
        """Return a drafter that runs a draft model with the target's steps and guidance."""
        if draft is None:
            return JacobiDrafter(max(1, self.nodes), width=self.raster.width)
        table = conditions.table(draft.trunk)
        scale, schedule = target.guidance_scale, target.sampler.schedule
        smaller = LatentTarget(draft, table, scale, schedule, table=target.table)
        return LatentDrafter(smaller, target, min_expected_gain=settings.min_expected_gain)

    def shared(self, model: LatentModel) -> dict[str, object]:
        """Return the sizes of latents, image and conditions, and the scale of latents."""
        scale = {name: getattr(model, name).tolist() for name in ("mean", "deviation")}
        return {**super().shared(model.trunk), "latent_dim": model.config.latent_dim, **scale}
