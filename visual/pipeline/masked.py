"""`MaskedLatentPipeline`: images of a masked model (MAR), with the conventions of `ImagePipeline`.

Without a drafter it draws as published: several latents an iteration. With one, it keeps the law of
one latent an iteration; the model's attention looks both ways, so that to verify k drafted latents
takes k + 1 masked prefixes side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from numpy.typing import NDArray

from ragspec.acceptance.base import Rule
from ragspec.engine.output import Generation
from ragspec.errors import InputError, ModelNotFoundError, UnsupportedModelError
from ragspec.models.device import pick_device, pick_dtype
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.checks import checked_count, class_number
from ragspec.visual.latents.rules.by_name import latent_rule
from ragspec.visual.masked.checkpoint import load_mar
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.sampler import MaskedSampler
from ragspec.visual.masked.schedule import LearnedSchedule, masked_counts
from ragspec.visual.models.kl import KLAutoencoder
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline.folder import (
    ImageFolder,
    class_names,
    find_folder,
    load_masked,
    load_tokenizer,
)
from ragspec.visual.pipeline.latent_stats import fates
from ragspec.visual.pipeline.masked_drafts import (
    WINDOW,
    MaskedDrafts,
    MaskedProgress,
    latents_of,
    masked_source,
)
from ragspec.visual.pipeline.masked_stats import MaskedStats, placed
from ragspec.visual.pipeline.output import acceptance_of, label_for
from ragspec.visual.pipeline.pipeline import OUTPUTS
from ragspec.visual.pipeline.request import checked_callback, seeds_of, some

TENSORS = ("latents",)  # what a callback may ask for
PLAIN = "plain"  # the name of drawing without drafts
_DECODED = 64  # images that the autoencoder decodes at once

Autoencoder = VQTokenizer | KLAutoencoder


@dataclass
class MaskedOutput(BaseOutput):  # type: ignore[misc, unused-ignore]
    """What a call returns, for B images of h * w latents.

    images: see `ImageOutput`; latents for output_type "latent". stats: see `MaskedStats`.
    acceptance_map i64 [B, h, w]: how many latents came with the forward that gave this one. label:
    exact where nothing is speculated, else the rule's, or unfinished where a callback ended the
    call early. latents f32 [B, h, w, D]: as the autoencoder knows them.
    """

    images: Any
    stats: MaskedStats
    acceptance_map: NDArray[Any]
    label: str
    latents: torch.Tensor


class MaskedLatentPipeline(DiffusionPipeline):  # type: ignore[misc, unused-ignore]
    """Draws images of classes with a masked model of continuous latents.

    model: a `MaskedModel`. autoencoder: of its latents. iterations: forwards of the model, no more
    than there are latents; None for 64 at most, and with a drafter one a latent, whose law drafts
    are judged under. steps: of the denoising of each latent. floor: the deviation of the last of
    them, 0 as published; rules that compare densities need some. drafter: None for plain drawing,
    "jacobi" (what the target's last forward drew), "model" (the smaller one that lies with it), a
    smaller `MaskedModel` or its folder. rule: a Rule or a name and its settings, see
    `make_latent_rule`. window: latents of a draft, at most. prefill: share of the latents that the
    target draws alone before drafting begins. batch_size: images that are drawn side by side.
    Raises InputError, UnsupportedModelError, UnknownNameError, ModelNotFoundError.
    """

    # Where diffusers tells what a callback may ask for.
    _callback_tensor_inputs: ClassVar[list[str]] = list(TENSORS)

    def __init__(
        self,
        model: MaskedModel,
        autoencoder: Autoencoder,
        *,
        iterations: int | None = None,
        steps: int = 100,
        floor: float = 0.0,
        drafter: Any = None,
        rule: str | Rule = "aligned",
        window: int = WINDOW,
        prefill: float = 0.0,
        batch_size: int = 16,
        folder: ImageFolder | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        _check(model, autoencoder)
        self.autoencoder = autoencoder
        self.side = int(model.config.grid_size)
        self.schedule = LearnedSchedule(steps, floor)
        self.rule, name = latent_rule(rule, settings)
        source = masked_source(drafter, model, folder)
        self.drafts = None if source is None else MaskedDrafts(source, self.rule, window, prefill)
        self.rule_name = PLAIN if self.drafts is None else name
        if self.drafts is not None:
            self.drafts.check(self.schedule, 1.0)
        self.iterations = _iterations(iterations, self.side**2, self.drafts is not None)
        self.batch_size = checked_count(batch_size, "batch_size")
        self.folder = folder
        self.class_names = class_names(model)
        self.image_processor = VaeImageProcessor(vae_scale_factor=autoencoder.reduction)
        draft = source if isinstance(source, MaskedModel) else None
        self.register_modules(model=model, vae=autoencoder.model, draft=draft)
        self._interrupt = False

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        autoencoder: Autoencoder | str | Path | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "float32",
        num_attention_heads: int | None = None,
        allow_namespace: bool = False,
        **settings: Any,
    ) -> Self:
        """Return a pipeline over a folder that `save_pretrained` wrote, or a published checkpoint.

        name: a bundled set ("masked-tiles"), a folder with target/ and tokenizer/ or vae/ (and
        draft/), or a file such as checkpoint-last.pth.
        autoencoder: a published file (kl16.ckpt) or a folder in diffusers' layout; needed beside a
        file. num_attention_heads, allow_namespace: of files, see `load_mar`. settings: see
        `MaskedLatentPipeline`. Raises what those do.
        """
        place, path = pick_device(device), Path(name).expanduser()
        dtype = settings.pop("torch_dtype", None) or dtype
        if path.is_file():
            kind = pick_dtype(dtype, place)
            model = load_mar(
                path,
                num_attention_heads=num_attention_heads,
                dtype=kind if isinstance(kind, torch.dtype) else None,
                allow_namespace=allow_namespace,
            ).to(place)
            if autoencoder is None:
                raise InputError(
                    f"got the checkpoint {path.name} without an autoencoder; expected "
                    "autoencoder=PATH, the kl16.ckpt that was published beside it."
                )
        else:
            folder = find_folder(name)
            settings["folder"] = folder
            model = load_masked(folder.target, place, dtype)
            if autoencoder is None:
                kl = folder.target.parent / "vae"
                there = (kl / "config.json").is_file()
                autoencoder = kl if there else load_tokenizer(folder, place)
        if isinstance(autoencoder, str | Path):
            autoencoder = _autoencoder(Path(autoencoder), allow_namespace)
        autoencoder.model.to(place)
        return cls(model, autoencoder, **settings)

    @property
    def components(self) -> dict[str, Any]:
        """The parts that further pipelines may share."""
        return {"model": self.model, "autoencoder": self.autoencoder, "folder": self.folder}

    @property
    def trunk(self) -> Any:
        """The model whose conditions and grid these are."""
        return self.model

    @property
    def drafter_name(self) -> str | None:
        """Who drafts, "jacobi" or "model"; None where nothing does."""
        return None if self.drafts is None else self.drafts.name

    def bare(self) -> Self:
        """Return what draws plainly under the law of drafts: one latent an iteration."""
        return type(self)(
            **self.components,
            iterations=self.side**2,
            steps=self.schedule.steps,
            floor=self.schedule.floor,
            batch_size=self.batch_size,
        )

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write model, autoencoder and draft model to a folder that `from_pretrained` reads."""
        root = Path(save_directory)
        self.model.save_pretrained(root / "target", **kwargs)
        if self.draft is not None:
            self.draft.save_pretrained(root / "draft", **kwargs)
        part = "vae" if isinstance(self.autoencoder, KLAutoencoder) else "tokenizer"
        self.autoencoder.save_pretrained(root / part, dtype=torch.float32)

    def __call__(
        self,
        class_labels: int | str | Sequence[int | str],
        *,
        guidance_scale: float = 2.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        num_images_per_prompt: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = TENSORS,
    ) -> Any:
        """Return a `MaskedOutput`, or a tuple of its fields where return_dict is False.

        class_labels: numbers or names. num_images_per_prompt: images of each, next to each other.
        generator: see `ImagePipeline`. guidance_scale: at the end, to which it rises from 1 (the
        published base model was measured at 2.9). temperature: of the noise of denoising. top_k: 0,
        as latents are drawn from densities.
        callback_on_step_end(pipeline, iteration, latents, {"latents": f32 [b, N, D]}): called after
        each, for the b images of a batch; `latents` counts those that stand (of the image that is
        furthest behind), the others are 0; it may set pipeline._interrupt, which leaves them so.
        Raises InputError.
        """
        if output_type not in OUTPUTS:
            raise InputError(
                f"got output_type {output_type!r}; expected one of {', '.join(OUTPUTS)}."
            )
        if top_k:
            raise InputError(
                f"got top_k={top_k}; latents are drawn from densities, which have none of it. "
                "Leave it out, or set guidance_scale."
            )
        callback = checked_callback(
            callback_on_step_end, callback_on_step_end_tensor_inputs, TENSORS
        )
        count = checked_count(num_images_per_prompt, "num_images_per_prompt")
        numbers = [self.label_of(label) for label in some(class_labels)]
        labels = torch.tensor([number for number in numbers for _ in range(count)])
        seeds = seeds_of(generator, len(labels))
        sampler = MaskedSampler(
            self.model, self.schedule, self.iterations, guidance_scale, temperature
        )
        if self.drafts is not None:
            self.drafts.check(self.schedule, temperature)
        began = time.perf_counter()
        drawn = self._drawn(sampler, labels, seeds, callback)
        made = self._output(drawn, seeds, time.perf_counter() - began, output_type)
        return made if return_dict else made.to_tuple()

    def label_of(self, given: int | str) -> int:
        """Return the number of a class given by number or by name; raises InputError."""
        return class_number(given, self.class_names, int(self.model.config.num_classes))

    def decode(self, latents: torch.Tensor, output_type: str = "pil") -> Any:
        """Return the images of latents f32 [B, h, w, D]; output_type as for a call."""
        if output_type == "latent":
            return latents
        parts = [self.autoencoder.decode_latents(part) for part in torch.split(latents, _DECODED)]
        return self.image_processor.postprocess(torch.cat(parts).cpu(), output_type)

    def _drawn(
        self,
        sampler: MaskedSampler,
        labels: torch.Tensor,
        seeds: Sequence[int],
        callback: Callable[..., Any] | None,
    ) -> _Drawn:
        """Draw all images, by batches."""
        self._interrupt, parts = False, list[_Drawn]()
        with closing(self.progress_bar(total=len(labels) * self.side**2)) as bar:
            for first in range(0, len(labels), self.batch_size):
                here = slice(first, first + self.batch_size)
                draw = self._plain if self.drafts is None else self._speculative
                parts.append(draw(sampler, labels[here], seeds[here], bar, callback))
                if self._interrupt:
                    break
        return _joined(parts, len(labels))

    def _plain(
        self,
        sampler: MaskedSampler,
        labels: torch.Tensor,
        seeds: Sequence[int],
        bar: Any,
        callback: Callable[..., Any] | None,
    ) -> _Drawn:
        follow = _Follower(self, bar, len(labels), callback)
        latents = sampler.draw(labels, [NoiseStream(seed) for seed in seeds], follow)
        sizes = -np.diff(np.array([self.side**2, *sampler.left]))
        maps = np.tile(np.repeat(sizes, sizes), (len(seeds), 1))
        none = np.zeros_like(maps), np.full(maps.shape, np.nan)
        return _Drawn(latents, maps, *none, len(seeds) * self.iterations)

    def _speculative(
        self,
        sampler: MaskedSampler,
        labels: torch.Tensor,
        seeds: Sequence[int],
        bar: Any,
        callback: Callable[..., Any] | None,
    ) -> _Drawn:
        assert self.drafts is not None
        settings = (sampler.scale, sampler.temperature)
        target = self.drafts.target(self.model, self.schedule, labels, seeds, *settings)
        count, places = len(labels), self.side**2
        follow = MaskedProgress(target, self, bar, count, places, count, callback)
        found = self.drafts.draw(target, follow.step, lambda: self._interrupt)
        follow.finish()
        latents = latents_of(target, [torch.tensor(each.tokens) for each in found])
        maps = acceptance_of(found, self.side).reshape(count, -1)
        told = fates(found, target, self.rule, places)
        return _Drawn(latents, maps, *told, target.prefixes, found)

    def _output(
        self, drawn: _Drawn, seeds: Sequence[int], seconds: float, output_type: str
    ) -> MaskedOutput:
        latents = self.model.restored(drawn.latents).unflatten(1, (self.side, self.side))
        outcomes, distances, counts = (
            placed(each, seeds) for each in (drawn.outcomes, drawn.distances, drawn.maps)
        )
        stats = MaskedStats(
            seeds=tuple(seeds),
            places=self.side**2,
            iterations=self.iterations,
            steps=self.schedule.steps,
            seconds=seconds,
            floor=self.schedule.floor,
            outcomes=outcomes,
            distances=distances,
            prefixes=drawn.prefixes,
            reports=tuple(each.report for each in drawn.generations),
        )
        return MaskedOutput(
            images=self.decode(latents, output_type),
            stats=stats,
            acceptance_map=counts,
            label=label_for(drawn.generations, self.side) if drawn.generations else "exact",
            latents=latents,
        )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Standardised latents [B, N, D] by place; the rest [B, N] by index, see `MaskedStats`."""

    latents: torch.Tensor
    maps: NDArray[np.int64]
    outcomes: NDArray[np.int64]
    distances: NDArray[np.float64]
    prefixes: int
    generations: Sequence[Generation] = ()


def _joined(parts: Sequence[_Drawn], count: int) -> _Drawn:
    """Return batches as one; images of batches that were not drawn are 0, and have no drafts."""
    latents = torch.cat([part.latents for part in parts])
    lacking = count - len(latents)
    rows = [np.concatenate(each) for each in zip(*map(_rows, parts), strict=True)]
    fills: tuple[float, ...] = (0, -1, np.nan)
    maps, outcomes, distances = (
        np.concatenate([row, np.full((lacking, row.shape[1]), fill, row.dtype)])
        for row, fill in zip(rows, fills, strict=True)
    )
    latents = torch.cat([latents, latents.new_zeros(lacking, *latents.shape[1:])])
    drawn = [each for part in parts for each in part.generations]
    return _Drawn(latents, maps, outcomes, distances, sum(part.prefixes for part in parts), drawn)


def _rows(part: _Drawn) -> tuple[NDArray[Any], ...]:
    return part.maps, part.outcomes, part.distances


class _Follower:
    """The progress bar of a batch, and the callback after each of its iterations."""

    def __init__(
        self, pipeline: Any, bar: Any, rows: int, callback: Callable[..., Any] | None
    ) -> None:
        self._pipeline, self._bar, self._rows, self._callback = pipeline, bar, rows, callback
        self._iteration = self._done = 0

    def __call__(self, done: int, latents: torch.Tensor) -> bool:
        self._bar.update(self._rows * (done - self._done))
        self._done = done
        if self._callback is not None:
            told = {"latents": latents.clone()}
            self._callback(self._pipeline, self._iteration, done, told)
        self._iteration += 1
        return not self._pipeline._interrupt


def _iterations(given: int | None, places: int, drafted: bool) -> int:
    """Return the iterations of a picture; raises InputError for a number that cannot be."""
    if given is None:
        return places if drafted else min(64, places)
    masked_counts(places, given)  # which checks it
    if drafted and given != places:
        raise InputError(
            f"got {given} iterations with a drafter; expected {places}, one a latent: drafts are "
            "judged under the law of one after the other. Leave iterations out, or the drafter."
        )
    return given


def _autoencoder(path: Path, allow_namespace: bool) -> Autoencoder:
    """Return the autoencoder of a folder or file, by what the folder says that it holds."""
    config = path / "config.json"
    if config.is_file() and '"VQModel"' in config.read_text(encoding="utf-8"):
        return VQTokenizer.from_pretrained(path)
    if not path.exists():
        raise ModelNotFoundError(
            f"got the autoencoder {str(path)!r}, which does not exist; expected a folder or a file "
            "such as kl16.ckpt."
        )
    return KLAutoencoder.from_pretrained(path, allow_namespace=allow_namespace)


def _check(model: Any, autoencoder: Any) -> None:
    if not isinstance(model, MaskedModel):
        raise UnsupportedModelError(
            f"got a {type(model).__name__}; expected a MaskedModel. Causal models of latents are "
            "drawn with by LatentPipeline, models of codes by ImagePipeline."
        )
    if not isinstance(autoencoder, VQTokenizer | KLAutoencoder):
        raise UnsupportedModelError(
            f"got a {type(autoencoder).__name__} as autoencoder; expected a KLAutoencoder or a "
            "VQTokenizer. Wrap a diffusers model in one of them."
        )
    if autoencoder.width != model.config.latent_dim:
        raise InputError(
            f"got an autoencoder with latents of {autoencoder.width} numbers for a model of "
            f"{model.config.latent_dim}; expected the one that the model was trained on."
        )
