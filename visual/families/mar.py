"""Masked models of latents (MAR, Li et al., arXiv 2406.11838), which draw in any order.

Without a drafter the model generates several latents per iteration, as published. With one, it
keeps the distribution of one latent per iteration. The model's attention is bidirectional, so
verifying k drafted latents takes k + 1 masked prefixes in one batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.base import Drafter
from ragspec.errors import InputError
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.call import ImageCall, ImageConfig, PipelineOptions, some
from ragspec.visual.checks import DENOISING, check_setting
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.families.latents import LatentFamily
from ragspec.visual.latents.rules import Near
from ragspec.visual.latents.target import LatentDraws
from ragspec.visual.loading import MODEL, ImageFolder, is_model, read_kind
from ragspec.visual.masked import schedule as schedules
from ragspec.visual.masked.checkpoint import load_mar
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.target import MaskedTarget
from ragspec.visual.models.autoencoder import Autoencoder, KLAutoencoder
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.output import UNFINISHED, ImageSample
from ragspec.visual.run import Progress

ITERATIONS = 64  # the default in plain decoding; fewer if there are fewer latents
STEPS = 100  # of denoising, as published


class Mar(LatentFamily):
    """A `MaskedModel` with the autoencoder of its latents, a `KLAutoencoder` or `VQTokenizer`.

    Args:
        iterations: Forwards of the model, at most the number of latents. None for 64 at most, or
            for one per latent with a drafter, as drafts are judged under that distribution.
        steps: Denoising steps of each latent; None for 100, as published.
        floor: The deviation of the last step, 0 as published. Rules that compare densities need a
            positive one. None for 0, or for 0.1 with a drafter under such a rule.
        prefill: The share of latents, from 0 to below 1, that the target generates before drafting.
    """

    kind = "ragspec-masked-latents"
    model_class, load_published = MaskedModel, staticmethod(load_mar)
    plain_rule = "plain"
    nodes = 4  # each adds a masked prefix to the forward that verifies it
    adaptive_budget = False
    options = DENOISING[kind]
    sizes = ("num_attention_heads",)
    published = "kl16.ckpt"

    def __init__(
        self,
        model: MaskedModel,
        tokenizer: Autoencoder,
        folder: ImageFolder | None = None,
        *,
        iterations: int | None = None,
        steps: int | None = None,
        floor: float | None = None,
        prefill: float = 0.0,
    ) -> None:
        super().__init__(model, tokenizer, folder)
        self.iterations = iterations or 0
        if iterations is not None:
            schedules.masked_counts(self.raster.codes, iterations)  # raises InputError
        self._floor = floor
        self.schedule = schedules.LearnedSchedule(STEPS if steps is None else steps, floor or 0.0)
        check_setting("prefill", prefill)
        self.prefill, self._begin = prefill, ceil(prefill * self.raster.codes)
        self._ahead = 0

    @classmethod
    def open_tokenizer(cls, path: Path) -> Autoencoder:
        """Return the autoencoder of a folder, by its config, or of a file such as kl16.ckpt."""
        if is_model(path) and read_kind(path) == VQTokenizer.kind:
            return super().open_tokenizer(path)
        return KLAutoencoder.from_pretrained(path)

    @property
    def record(self) -> dict[str, object]:
        """The further arguments of the constructor to save."""
        record = {"steps": self.schedule.steps, "floor": self._floor}
        return {**record, "iterations": self.iterations, "prefill": self.prefill}

    def settle(self, rule: Rule, drafter: str | None, nodes: int) -> None:
        """Set what depends on drafts: the iterations, the floor and the latents of a draft."""
        super().settle(rule, drafter, nodes)
        places, drafted = self.raster.codes, drafter is not None
        if drafted and self.iterations not in (0, places):
            raise InputError(
                f"got iterations={self.iterations} with a drafter; expected {places}, one a "
                "latent: drafts are judged in order. Leave iterations out, or the drafter."
            )
        self.iterations = self.iterations or (places if drafted else min(ITERATIONS, places))
        self._ahead = 0 if drafter == MODEL else nodes
        self._needs_density = drafted and not isinstance(rule, Near)
        if self._floor is None and self._needs_density:
            self.schedule = schedules.LearnedSchedule(self.schedule.steps, schedules.FLOOR)
        self._expect_density(1.0)

    def usual_drafter(self, mode: str, named: bool) -> str | None:
        """Return "jacobi" if the user named a rule, else no drafter."""
        return "jacobi" if named else None

    def check(self, call: ImageCall) -> None:
        """Raise InputError for what latents have not."""
        super().check(call)
        check_setting("temperature", call.temperature)
        self._expect_density(call.temperature)

    def _expect_density(self, temperature: float) -> None:
        """Raise InputError if the rule compares densities and latents have none."""
        if not self._needs_density or (self.schedule.floor and temperature):
            return
        lacking = "floor 0" if temperature else f"temperature {temperature:g}"
        raise InputError(
            f"got a rule that compares densities with {lacking}; expected noise in the last "
            "denoising step: without any, a latent has no density and no draft can be judged. Set "
            "floor=0.1 (for plain drawing too, as it is another distribution) and a temperature "
            "above 0, or rule='near'."
        )

    def conditions(self, call: ImageCall, raster: Raster) -> Tensor:
        """Return the class of each image, i64 [R]."""
        return torch.tensor([self.label_of(each) for each in some(call.class_labels)])

    def open(self, model: MaskedModel, conditions: Tensor, config: ImageConfig) -> MaskedTarget:
        """Return a `MaskedTarget` over all images of a call."""
        labels, noises = conditions[list(config.rows)], [NoiseStream(seed) for seed in config.seeds]
        sampling = config.guidance_scale, config.temperature
        return MaskedTarget(model, self.schedule, labels, noises, *sampling, ahead=self._ahead)

    def prompts(self, target: MaskedTarget, config: ImageConfig) -> list[list[int]]:
        """Return the prompt of each image, an id of its own."""
        return [target.prompt(picture) for picture in range(len(config.rows))]

    def samples(
        self, generations: Sequence[Generation], target: LatentDraws, rule: Rule, raster: Raster
    ) -> list[ImageSample]:
        """Return the latents by place, what became of the drafts, and the masked prefixes."""
        samples = super().samples(generations, target, rule, raster)
        return [
            replace(sample, prefixes=sum(1 + len(step.tree) for step in generation.steps))
            for sample, generation in zip(samples, generations, strict=True)
        ]

    def values(self, target: MaskedTarget, row: int, tokens: list[int], raster: Raster) -> Tensor:
        """Return the latents [h, w, D] of one image."""
        numbers = tokens + [-1] * (raster.codes - len(tokens))
        return self._restored(target.by_place(torch.tensor([numbers]), row))[0]

    def plain_samples(
        self, conditions: Tensor, config: ImageConfig, progress: Progress
    ) -> list[ImageSample]:
        """Generate a batch without drafts, in `iterations` forwards."""
        sampler = schedules.MaskedSampler(
            self.model, self.schedule, self.iterations, config.guidance_scale, config.temperature
        )
        noises, count = [NoiseStream(seed) for seed in config.seeds], len(config.rows)
        before, labels, places = 0, conditions[list(config.rows)], self.raster.codes
        for done, latents in sampler.draw(labels, noises):
            progress.state.bar.update(count * (done - before))
            before = done
            progress.report(done, latents.clone())
            if progress.state.interrupted:
                break
        sizes = -np.diff(np.array([places, *sampler.left]))
        counts, shape = np.repeat(sizes, sizes), self.raster.shape
        counts[before:] = 0
        orders = [schedules.order_of(n, places).argsort().reshape(shape).numpy() for n in noises]
        return [
            ImageSample(
                values=each,
                label="exact" if before == places else UNFINISHED,
                map=counts[order],
                excess=np.zeros(shape),
                gaps=np.zeros(0),
                outcomes=np.where(order < before, 0, -1),
                distances=np.full(shape, np.nan),
                prefixes=1 + sampler.left.index(places - before),
            )
            for each, order in zip(self._restored(latents), orders, strict=True)
        ]

    def _restored(self, latents: Tensor) -> Tensor:
        return cast(Tensor, self.model.restored(latents).unflatten(1, self.raster.shape))

    def make_drafter(
        self, draft: Any, target: MaskedTarget, conditions: object, settings: PipelineOptions
    ) -> Drafter:
        """Return a drafter that runs a draft model, if any, over the target's table."""
        smaller = None
        if draft is not None:
            pictures = target.schedule, target.labels, target.noises
            smaller = MaskedTarget(draft, *pictures, target.guidance_scale, target.temperature)
            smaller.table = target.table  # latents have one number in both
        return LatentDrafter(smaller, target, self.nodes, settings.min_expected_gain, self._begin)

    def shared(self, model: MaskedModel) -> dict[str, object]:
        """Return the sizes of latents, image and conditions, and the scale of latents."""
        names = ("latent_dim", "grid_size", "num_classes", "mean", "deviation")
        return {name: getattr(model.config, name) for name in names}
