"""The runs of one call of an image pipeline: the images of one guidance scale, side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ragspec.engine.engine import Engine
from ragspec.sampling.settings import Sampling
from ragspec.visual.call import ImageCall
from ragspec.visual.families.base import ImageConfig
from ragspec.visual.models.raster import Raster
from ragspec.visual.output import ImageSamples, joined, missing
from ragspec.visual.progress import Progress


@dataclass(slots=True, eq=False)
class CallState:
    """The state of one call.

    Attributes:
        pipe: The `ImagePipeline`.
        call: Its arguments.
        conditions: Of the family, one for each prompt or class.
        raster: The grid of codes.
        bar: The progress bar.
        images: Each complete image by its number, if `on_image` receives them.
        interrupted: Whether the callback has ended the call.
    """

    pipe: Any
    call: ImageCall
    conditions: Any
    raster: Raster
    bar: Any
    images: dict[int, Any] = field(default_factory=dict)
    interrupted: bool = False

    def generate(
        self, rows: Sequence[int], seeds: Sequence[int], scales: Sequence[float]
    ) -> ImageSamples:
        """Generate all images of the call.

        Args:
            rows: The number of the condition of each image.
            seeds, scales: Of each image.
        """
        parts, order = list[ImageSamples](), list[int]()
        by_batch = self.pipe.family.plain_rule is not None
        for numbers in self._groups(scales):
            order += numbers
            if self.interrupted and by_batch:
                parts.append(missing(parts[-1], len(numbers)))
                continue
            config = ImageConfig(
                scales[numbers[0]],
                self.call.guidance_interval,
                self.raster,
                self.call.fixed(self.raster, self.pipe.family.codec),
                [rows[number] for number in numbers],
                [seeds[number] for number in numbers],
                self.call.temperature,
            )
            plain = by_batch and self.pipe.source.name is None
            parts.append((self._plain if plain else self._speculative)(config, numbers))
        return joined(parts, order)

    def _groups(self, scales: Sequence[float]) -> Iterator[list[int]]:
        """Yield the numbers of images that share a target: those of one guidance scale.

        Masked models have one target a batch, as its table keeps every latent.
        """
        most = len(scales) if self.pipe.family.plain_rule is None else self.pipe.batch_size
        groups: dict[float, list[int]] = {}
        for number, scale in enumerate(scales):
            groups.setdefault(scale, []).append(number)
        for numbers in groups.values():
            yield from (numbers[at : at + most] for at in range(0, len(numbers), most))

    def _speculative(self, config: ImageConfig, numbers: Sequence[int]) -> ImageSamples:
        """Generate with the engine."""
        pipe, family, call = self.pipe, self.pipe.family, self.call
        target = family.open(family.model, self.conditions, config)
        progress = self._progress(target, numbers)
        engine = Engine(
            target,
            None,
            pipe.source(target, self.conditions),
            budget=pipe.budget,
            rule=family.judging(pipe.rule),
            max_batch_size=pipe.batch_size,
        )
        options: dict[str, Any] = {"max_new_tokens": self.raster.tokens, "ignore_eos": True}
        if call.callback_on_step_end is not None:
            options["stopping_criteria"] = [lambda ids, scores: progress.interrupted]
        temperature = 1.0 if family.unit == "latents" else call.temperature
        began = time.perf_counter()
        generations = engine.generate(
            family.prompts(target, config),
            Sampling(temperature, call.top_k, call.top_p, call.min_p, seed=list(config.seeds)),
            on_step=progress.step,
            **options,
        )
        progress.finish()
        seconds = time.perf_counter() - began
        self.interrupted = progress.interrupted
        samples: ImageSamples = family.samples(generations, target, pipe.rule, self.raster)
        return replace(samples, seconds=seconds)

    def _plain(self, config: ImageConfig, numbers: Sequence[int]) -> ImageSamples:
        """Generate a batch with several latents in each forward pass."""
        progress, began = self._progress(None, numbers), time.perf_counter()
        samples: ImageSamples = self.pipe.family.plain_samples(self.conditions, config, progress)
        seconds, self.interrupted = time.perf_counter() - began, progress.interrupted
        if self.call.on_image is not None and not self.interrupted:
            for number, latents in zip(numbers, samples.values, strict=True):
                self._complete(number, latents[None])
        return replace(samples, seconds=seconds)

    def _progress(self, target: Any, numbers: Sequence[int]) -> Progress:
        """Return the progress of a run, which an earlier one may have interrupted."""
        family = self.pipe.family

        def complete(row: int, tokens: list[int]) -> None:
            self._complete(numbers[row], family.values(target, row, tokens, self.raster))

        progress = Progress(
            self.pipe,
            self.bar,
            len(numbers),
            self.raster,
            self.pipe.batch_size,
            callback=self.call.callback_on_step_end,
            on_image=None if self.call.on_image is None else complete,
            tensor=family.step_tensor(target),
        )
        progress.interrupted = self.interrupted
        return progress

    def _complete(self, number: int, values: Tensor) -> None:
        """Decode an image and pass it on."""
        self.images[number] = self.pipe.decode(values)[0]
        assert self.call.on_image is not None
        self.call.on_image(number, self.images[number])
