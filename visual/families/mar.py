"""Masked models of latents (MAR, Li et al., arXiv 2406.11838), which draw in any order.

Without a drafter the model generates several latents per iteration, as published. With one, it
keeps the distribution of one latent per iteration. The model's attention is bidirectional, so
verifying k drafted latents takes k + 1 masked prefixes in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafters.base import Drafter
from ragspec.errors import InputError, ModelNotFoundError, UnsupportedModelError
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.call import ImageCall, some
from ragspec.visual.checks import DENOISING, check_setting
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.families.base import ImageConfig, ModelFiles
from ragspec.visual.families.latents import ROUNDED, LatentFamily
from ragspec.visual.families.llamagen import file_dtype
from ragspec.visual.latents.rules.by_name import Near
from ragspec.visual.loading import ImageFolder, class_labels, is_model, read_kind
from ragspec.visual.masked.sampler import MaskedSampler, order_of
from ragspec.visual.masked.schedule import FLOOR, LearnedSchedule, masked_counts
from ragspec.visual.masked.target import MaskedTarget
from ragspec.visual.models.kl import KLAutoencoder
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.output import UNFINISHED, ImageSamples, samples_of
from ragspec.visual.progress import Progress

ITERATIONS = 64  # the default in plain decoding; fewer if there are fewer latents
STEPS = 100  # of denoising, as published


class Mar(LatentFamily):
    """A `MaskedModel` with the autoencoder of its latents, a `KLAutoencoder` or `VQTokenizer`.

    Args:
        model, tokenizer, folder: See `Family`.
        iterations: Forwards of the model, at most the number of latents. None for 64 at most, or
            for one per latent with a drafter, as drafts are judged under that distribution.
        steps: Denoising steps of each latent; None for 100, as published.
        floor: The deviation of the last step, 0 as published. Rules that compare densities need a
            positive one. None for 0, or for 0.1 with a drafter under such a rule.
        prefill: The share of latents, from 0 to below 1, that the target generates before drafting.
    """

    kind = "ragspec-masked-latents"
    plain_rule = "plain"
    nodes = 4  # each adds a masked prefix to the forward that verifies it
    adaptive_budget = False
    options = DENOISING[kind]
    sizes = ("num_attention_heads",)
    published = "kl16.ckpt"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        folder: ImageFolder | None = None,
        *,
        iterations: int | None = None,
        steps: int | None = None,
        floor: float | None = None,
        prefill: float = 0.0,
    ) -> None:
        super().__init__(model, tokenizer, folder)
        self.codec = _checked_autoencoder(model, tokenizer)
        side = int(model.config.grid_size)
        self.raster, self.condition = Raster(side, side), "class_labels"
        self.class_names = class_labels(model.config.to_dict()) or ()
        self.iterations = iterations or 0
        if iterations is not None:
            masked_counts(side**2, iterations)  # raises InputError
        self._floor = floor
        self.schedule = LearnedSchedule(STEPS if steps is None else steps, floor or 0.0)
        check_setting("prefill", prefill)
        self.prefill, self._window, self._ahead = prefill, self.nodes, 0

    @classmethod
    def model_class(cls) -> Any:
        """Return `MaskedModel`."""
        from ragspec.visual.masked.model import MaskedModel

        return MaskedModel

    @classmethod
    def tokenizer_beside(cls, files: ModelFiles) -> Any:
        """Return vae/ of a folder, or the tokenizer."""
        vae = files.folder.target.parent / "vae"
        return vae if is_model(vae) else super().tokenizer_beside(files)

    @classmethod
    def load_file(
        cls, path: Path, device: torch.device, dtype: str | torch.dtype, **sizes: Any
    ) -> Any:
        """Return the model of a published file such as checkpoint-last.pth; see `load_mar`."""
        from ragspec.visual.masked.checkpoint import load_mar

        return load_mar(path, dtype=file_dtype(dtype, device), **sizes).to(device)

    @classmethod
    def open_tokenizer(cls, path: Path) -> Any:
        """Return the autoencoder of a folder, by its config, or of a file such as kl16.ckpt."""
        if not path.exists():
            raise ModelNotFoundError(
                f"got the autoencoder {str(path)!r}, which does not exist; expected another."
            )
        if is_model(path) and read_kind(path) == VQTokenizer.kind:
            return super().open_tokenizer(path)
        return KLAutoencoder.from_pretrained(path)

    def save(self, root: Path, **options: Any) -> None:
        """Write target/ and vae/ or tokenizer/."""
        self.model.save_pretrained(root / "target", **options)
        part = "vae" if isinstance(self.codec, KLAutoencoder) else "tokenizer"
        self.codec.save_pretrained(root / part, dtype=torch.float32)

    @property
    def record(self) -> dict[str, Any]:
        """The further arguments of the constructor to save."""
        record = {"steps": self.schedule.steps, "floor": self._floor}
        return {**record, "iterations": self.iterations, "prefill": self.prefill}

    def settle(self, rule: Rule, drafter: Any, nodes: int) -> None:
        """Set what depends on drafts: the iterations, the floor and the latents of a draft."""
        places, drafted = self.raster.codes, drafter.name is not None
        if drafted and self.iterations not in (0, places):
            raise InputError(
                f"got iterations={self.iterations} with a drafter; expected {places}, one a "
                "latent: drafts are judged in order. Leave iterations out, or the drafter."
            )
        self.iterations = self.iterations or (places if drafted else min(ITERATIONS, places))
        self._window, self._ahead = nodes, nodes if drafter.model is None else 0
        self._needs_density = drafted and not isinstance(rule, Near)
        if self._floor is None and self._needs_density:
            self.schedule = LearnedSchedule(self.schedule.steps, FLOOR)
        self._expect_density(1.0)

    def usual_drafter(self, mode: str, named: bool) -> str | None:
        """Return "jacobi" if the user named a rule, else no drafter."""
        return "jacobi" if named else None

    def check(self, call: ImageCall) -> None:
        """Raise InputError for what latents have not."""
        super().check(call)
        if call.prompt is not None or call.negative_prompt:
            raise InputError("got a prompt; expected class_labels: the model draws classes.")
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
        if call.class_labels is None:
            raise InputError("got nothing to draw; expected class_labels.")
        return torch.tensor([self.label_of(label) for label in some(call.class_labels)])

    def open(self, model: Any, conditions: Tensor, config: ImageConfig) -> Any:
        """Return a `MaskedTarget` over all images of a call."""
        return MaskedTarget(
            model,
            self.schedule,
            conditions[list(config.rows)],
            [NoiseStream(seed) for seed in config.seeds],
            config.guidance_scale,
            config.temperature,
            ahead=self._ahead,
        )

    def prompts(self, target: Any, config: ImageConfig) -> list[list[int]]:
        """Return the prompt of each image, an id of its own."""
        return [target.prompt(picture) for picture in range(len(config.rows))]

    def samples(
        self, generations: Sequence[Generation], target: Any, rule: Rule, raster: Raster
    ) -> ImageSamples:
        """Return the latents by place, and what became of the drafts."""
        samples = samples_of(generations, raster)
        numbers = [torch.tensor(each.tokens, dtype=torch.int64) for each in generations]
        outcomes, distances = self.outcomes(generations, target, rule)
        placed = (_placed(each, target.orders) for each in (samples.maps, outcomes, distances))
        maps, outcomes, distances = (raster.grid(each) for each in placed)
        return replace(
            samples,
            codes=None,
            maps=maps,
            outcomes=outcomes,
            distances=distances,
            latents=self._restored(latents_of(target, numbers)),
            prefixes=target.prefixes,
        )

    def step_tensor(self, target: Any) -> tuple[str, Callable[[Tensor], Tensor]]:
        """Return what maps numbers of latents i64 [B, N], -1 for missing ones, to latents."""
        return "latents", lambda numbers: latents_of(target, [row[row >= 0] for row in numbers])

    def values(self, target: Any, row: int, tokens: list[int], raster: Raster) -> Tensor:
        """Return the latents [1, h, w, D] of one complete image."""
        numbers = [
            torch.tensor(tokens if each == row else []) for each in range(len(target.orders))
        ]
        return self._restored(latents_of(target, [each.long() for each in numbers])[row : row + 1])

    def plain_samples(
        self, conditions: Tensor, config: ImageConfig, progress: Progress
    ) -> ImageSamples:
        """Generate a batch without drafts, in `iterations` forwards."""
        sampler = MaskedSampler(
            self.model, self.schedule, self.iterations, config.guidance_scale, config.temperature
        )
        noises, count = [NoiseStream(seed) for seed in config.seeds], len(config.rows)
        before = 0

        def after(done: int, latents: Tensor) -> bool:
            nonlocal before
            progress.bar.update(count * (done - before))
            before = done
            progress.report(done, latents.clone())
            return not progress.interrupted

        labels, places = conditions[list(config.rows)], self.raster.codes
        latents = sampler.draw(labels, noises, after)
        sizes = -np.diff(np.array([places, *sampler.left]))
        maps = np.tile(np.repeat(sizes, sizes), (count, 1))
        orders = torch.stack([order_of(noise, places) for noise in noises])
        grid = self.raster.grid
        return ImageSamples(
            maps=grid(_placed(maps, orders)),
            labels=["exact" if before == places else UNFINISHED] * count,
            excess=grid(np.zeros(maps.shape)),
            latents=self._restored(latents),
            outcomes=grid(np.zeros_like(maps)),
            distances=grid(np.full(maps.shape, np.nan)),
            prefixes=count * self.iterations,
            iterations=self.iterations,
        )

    def _restored(self, latents: Tensor) -> Tensor:
        restored: Tensor = self.model.restored(latents).unflatten(1, self.raster.shape)
        return restored

    def jacobi_drafter(self, target: Any, settings: Any) -> Drafter:
        """Return a drafter from the target's last forward."""
        return LatentDrafter(None, target, self._window, begin=self._begin)

    def model_drafter(self, draft: Any, target: Any, conditions: Any, settings: Any) -> Drafter:
        """Return a drafter that runs a smaller model over the target's table."""
        smaller = MaskedTarget(
            draft,
            target.schedule,
            target.labels,
            target.noises,
            target.guidance_scale,
            target.temperature,
            table=target.table,
        )
        return LatentDrafter(smaller, target, self._window, begin=self._begin)

    @property
    def _begin(self) -> int:
        return ceil(self.prefill * self.raster.codes)

    def check_draft(self, draft: Any) -> bool:
        """Return whether an object is a masked model; raise InputError if it does not fit."""
        if not isinstance(draft, self.model_class()):
            return False
        for name in ("latent_dim", "grid_size", "num_classes", "mean", "deviation"):
            expected, actual = (
                torch.tensor(getattr(each.config, name), dtype=torch.float64)
                for each in (self.model, draft)
            )
            same = expected.shape == actual.shape
            if not same or not torch.allclose(expected, actual, ROUNDED, ROUNDED):
                raise InputError(
                    f"got a draft model with {name} {actual.tolist()}; expected "
                    f"{expected.tolist()}. Draft with a model that was trained on the same latents."
                )
        return True


