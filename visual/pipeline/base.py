"""The base of the pipelines over image codes: generation, progress, statistics and outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import BaseOutput
from numpy.typing import NDArray
from torch import Tensor

from ragspec.budget.policy import FixedBudget, make_budget
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule, expect_rule
from ragspec.rules.walk import Walk
from ragspec.sampling.settings import Sampling
from ragspec.visual.checks import checked_count
from ragspec.visual.models.raster import Raster, codes_along
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.pipeline.diffusers_mixin import DiffusersMixin
from ragspec.visual.pipeline.drafter_choice import DraftSource, ImageConditions
from ragspec.visual.pipeline.output import ImageStats, acceptance_of, codes_of, label_for, stats_of
from ragspec.visual.pipeline.progress import Progress
from ragspec.visual.pipeline.relaxation import settings_of
from ragspec.visual.pipeline.request import (
    TENSORS,
    ImageConfig,
    check_output_type,
    checked_callback,
    checked_codes,
    seeds_of,
)
from ragspec.visual.rules.by_name import make_rule
from ragspec.visual.rules.tv_budget import Surprising


@dataclass
class ImageOutput(BaseOutput):  # type: ignore[misc, unused-ignore]
    """The output of a call, for B images of h * w codes.

    Attributes:
        images: A list of PIL images, float32 [B, H, W, 3] in 0 .. 1 ("np"), a tensor [B, 3, H, W]
            in 0 .. 1 ("pt"), or the codes ("latent").
        stats: See `ImageStats`.
        acceptance_map i64 [B, h, w]: For each code, how many codes its forward produced; 0 for
            codes that an early end left out.
        label: Exact, exact-for(distribution), bounded(tv<=x), approximate, or unfinished if a
            callback ended the call early.
        codes i64 [B, h, w]: An image that ended early repeats its last code.
    """

    images: Any
    stats: ImageStats
    acceptance_map: NDArray[Any]
    label: str
    codes: Tensor


def chosen_rule(
    rule: str | Rule,
    codebook: Tensor,
    settings: dict[str, Any],
    *,
    positions: int,
    relaxation: Path | None = None,
    normalised: bool = True,
    marks: int = 0,
) -> tuple[Rule, str, dict[str, Any]]:
    """Return a rule, its name and its settings.

    Args:
        rule, codebook, positions, normalised, marks: See `make_rule`; a Rule is taken as it is.
        settings: Of the rule. If empty, those that the file `relaxation` holds for it apply.

    Raises:
        InputError: A Rule comes with settings, or `make_rule` refuses them.
        UnknownNameError: No rule has the name.
        ModelError: The file cannot be read.
    """
    if not isinstance(rule, str):
        if settings:
            raise InputError(f"got a Rule and {', '.join(settings)}; expected settings by a name.")
        return expect_rule(rule), rule.name, {}
    settings = settings or settings_of(relaxation, rule)
    created = make_rule(
        rule, codebook, positions=positions, normalised=normalised, marks=marks, **settings
    )
    return created, rule, settings


class CodePipeline(DiffusersMixin):
    """Generates the codes of images with a target and a drafter, and decodes them.

    Subclasses check the conditions, and set the other attributes.

    Attributes:
        tokenizer: Of the codes.
        raster: The grid of an image of the default size.
        source: Creates the drafter of each call.
        guidance: The default guidance_scale.
    """

    # The tensors that a callback may request; diffusers reads this name.
    _callback_tensor_inputs: ClassVar[list[str]] = list(TENSORS)
    # Whether the sides, or the codes, of the default size are the most of any size.
    _by_side: ClassVar[bool] = False
    _by_area: ClassVar[bool] = True

    guidance: ClassVar[float] = 2.0
    raster: Raster
    source: DraftSource
    rule: Rule

    def __init__(self, tokenizer: Any, budget: Any, batch_size: int, folder: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.budget = make_budget(budget)
        self.batch_size = checked_count(batch_size, "batch_size")
        self.folder = folder
        self.image_processor = VaeImageProcessor(vae_scale_factor=tokenizer.reduction)

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: int | str | Sequence[int | str] | None = None,
        *,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        num_images_per_prompt: int = 1,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        guidance_interval: tuple[int, int] | None = None,
        codes: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = TENSORS,
    ) -> Any:
        """Generate images; return an `ImageOutput`, or a tuple of its fields without return_dict.

        Args:
            prompt: A text or several, of any lengths, for a text-conditional model.
            class_labels: Numbers or names, for a class-conditional model.
            negative_prompt: The text that guidance leads away from, one for all or one each; None
                for the model's equivalent of no prompt.
            height, width: In pixels, up to the size that the model was made for; None for its own.
            guidance_scale: None for the pipeline's `guidance`, 1 for none.
            generator: The source of the seeds, or one for each image; None is torch's global one.
                `stats.seeds` records the seeds.
            num_images_per_prompt: Images of each prompt or class, next to each other.
            temperature: 0 is greedy.
            guidance_interval: (first, last) indices of the codes under guidance, last excluded;
                LlamaGen's cfg_interval=i is (0, i + 2).
            codes i64 [h, w] or [n]: Fixed codes, -1 for codes to generate. A code depends on those
                before it in raster order alone.
            callback_on_step_end: Called after each forward with (pipeline, step, codes, {"codes":
                i64 [B, h * w]}). `codes` counts the codes of the image that is furthest behind;
                the tensor holds -1 for codes that are still missing.
            callback_on_step_end_tensor_inputs: Names of the tensors it receives, [] for none.

        Raises:
            InputError, SamplingError, PromptTooLongError, ModelError: An argument is refused.
        """
        check_output_type(output_type)
        self._check_decoder(output_type)
        callback = checked_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        count = checked_count(num_images_per_prompt, "num_images_per_prompt")
        raster = self._sized(height, width)
        conditions = self._conditions(prompt, class_labels, negative_prompt, height, width)
        rows = [row for row in range(len(conditions)) for _ in range(count)]
        seeds = seeds_of(generator, len(rows))
        fixed = checked_codes(codes, raster, self.tokenizer.vocab_size)
        scale = self.guidance if guidance_scale is None else guidance_scale
        target = self._open(conditions, ImageConfig(scale, guidance_interval, raster, fixed))
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seeds
        )
        output = self._create(target, conditions, rows, sampling, callback, output_type)
        return output if return_dict else output.to_tuple()

    def _sized(self, height: int | None, width: int | None) -> Raster:
        """Return the grid of an image of this size in pixels, or raise InputError."""
        usual, reduction = self.raster, self.tokenizer.reduction
        limits = usual.shape if self._by_side else (None, None)
        inputs = zip((height, width), usual.shape, limits, ("height", "width"), strict=True)
        rows, line = (
            side if pixels is None else codes_along(pixels, reduction, limit, name)
            for pixels, side, limit, name in inputs
        )
        if self._by_area and rows * line > usual.codes:
            raise InputError(
                f"got {rows * reduction} x {line * reduction} pixels, {rows * line} codes; "
                f"expected at most {usual.codes}, for which the model was made."
            )
        return Raster(rows, line, usual.ends)

    def _conditions(
        self, prompt: Any, labels: Any, negative: Any, height: int | None, width: int | None
    ) -> ImageConditions:
        """Return the conditions of a call, or raise InputError."""
        raise NotImplementedError

    def _open(self, conditions: ImageConditions, config: ImageConfig) -> ImageTarget:
        """Return the target of one call."""
        return conditions.open(self.model, config)

    def _pixels(self, codes: Tensor) -> Tensor:
        images: Tensor = self.tokenizer.decode(codes)
        return images

    def _judging(self) -> Rule:
        """Return the rule of a call, which also measures the NLL gap of each code."""
        return Surprising(self.rule)

    def _create(
        self,
        target: ImageTarget,
        conditions: Any,
        rows: Sequence[int],
        sampling: Sampling,
        callback: Callable[..., Any] | None,
        output_type: str,
    ) -> ImageOutput:
        """Generate one image for each of the condition numbers `rows`, and return the output."""
        raster, count = target.raster or self.raster, len(rows)
        engine = Engine(
            target,
            None,
            self.source(target, conditions),
            budget=self.budget,
            rule=self._judging(),
            max_batch_size=self.batch_size,
        )
        prompts = [target.prompt(row) for row in rows]
        options: dict[str, Any] = {"max_new_tokens": raster.tokens, "ignore_eos": True}
        if callback is not None:
            options["stopping_criteria"] = [lambda ids, scores: self._interrupt]
        self._interrupt = False
        began = time.perf_counter()
        with closing(self.progress_bar(total=count * raster.tokens)) as bar:
            progress = Progress(self, bar, count, raster.tokens, self.batch_size, callback, raster)
            generations: list[Generation] = engine.generate(
                prompts, sampling, on_step=progress.step, **options
            )
            progress.finish()
        return self._output(generations, time.perf_counter() - began, output_type, target)

    def _output(
        self, generations: list[Generation], seconds: float, output_type: str, target: ImageTarget
    ) -> ImageOutput:
        raster = target.raster or self.raster
        codes = codes_of(generations, raster)
        # A budget that depends on time changes the drafts, and an inexact rule then the image.
        repeatable = self.rule.label == Walk.label or isinstance(self.budget, FixedBudget)
        return ImageOutput(
            images=self.decode(codes, output_type),
            stats=stats_of(generations, seconds, raster, repeatable),
            acceptance_map=acceptance_of(generations, raster),
            label=label_for(generations, raster),
            codes=codes,
        )
