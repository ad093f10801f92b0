"""What the pipelines of image codes share: seeds, passes, callbacks, figures, progress, outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from diffusers.utils import BaseOutput
from numpy.typing import NDArray
from torch import Tensor

from ragspec.budget.policy import FixedBudget
from ragspec.engine.engine import Engine
from ragspec.engine.output import Generation
from ragspec.errors import InputError
from ragspec.rules.base import Rule, expect_rule
from ragspec.rules.walk import Walk
from ragspec.sampling.settings import Sampling
from ragspec.visual.models.raster import Raster
from ragspec.visual.models.target import ImageTarget
from ragspec.visual.pipeline.diffusers_mixin import DiffusersMixin
from ragspec.visual.pipeline.drafter_choice import DraftSource
from ragspec.visual.pipeline.output import ImageStats, acceptance_of, codes_of, label_for, stats_of
from ragspec.visual.pipeline.progress import Progress
from ragspec.visual.pipeline.relaxation import settings_of
from ragspec.visual.pipeline.request import TENSORS
from ragspec.visual.rules.by_name import make_rule
from ragspec.visual.rules.tv_budget import Surprising

NODES = 12  # of a draft, where nothing is said


@dataclass
class ImageOutput(BaseOutput):  # type: ignore[misc, unused-ignore]
    """What a call returns, for B images of h * w codes.

    Attributes:
        images: A list of PIL images, float32 [B, H, W, 3] in 0 .. 1 ("np"), a tensor [B, 3, H, W]
            in 0 .. 1 ("pt"), or the codes ("latent").
        stats: See `ImageStats`.
        acceptance_map i64 [B, h, w]: How many codes came with the forward that gave this one.
        label: Exact, exact-for(distribution), bounded(tv<=x), approximate, or unfinished where a
            callback ended the call early. codes i64 [B, h, w]; an image that was ended early
            repeats its last one, and its acceptance is 0 there.
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
    """Return a rule, its name and its settings; without any those of `relaxation`, a file, hold.

    The rest: see `make_rule`. Raises InputError, UnknownNameError, ModelError.
    """
    if not isinstance(rule, str):
        if settings:
            raise InputError(f"got a Rule and {', '.join(settings)}; expected settings by a name.")
        return expect_rule(rule), rule.name, {}
    there = relaxation if relaxation is not None and relaxation.is_file() else None
    settings = settings or settings_of(there, rule)
    created = make_rule(
        rule, codebook, positions=positions, normalised=normalised, marks=marks, **settings
    )
    return created, rule, settings


class CodePipeline(DiffusersMixin):
    """Draws the codes of images with a target and a drafter, and decodes them.

    Subclasses make the target of a call and what drafts for it, and set these: tokenizer (of the
    codes), side (of the square of codes), source (of drafters), rule, budget, batch_size,
    image_processor.
    """

    # Where diffusers tells what a callback may ask for.
    _callback_tensor_inputs: ClassVar[list[str]] = list(TENSORS)

    tokenizer: Any
    side: int
    source: DraftSource
    rule: Rule
    budget: Any
    batch_size: int
    image_processor: Any

    def decode(self, codes: Tensor, output_type: str = "pil") -> Any:
        """Return the images of codes i64 [B, h, w]; output_type as for a call."""
        if output_type == "latent":
            return codes
        images = self._decoded(self.tokenizer.decode, codes)
        return self.image_processor.postprocess(images, output_type)

    def _raster(self, target: ImageTarget) -> Raster:
        """Return how the codes of a call lie."""
        return target.raster or Raster(self.side, self.side)

    @property
    def _repeatable(self) -> bool:
        """Whether a seed fixes an image, whatever else was drawn and however fast."""
        return self.rule.label == Walk.label or isinstance(self.budget, FixedBudget)

    def _judging(self) -> Rule:
        """Return the rule of a call, which also measures what it does."""
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
        """Return what a call returns; rows: the condition of each image."""
        engine = Engine(
            target,
            None,
            self.source(target, conditions),
            budget=self.budget,
            rule=self._judging(),
            batch_size=self.batch_size,
        )
        prompts = [target.prompt(row) for row in rows]
        began = time.perf_counter()
        generations = self._draw(engine, prompts, sampling, callback, self._raster(target))
        return self._output(generations, time.perf_counter() - began, output_type, target)

    def _draw(
        self,
        engine: Engine,
        prompts: list[list[int]],
        sampling: Sampling,
        callback: Callable[..., Any] | None,
        raster: Raster,
    ) -> list[Generation]:
        tokens, count = raster.tokens, len(prompts)
        self._interrupt = False
        with closing(self.progress_bar(total=count * tokens)) as bar:
            progress = Progress(self, bar, count, tokens, self.batch_size, callback, raster)
            options: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
            if callback is not None:
                options["stopping_criteria"] = [lambda ids, scores: self._interrupt]
            generations: list[Generation] = engine.generate(
                prompts, sampling, on_step=progress.step, **options
            )
            progress.finish()
        return generations

    def _output(
        self, generations: list[Generation], seconds: float, output_type: str, target: ImageTarget
    ) -> ImageOutput:
        raster = self._raster(target)
        codes = codes_of(generations, raster)
        return ImageOutput(
            images=self.decode(codes, output_type),
            stats=stats_of(generations, seconds, raster, self._repeatable),
            acceptance_map=acceptance_of(generations, raster),
            label=label_for(generations, raster),
            codes=codes,
        )
