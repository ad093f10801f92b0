"""One call of an image pipeline: its runs, each over one guidance scale, and their progress."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragspec.engine.engine import Engine
from ragspec.engine.prompts import check_length
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.sampling.settings import Sampling, plain_value
from ragspec.visual.call import ImageCall, ImageConfig
from ragspec.visual.models.raster import Raster
from ragspec.visual.output import UNFINISHED, ImageSample, unfinished
from ragspec.visual.rules.tv_budget import Surprising


@dataclass(slots=True, eq=False)
class CallState:
    """The state of one call.

    Attributes:
        pipe: The `ImagePipeline`.
        conditions: Of the family, one for each prompt or class.
        count: Of the images.
        images: Each complete image by its number, if `on_image` receives them.
        tensor: The codes or latents of all images so far, if the callback receives them.
        forwards: Forwards so far, of all runs.
        seconds: Wall time so far, without decoding images.
        interrupted: Whether the callback has ended the call.
    """

    pipe: Any
    call: ImageCall
    conditions: Any
    raster: Raster
    count: int
    bar: Any
    images: dict[int, Any] = field(default_factory=dict)
    tensor: Tensor | None = None
    forwards: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    def generate(
        self, rows: Sequence[int], seeds: Sequence[int], scales: Sequence[float]
    ) -> list[ImageSample]:
        """Generate all images of the call, each under the condition in its row."""
        samples = dict[int, ImageSample]()
        plain = self.pipe.family.plain_rule is not None and self.pipe.source.name is None
        for numbers in self._groups(scales):
            if self.interrupted:
                samples |= dict.fromkeys(numbers, unfinished(next(iter(samples.values()))))
                continue
            config = ImageConfig(
                scales[numbers[0]],
                self.call.guidance_interval,
                self.raster,
                self.call.fixed(self.raster, getattr(self.pipe.family.codec, "vocab_size", 0)),
                [rows[number] for number in numbers],
                [seeds[number] for number in numbers],
                self.call.temperature,
            )
            part = (self._plain if plain else self._speculative)(config, numbers)
            samples |= zip(numbers, part, strict=True)
        return [samples[number] for number in range(len(rows))]

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

    def _speculative(self, config: ImageConfig, numbers: Sequence[int]) -> list[ImageSample]:
        """Generate with the engine."""
        pipe, family, call = self.pipe, self.pipe.family, self.call
        latents = family.unit == "latents"
        target = family.open(family.model, self.conditions, config)
        prompts, tokens = family.prompts(target, config), self.raster.tokens
        size = f"height x width in codes of {family.codec.reduction} pixels"
        names, fixed = (self._longest_prompt(), size), not family.step
        check_length(max(map(len, prompts)), tokens, target.max_length, names, fixed)
        progress = Progress(self, numbers, target)  # which takes memory by the size
        engine = Engine(
            target,
            None,
            pipe.source.make(target, self.conditions),
            budget=pipe.budget,
            rule=pipe.rule if latents else Surprising(pipe.rule),  # latents have no probabilities
            max_batch_size=pipe.batch_size,
        )
        temperature = 1.0 if latents else call.temperature
        top_k = family.top_k if call.top_k is None else call.top_k
        began, owner = time.perf_counter(), object()
        requests, _ = engine.prepare(
            prompts,
            Sampling(temperature, top_k, call.top_p, call.min_p, seed=list(config.seeds)),
            {"max_new_tokens": tokens, "ignore_eos": True, "on_step": progress.step},
        )
        handles = [engine.add(each, owner) for each in requests]

        def ended() -> bool:
            results = [each.future.result() for each in handles if each.done]
            progress.finish()
            return self.interrupted or len(results) == len(handles)

        try:
            engine.scheduler.drive(owner, ended)
        finally:
            engine.close(cancel=True)
        generations = [each.future.result() for each in handles]
        self.seconds += time.perf_counter() - began
        samples = family.samples(generations, target, pipe.rule, self.raster)
        pairs = zip(samples, generations, strict=True)
        return [each if text.tokens else unfinished(each) for each, text in pairs]

    def _longest_prompt(self) -> str:
        """Return the name of the prompt to whose length the others are padded."""
        if not isinstance(self.conditions, list):
            return "prompt"
        lengths = [len(ids) for pair in self.conditions for ids in pair]
        row, negative = divmod(lengths.index(max(lengths)), 2)
        name = "negative_prompt" if negative else "prompt"
        count = len(self.call.negative_prompt if negative else self.conditions)
        return f"{name} {row + 1} of {count}" if count > 1 else name

    def _plain(self, config: ImageConfig, numbers: Sequence[int]) -> list[ImageSample]:
        """Generate a batch with several latents in each forward pass."""
        family, progress, began = self.pipe.family, Progress(self, numbers), time.perf_counter()
        samples: list[ImageSample] = family.plain_samples(self.conditions, config, progress)
        self.seconds += time.perf_counter() - began
        for number, sample in zip(numbers, samples, strict=True):
            if self.call.on_image is not None and sample.label != UNFINISHED:
                self.complete(number, sample.values)
        return samples

    def complete(self, number: int, values: Tensor) -> None:
        """Decode the codes or latents [h, w, ...] of an image and pass it on."""
        self.images[number] = self.pipe.decode(values[None])[0]
        assert self.call.on_image is not None
        self.call.on_image(number, self.images[number])


class Progress:
    """Reports the steps of a run: to the bar, the callback, and for each complete image.

    Args:
        target: The engine's; None without it.
    """

    def __init__(self, state: CallState, numbers: Sequence[int], target: object = None) -> None:
        self.state, self._numbers, self._target = state, numbers, target
        self._tokens = torch.full((len(numbers), state.raster.tokens), -1, dtype=torch.int64)
        self._counts = [0] * len(numbers)
        self._forward = set[int]()  # the rows of this forward

    def step(self, row: int, step: Step) -> None:
        """Record a step of the image in a row."""
        state = self.state
        self._forward.add(row)
        start, new = self._counts[row], len(step.tokens)
        self._tokens[row, start : start + new] = torch.tensor(step.tokens)
        self._counts[row] = start + new
        state.bar.update(new)
        if state.call.on_image is not None and start < start + new == state.raster.tokens:
            tokens = self._tokens[row].tolist()
            values = state.pipe.family.values(self._target, row, tokens, state.raster)
            state.complete(self._numbers[row], values)

    def finish(self) -> None:
        """End a forward: call the callback and check the tensor that it returns."""
        if not self._forward or self.state.call.callback_on_step_end is None:
            return
        raster, least = self.state.raster, min(self._counts[row] for row in self._forward)
        self._forward.clear()
        values = self.state.pipe.family.step_values(self._target, self._tokens[:, raster.places])
        self.report(len(raster.known(range(least))), values)

    def report(self, count: int, tensor: Tensor) -> None:
        """Pass on a count and this run's tensor; raise InputError if the callback alters it."""
        state, callback = self.state, self.state.call.callback_on_step_end
        if callback is None:
            return
        name = state.pipe.family.unit
        if state.tensor is None:
            missing, shape = -1 if name == "codes" else 0, (state.count, *tensor.shape[1:])
            state.tensor = tensor.new_full(shape, missing)
        state.tensor[list(self._numbers)] = tensor
        before, tensor = state.tensor, state.tensor.clone()
        returned = callback(state.pipe, state.forwards, count, {name: tensor})
        state.forwards += 1
        state.interrupted |= plain_value(returned) is True
        after = returned.get(name, tensor) if isinstance(returned, dict) else tensor
        if not isinstance(after, Tensor) or not torch.equal(after.cpu(), before.cpu()):
            raise InputError(
                f"callback_on_step_end returned other {name} than it received; {name} that stand "
                "cannot be changed. Return them as they are, or nothing, and True to end."
            )
