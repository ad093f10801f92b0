"""`MaskedLatentPipeline`: images of a masked model (MAR), with the conventions of `ImagePipeline`.

Without a drafter it generates several latents per iteration, as published. With one, it keeps the
distribution of one latent per iteration. The model's attention is bidirectional, so verifying k
drafted latents takes k + 1 masked prefixes in one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import InputError
from ragspec.models.device import pick_device
from ragspec.rules.base import Rule
from ragspec.visual.checks import checked_count
from ragspec.visual.latents.rules.by_name import latent_rule
from ragspec.visual.masked.checkpoint import load_mar
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.sampler import MaskedSampler
from ragspec.visual.masked.schedule import LearnedSchedule
from ragspec.visual.models.kl import KLAutoencoder
from ragspec.visual.models.raster import Raster
from ragspec.visual.pipeline.diffusers_mixin import ClassPipeline, check_loading, saving
from ragspec.visual.pipeline.folder import (
    MASKED,
    ImageFolder,
    class_names,
    find_folder,
    load_model,
    load_published,
    load_tokenizer,
)
from ragspec.visual.pipeline.latent_source import masked_source
from ragspec.visual.pipeline.masked_drafts import (
    WINDOW,
    Batch,
    MaskedDrafts,
    SampledLatents,
    joined,
)
from ragspec.visual.pipeline.masked_parts import (
    Autoencoder,
    autoencoder_of,
    check_parts,
    iterations_of,
    masked_record,
)
from ragspec.visual.pipeline.output import label_for
from ragspec.visual.pipeline.request import check_output_type, checked_callback, seeds_of, some
from ragspec.visual.pipeline.saved_setup import masked_as_saved, write_setup
from ragspec.visual.pipeline.stats import MaskedStats, placed

TENSORS = ("latents",)  # the tensors that a callback may request
PLAIN = "plain"  # the rule name of plain decoding


@dataclass
class MaskedOutput(BaseOutput):  # type: ignore[misc, unused-ignore]
    """The output of a call, for B images of h * w latents.

    Attributes:
        images: See `ImageOutput`; latents for output_type "latent".
        stats: See `MaskedStats`.
        acceptance_map i64 [B, h, w]: For each latent, how many latents its forward produced.
        label: Exact without a drafter, else the rule's, or unfinished if a callback ended the call
            early.
        latents f32 [B, h, w, D]: In the scale of the autoencoder.
    """

    images: Any
    stats: MaskedStats
    acceptance_map: NDArray[Any]
    label: str
    latents: Tensor


class MaskedLatentPipeline(ClassPipeline):
    """Generates images of classes with a masked model of continuous latents.

    Args:
        model, autoencoder: A `MaskedModel`, and the autoencoder of its latents.
        iterations: Forwards of the model, at most the number of latents. None for 64 at most, or
            for one per latent with a drafter, as drafts are judged under that distribution.
        steps: Denoising steps of each latent.
        floor: The deviation of the last step, 0 as published; rules that compare densities need a
            positive one.
        drafter: None for plain decoding, "jacobi" (the target's last forward), "model" (the smaller
            model beside it), a smaller `MaskedModel` or its folder.
        rule: A Rule, or a name and its settings, see `make_latent_rule`.
        window: The most latents in a draft.
        prefill: The share of latents, from 0 to below 1, that the target generates before drafting.

    Raises:
        InputError, UnknownNameError: An argument is refused.
        UnsupportedModelError, ModelNotFoundError: A model does not fit or is missing.
    """

    # The tensors that a callback may request; diffusers reads this name.
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
        check_parts(model, autoencoder)
        self.autoencoder = autoencoder
        self.side = int(model.config.grid_size)
        self.schedule = LearnedSchedule(steps, floor)
        self.rule_is_named, self.settings = isinstance(rule, str), settings
        self.rule, name = latent_rule(rule, settings)
        source = masked_source(drafter, model, folder, window, prefill)
        drafts = MaskedDrafts(source, self.rule, window, prefill)
        self.drafts = None if source.name is None else drafts
        self.rule_name = PLAIN if self.drafts is None else name
        if self.drafts is not None:
            self.drafts.check(self.schedule, 1.0)
        self.iterations = iterations_of(iterations, self.side**2, self.drafts is not None)
        self.batch_size = checked_count(batch_size, "batch_size")
        self.folder = folder
        self.class_names = class_names(model)
        self.image_processor = VaeImageProcessor(vae_scale_factor=autoencoder.reduction)
        self.register_modules(model=model, vae=autoencoder.model, draft=source.model)

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
        """Return a pipeline over a saved folder or a published checkpoint.

        Args:
            name: A bundled set ("masked-tiles"), a folder with target/ and tokenizer/ or vae/ (and
                draft/), or a file such as checkpoint-last.pth.
            autoencoder: A published file (kl16.ckpt) or a folder in diffusers' layout; required
                with a file.
            num_attention_heads, allow_namespace: Of files, see `load_mar`.
            settings: See the class, and `check_loading` for those of diffusers' loaders.

        Raises:
            ModelError: A model or the saved index does not load; further errors as the class.
        """
        dtype = settings.pop("torch_dtype", None) or dtype
        device, offline = check_loading(settings, device)
        place, path = pick_device(device), Path(name).expanduser()
        if path.is_file():
            opening = {
                "num_attention_heads": num_attention_heads,
                "allow_namespace": allow_namespace,
            }
            model = load_published(load_mar, path, place, dtype, **opening)
            if autoencoder is None:
                raise InputError(
                    f"got the checkpoint {path.name} without an autoencoder; expected "
                    "autoencoder=PATH, the kl16.ckpt that was published beside it."
                )
        else:
            folder = find_folder(name, offline)
            settings = {**masked_as_saved(folder.index, settings), "folder": folder}
            model = load_model(folder.target, place, dtype, MASKED)
            if autoencoder is None:
                vae = folder.target.parent / "vae"
                is_kl = (vae / "config.json").is_file()
                autoencoder = vae if is_kl else load_tokenizer(folder, place)
        if isinstance(autoencoder, str | Path):
            autoencoder = autoencoder_of(Path(autoencoder), allow_namespace)
        autoencoder.model.to(place)
        return cls(model, autoencoder, **settings)

    @property
    def components(self) -> dict[str, Any]:
        """The parts that other pipelines may share."""
        return {"model": self.model, "autoencoder": self.autoencoder, "folder": self.folder}

    @property
    def drafter_name(self) -> str | None:
        """The drafter's name, "jacobi" or "model"; None without a drafter."""
        return None if self.drafts is None else self.drafts.source.name

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write model, autoencoder and draft model to a folder for `from_pretrained`."""
        root = Path(save_directory)
        self.model.save_pretrained(root / "target", **saving(kwargs))
        if self.draft is not None:
            self.draft.save_pretrained(root / "draft", **saving(kwargs))
        part = "vae" if isinstance(self.autoencoder, KLAutoencoder) else "tokenizer"
        self.autoencoder.save_pretrained(root / part, dtype=torch.float32)
        write_setup(root, self, masked_record(self))

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
        """Generate images; return a `MaskedOutput`, or a tuple of its fields without return_dict.

        Args:
            class_labels: Numbers or names.
            guidance_scale: The final scale, which guidance reaches from 1; the published base model
                was measured at 2.9.
            generator: See `ImagePipeline`.
            num_images_per_prompt: Images of each class, next to each other.
            temperature: Of the denoising noise.
            top_k: Only 0, as latents are sampled from densities.
            callback_on_step_end: Called after each iteration with (pipeline, iteration, latents,
                {"latents": f32 [b, N, D]}) for the b images of a batch. `latents` counts those of
                the image that is furthest behind; missing latents are 0. The callback may set
                pipeline._interrupt to end the call.

        Raises:
            InputError: An argument is refused.
        """
        check_output_type(output_type)
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
        sample = self._samples(sampler, labels, seeds, callback)
        output = self._output(sample, seeds, time.perf_counter() - began, output_type)
        return output if return_dict else output.to_tuple()

    def _pixels(self, codes: Tensor) -> Tensor:
        return self.autoencoder.decode_latents(codes)

    def _samples(
        self,
        sampler: MaskedSampler,
        labels: Tensor,
        seeds: Sequence[int],
        callback: Callable[..., Any] | None,
    ) -> SampledLatents:
        """Generate the latents of all images, batch by batch."""
        self._interrupt, parts = False, list[SampledLatents]()
        with closing(self.progress_bar(total=len(labels) * self.side**2)) as bar:
            for first in range(0, len(labels), self.batch_size):
                here = slice(first, first + self.batch_size)
                batch = Batch(self, sampler, labels[here], seeds[here], bar, callback)
                parts.append(batch.plain() if self.drafts is None else batch.speculative())
                if self._interrupt:
                    break
        return joined(parts, len(labels))

    def _output(
        self, sample: SampledLatents, seeds: Sequence[int], seconds: float, output_type: str
    ) -> MaskedOutput:
        latents = self.model.restored(sample.latents).unflatten(1, (self.side, self.side))
        outcomes, distances, counts = (
            placed(each, seeds) for each in (sample.outcomes, sample.distances, sample.maps)
        )
        grid = Raster(self.side, self.side)
        stats = MaskedStats(
            seeds=tuple(seeds),
            places=self.side**2,
            iterations=self.iterations,
            steps=self.schedule.steps,
            seconds=seconds,
            floor=self.schedule.floor,
            outcomes=outcomes,
            distances=distances,
            prefixes=sample.prefixes,
            reports=tuple(each.report for each in sample.generations),
        )
        return MaskedOutput(
            images=self.decode(latents, output_type),
            stats=stats,
            acceptance_map=counts,
            label=label_for(sample.generations, grid) if sample.generations else "exact",
            latents=latents,
        )
