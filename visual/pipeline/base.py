"""The base of the pipelines over image codes: generation, progress, statistics and outputs."""

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

    Subclasses create the target and set the attributes.

    Attributes:
        tokenizer: Of the codes.
        side: Codes along each side of the square image.
        source: Creates the drafter of each call.
    """

    # The tensors that a callback may request; diffusers reads this name.
    _callback_tensor_inputs: ClassVar[list[str]] = list(TENSORS)

    tokenizer: Any
    side: int
    source: DraftSource
    rule: Rule
    budget: Any
    batch_size: int
    image_processor: Any

    def decode(self, codes: Tensor, output_type: str = "pil") -> Any:
        """Decode codes i64 [B, h, w] into images of an output_type; see `ImageOutput`."""
        if output_type == "latent":
            return codes
        images = self._decoded(self.tokenizer.decode, codes)
        return self.image_processor.postprocess(images, output_type)

    def _raster(self, target: ImageTarget) -> Raster:
        """Return the grid of the codes of a call."""
        return target.raster or Raster(self.side, self.side)

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
        raster, count = self._raster(target), len(rows)
        engine = Engine(
            target,
            None,
            self.source(target, conditions),
            budget=self.budget,
            rule=self._judging(),
            batch_size=self.batch_size,
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
        raster = self._raster(target)
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
