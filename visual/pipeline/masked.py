"""`MaskedLatentPipeline`: images of a masked model (MAR), with the conventions of `ImagePipeline`.

What is drawn is the model's own law, with nothing speculated: its attention looks both ways, so
that to verify k drafted latents takes a forward for each of k sets of known ones.
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
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from numpy.typing import NDArray

from ragspec.errors import InputError, ModelNotFoundError, UnsupportedModelError
from ragspec.models.device import pick_device, pick_dtype
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.checks import checked_count, class_number
from ragspec.visual.masked.checkpoint import load_mar
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.sampler import MaskedSampler, order_of
from ragspec.visual.masked.schedule import LearnedSchedule
from ragspec.visual.models.kl import KLAutoencoder
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline.folder import (
    class_names,
    find_folder,
    load_masked,
    load_tokenizer,
)
from ragspec.visual.pipeline.loading import check_loading, saving
from ragspec.visual.pipeline.manners import Manners, frees
from ragspec.visual.pipeline.model_index import more_of, write_index
from ragspec.visual.pipeline.pipeline import OUTPUTS
from ragspec.visual.pipeline.progress import check_returned
from ragspec.visual.pipeline.request import checked_callback, seeds_of, some

TENSORS = ("latents",)  # what a callback may ask for

Autoencoder = VQTokenizer | KLAutoencoder


@dataclass(frozen=True, slots=True)
class MaskedStats:
    """The figures of one call; B images of N latents.

    seeds: one an image. places: N. iterations: forwards of the model for each image. steps: of the
    denoising of each latent. seconds: wall time of the latents, decoding not included.
    """

    seeds: tuple[int, ...]
    places: int
    iterations: int
    steps: int
    seconds: float

    @property
    def forwards(self) -> int:
        """Forward passes over all images; one that served several counts for each of them."""
        return len(self.seeds) * self.iterations

    @property
    def codes_per_forward(self) -> float:
        """Latents by forward pass."""
        return self.places / self.iterations

    def summary(self) -> str:
        """Return one line for people."""
        count = len(self.seeds)
        return (
            f"{count} image{'s' * (count > 1)}, {self.forwards} forward passes, "
            f"{self.codes_per_forward:.2f} latents a pass, {self.seconds:.2f} s"
        )


@dataclass
class MaskedOutput(BaseOutput):  # type: ignore[misc, unused-ignore]
    """What a call returns, for B images of h * w latents.

    images: see `ImageOutput`; latents for output_type "latent". stats: see `MaskedStats`.
    acceptance_map i64 [B, h, w]: how many latents came with the forward that gave this one. label:
    exact, as nothing is speculated. latents f32 [B, h, w, D]: as the autoencoder knows them.
    """

    images: Any
    stats: MaskedStats
    acceptance_map: NDArray[Any]
    label: str
    latents: torch.Tensor


class MaskedLatentPipeline(Manners):
    """Draws images of classes with a masked model of continuous latents.

    model: a `MaskedModel`. autoencoder: of its latents. iterations: forwards of the model, no more
    than there are latents. steps: of the denoising of each latent. batch_size: images that are
    drawn side by side. Raises InputError, UnsupportedModelError.
    """

    # Where diffusers tells what a callback may ask for.
    _callback_tensor_inputs: ClassVar[list[str]] = list(TENSORS)

    def __init__(
        self,
        model: MaskedModel,
        autoencoder: Autoencoder,
        *,
        iterations: int = 64,
        steps: int = 100,
        batch_size: int = 16,
    ) -> None:
        super().__init__()
        _check(model, autoencoder)
        self.autoencoder = autoencoder
        self.side = int(model.config.grid_size)
        self.iterations = iterations
        self.schedule = LearnedSchedule(steps)
        MaskedSampler(model, self.schedule, iterations)  # which checks the iterations
        self.batch_size = checked_count(batch_size, "batch_size")
        self.class_names = class_names(model)
        self.image_processor = VaeImageProcessor(vae_scale_factor=autoencoder.reduction)
        self.register_modules(model=model, vae=autoencoder.model)
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

        name: a folder with target/ and tokenizer/ or vae/, or a file such as checkpoint-last.pth.
        autoencoder: a published file (kl16.ckpt) or a folder in diffusers' layout; needed beside a
        file. num_attention_heads, allow_namespace: of files, see `load_mar`. settings: see
        `MaskedLatentPipeline`. Raises what those do.
        """
        dtype = settings.pop("torch_dtype", None) or dtype
        device, offline = check_loading(settings, device)
        place, path = pick_device(device), Path(name).expanduser()
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
            folder = find_folder(name, offline)
            settings = {**more_of(folder.index), **settings}
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
        return {"model": self.model, "autoencoder": self.autoencoder}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write model and autoencoder to a folder that `from_pretrained` reads."""
        root = Path(save_directory)
        self.model.save_pretrained(root / "target", **saving(kwargs))
        part = "vae" if isinstance(self.autoencoder, KLAutoencoder) else "tokenizer"
        self.autoencoder.save_pretrained(root / part, dtype=torch.float32)
        parts = {"target": "MaskedModel", part: type(self.autoencoder.model).__name__}
        told = {"iterations": self.iterations, "steps": self.schedule.steps}
        write_index(root, "SavedMaskedPipeline", parts, {**told, "batch_size": self.batch_size})

    @frees
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str],
        *,
        guidance_scale: float = 2.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        num_images_per_prompt: int = 1,
        temperature: float = 1.0,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = TENSORS,
    ) -> Any:
        """Return a `MaskedOutput`, or a tuple of its fields where return_dict is False.

        class_labels: numbers or names. num_images_per_prompt: images of each, next to each other.
        generator: see `ImagePipeline`. guidance_scale: at the end, to which it rises from 1 (the
        published base model was measured at 2.9). temperature: of the noise of denoising.
        callback_on_step_end(pipeline, iteration, latents, {"latents": f32 [b, N, D]}): called after
        each, for the b images of a batch; `latents` counts those that stand, the others are 0; it
        may set pipeline._interrupt, which leaves them so. Raises InputError.
        """
        if output_type not in OUTPUTS:
            raise InputError(
                f"got output_type {output_type!r}; expected one of {', '.join(OUTPUTS)}."
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
        self._bring("model")
        began = time.perf_counter()
        drawn = self._draw(sampler, labels, seeds, callback)
        seconds = time.perf_counter() - began
        latents = self.model.restored(drawn).unflatten(1, (self.side, self.side))
        places = self.side**2
        made = MaskedOutput(
            images=self.decode(latents, output_type),
            stats=MaskedStats(tuple(seeds), places, self.iterations, self.schedule.steps, seconds),
            acceptance_map=_counts(sampler, seeds, self.side),
            label="exact",
            latents=latents,
        )
        return made if return_dict else made.to_tuple()

    def label_of(self, given: int | str) -> int:
        """Return the number of a class given by number or by name; raises InputError."""
        return class_number(given, self.class_names, int(self.model.config.num_classes))

    def decode(self, latents: torch.Tensor, output_type: str = "pil") -> Any:
        """Return the images of latents f32 [B, h, w, D]; output_type as for a call."""
        if output_type == "latent":
            return latents
        images = self._decoded(self.autoencoder.decode_latents, latents)
        return self.image_processor.postprocess(images, output_type)

    def _draw(
        self,
        sampler: MaskedSampler,
        labels: torch.Tensor,
        seeds: Sequence[int],
        callback: Callable[..., Any] | None,
    ) -> torch.Tensor:
        """Return standardised latents [B, N, D], by batches."""
        self._interrupt, parts = False, []
        with closing(self.progress_bar(total=len(labels) * self.side**2)) as bar:
            for first in range(0, len(labels), self.batch_size):
                here = labels[first : first + self.batch_size]
                noises = [NoiseStream(seed) for seed in seeds[first : first + self.batch_size]]
                follow = _Follower(self, bar, len(here), callback)
                parts.append(sampler.draw(here, noises, follow))
                if self._interrupt:
                    break
        drawn = torch.cat(parts)
        rest = drawn.new_zeros(len(labels) - len(drawn), *drawn.shape[1:])
        return torch.cat([drawn, rest])


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
            returned = self._callback(self._pipeline, self._iteration, done, told)
            check_returned(returned, "latents", latents)
        self._iteration += 1
        return not self._pipeline._interrupt


def _counts(sampler: MaskedSampler, seeds: Sequence[int], side: int) -> NDArray[np.int64]:
    """Return how many latents came with the forward of each: i64 [B, h, w]."""
    places = side * side
    sizes = -np.diff(np.array([places, *sampler.left]))
    orders = [order_of(NoiseStream(seed), places).numpy() for seed in seeds]
    found = np.zeros((len(seeds), places), dtype=np.int64)
    for row, order in zip(found, orders, strict=True):
        row[order] = np.repeat(sizes, sizes)
    return found.reshape(-1, side, side)


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