def latents_of(target: MaskedTarget, numbers: Sequence[Tensor]) -> Tensor:
    """Return latents [B, N, D] by place, from the numbers of each image's latents in its order."""
    table = target.table
    latents = table.latents.new_zeros(len(numbers), target.model.places, table.paths.shape[-1])
    for row, order, each in zip(latents, target.orders, numbers, strict=True):
        row[order[: len(each)].to(latents.device)] = table.latents[each.to(latents.device)]
    return latents


def _placed(values: NDArray[Any], orders: Tensor) -> NDArray[Any]:
    """Reorder values [B, N] from the order of generation to the places."""
    values = values.reshape(len(orders), -1)
    places = np.empty_like(values)
    np.put_along_axis(places, orders.numpy(), values, axis=1)
    return places


def _checked_autoencoder(model: Any, autoencoder: Any) -> Any:
    if not isinstance(autoencoder, VQTokenizer | KLAutoencoder):
        raise UnsupportedModelError(
            f"got a {type(autoencoder).__name__} as tokenizer; expected a KLAutoencoder or a "
            "VQTokenizer. Wrap a diffusers model in one of them."
        )
    if autoencoder.width != model.config.latent_dim:
        raise InputError(
            f"got an autoencoder with latents of {autoencoder.width} numbers for a model of "
            f"{model.config.latent_dim}; expected the one that the model was trained on."
        )
    return autoencoder
