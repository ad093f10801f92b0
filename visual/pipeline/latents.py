"""`LatentPipeline`: images of continuous latents, with the conventions of `ImagePipeline`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ragspec.budget.policy import FixedBudget
from ragspec.errors import InputError, UnsupportedModelError
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule
from ragspec.visual.latents.judged import RecordingLatentTarget, RecordingRule
from ragspec.visual.latents.model import LatentModel
from ragspec.visual.latents.rules.by_name import latent_rule
from ragspec.visual.latents.sampler import NoiseSchedule
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline.base import CodePipeline, ImageOutput
from ragspec.visual.pipeline.drafter_choice import NODES
from ragspec.visual.pipeline.folder import LATENTS, ImageFolder, caption_encoder, class_names
from ragspec.visual.pipeline.latent_source import latent_source
from ragspec.visual.pipeline.pipeline import ImagePipeline
from ragspec.visual.pipeline.request import ImageConfig
from ragspec.visual.pipeline.stats import LatentStats, fates


@dataclass
class LatentOutput(ImageOutput):
    """The output of a call; see `ImageOutput`.

    Attributes:
        stats: A `LatentStats`.
        codes: The numbers of the latents in this call.
        latents f32 [B, h, w, D]: In the scale of the autoencoder.
    """

    latents: Tensor | None = None


class LatentPipeline(ImagePipeline):
    """Generates images with a causal model of continuous latents, with or without speculation.

    Args:
        model: A `LatentModel`.
        tokenizer: The tokenizer whose latents, before the look-up, the model generates.
        drafter: "auto" or "jacobi" (the target's last forward), "model" (the smaller model beside
            it), a smaller `LatentModel` or its folder, None for plain decoding, or a Drafter over
            the numbers of latents.
        rule: A Rule or a name: "near" (r), "aligned", "horizon" (s), "path", "cspd-paper".
        steps, floor: Of the denoising, for target and draft model; None for the target's own.
        budget: Draft nodes.

    Raises:
        InputError, UnknownNameError: An argument is refused.
        UnsupportedModelError, TokenizerMismatchError: The models do not fit.
        ModelNotFoundError: A model is missing.
    """

    _default_rule: ClassVar[str] = "aligned"
    _default_set: ClassVar[str] = "latent-tiles"
    _default_dtype: ClassVar[str] = "float32"  # distributions are compared by their densities
    _model_kind: ClassVar[str] = LATENTS

    def __init__(
        self,
        model: Any,
        tokenizer: VQTokenizer,
        drafter: Any = "auto",
        rule: str | Rule = "aligned",
        *,
        steps: int | None = None,
        floor: float | None = None,
        budget: Any = NODES,
        folder: ImageFolder | None = None,
        batch_size: int = 16,
        **settings: Any,
    ) -> None:
        _check(model, tokenizer)
        CodePipeline.__init__(self, tokenizer, budget, batch_size, folder)
        config = model.config
        self.schedule = NoiseSchedule(
            config.steps if steps is None else steps, config.floor if floor is None else floor
        )
        self.side = int(model.trunk.config.grid_size)
        self.raster = Raster(self.side, self.side)
        self.rule_is_named, self.settings = isinstance(rule, str), settings
        self.rule, self.rule_name = latent_rule(rule, settings)
        nodes = self.budget.nodes if isinstance(self.budget, FixedBudget) else NODES
        self.source = latent_source(drafter, model, folder, nodes)
        self.class_names = class_names(model.trunk)
        self.captions = caption_encoder(model.trunk)
        self.register_modules(model=model, vq=tokenizer.model, draft=self.source.model)

    @property
    def trunk(self) -> Any:
        """The transformer that reads conditions and latents."""
        return self.model.trunk

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate images and return a `LatentOutput`; see `ImagePipeline`.

        The output_type "latent" returns the latents.

        Raises:
            InputError: Latents support no temperature but 1, no top_k, top_p or min_p, no
                guidance_interval, codes, height or width.
        """
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        nothing = dict.fromkeys(("guidance_interval", "codes", "height", "width"))
        for name, only in (settings | nothing).items():
            if (value := kwargs.get(name, only)) is not only and value != only:
                raise InputError(
                    f"got {name}={kwargs[name]!r}; latents are drawn from densities, which have "
                    "none of it. Leave it out, or set guidance_scale."
                )
        return super().__call__(*args, **kwargs)

    def _pixels(self, codes: Tensor) -> Tensor:
        images: Tensor = self.tokenizer.decode_latents(codes)
        return images

    def _summary(self) -> dict[str, Any]:
        return {**super()._summary(), "steps": self.schedule.steps, "floor": self.schedule.floor}

    def _judging(self) -> Rule:
        return RecordingRule(self.rule)

    def _open(self, conditions: Any, config: ImageConfig) -> ImageTarget:
        return self._target(conditions.table(self.trunk), config)

    def _target(self, table: ConditionTable, config: ImageConfig) -> ImageTarget:
        return RecordingLatentTarget(self.model, table, config.guidance_scale, self.schedule)

    @torch.no_grad()
    def _output(
        self, generations: list[Generation], seconds: float, output_type: str, target: ImageTarget
    ) -> LatentOutput:
        assert isinstance(target, RecordingLatentTarget)
        output = super()._output(generations, seconds, "latent", target)
        outcomes, distances = fates(generations, target, self.rule, self.side**2)
        base = {field.name: getattr(output.stats, field.name) for field in fields(output.stats)}
        shape = (-1, self.side, self.side)
        stats = LatentStats(
            **base, outcomes=outcomes.reshape(shape), distances=distances.reshape(shape)
        )
        latents = self.model.restored(target.table.latents[output.codes])
        images = self.decode(latents, output_type)
        return LatentOutput(
            **{**dict(output.items()), "images": images, "stats": stats}, latents=latents
        )


def _check(model: Any, tokenizer: VQTokenizer) -> None:
    if not isinstance(model, LatentModel):
        raise UnsupportedModelError(
            f"got a {type(model).__name__}; expected a LatentModel. Models of codes are drawn with "
            "by ImagePipeline."
        )
    width = int(tokenizer.codebook().shape[1])
    if model.config.latent_dim != width:
        raise InputError(
            f"got a tokenizer with latents of {width} numbers for a model of "
            f"{model.config.latent_dim}; expected the one that the model was trained on."
        )
