"""What was asked to be drawn and what came of it, plain or speculative."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isinf
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ragspec.pipelines.cli.kept_codes import Kept
    from ragspec.visual.pipeline.pipeline import ImagePipeline

_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1  # of a torch generator


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be drawn, and how; settings are those of the rule, None where not given.

    rule: None until it is known what draws. rules: the columns of a sheet. image, mask: a picture
    of which a part is kept. kept: what of it is, once that is known. denoising: iterations, steps
    and floor of latents, None where not given.
    """

    prompts: tuple[str, ...]
    classes: tuple[str, ...]
    image_set: str | None
    model: str | None
    drafter: tuple[str, ...]
    rule: str | None
    settings: Mapping[str, Any]
    budget: str | int
    count: int
    seed: int | None
    guidance: float
    temperature: float
    top_k: int
    device: str
    dtype: str
    rules: tuple[str, ...] = ()
    image: Path | None = None
    mask: Path | None = None
    kept: Kept | None = None
    denoising: Mapping[str, Any] = field(default_factory=dict)

    def source(self) -> str:
        """Return the set or folder to draw with; raises InputError for contradictions."""
        if bool(self.prompts) == bool(self.classes):
            got = "both" if self.prompts else "neither a prompt nor --class"
            raise InputError(f"got {got}; expected a prompt such as 'red heart', or --class 3.")
        if self.image_set is not None and self.model is not None:
            raise InputError("got --set and --model; expected one of them.")
        return self.model or self.image_set or ("tiles" if self.classes else "emoji")

    def check(self) -> None:
        """Raise InputError, before any work, for contradictions and values out of range."""
        self.source()
        if self.seed is not None and not _LEAST_SEED <= self.seed <= _MOST_SEED:
            raise InputError(
                f"--seed is {self.seed}; expected a whole number of 64 bits, "
                f"{_LEAST_SEED} to {_MOST_SEED}."
            )
        if {"", "none"} & set(self.drafter):
            raise InputError(
                f"got --drafter {'+'.join(self.drafter)!r}; expected auto, starter, head, jacobi "
                "or a folder, several joined by +, or none by itself."
            )
        if (self.image is None) != (self.mask is None):
            got, other = ("--image", "--mask") if self.mask is None else ("--mask", "--image")
            raise InputError(f"got {got} alone; expected {other} with it: see draw --help.")
        for path in (self.image, self.mask):
            if path is not None and not path.is_file():
                raise InputError(f"there is no file {path}; expected a picture such as a PNG.")

    def check_kind(self, classes: bool) -> None:
        """Raise InputError for a prompt where the model draws classes, and the other way round."""
        if classes and not self.classes:
            raise InputError(
                f"got the prompt {self.prompts[0]!r}, but {self.source()} draws classes; expected "
                "--class with a number or a name, or --set emoji, which reads prompts."
            )
        if self.classes and not classes:
            raise InputError(
                f"got --class {self.classes[0]}, but {self.source()} reads prompts; expected one "
                "such as 'red heart', or --set tiles, which draws classes."
            )

    @property
    def subjects(self) -> list[str]:
        """What is drawn, in words, one after the other."""
        if self.prompts:
            return list(self.prompts)
        return [f"class {name}" if name.strip().isdecimal() else name for name in self.classes]

    @property
    def subject(self) -> str:
        """All that is drawn, in words."""
        return ", ".join(self.subjects)

    def named(self, names: Sequence[str], number: Callable[[str], int]) -> Asked:
        """Return the same with classes by name, where the model has names."""
        return replace(self, classes=tuple(names[number(each)] for each in self.classes))

    def given(self) -> dict[str, Any]:
        """Return the settings of the rule that were given."""
        return {name: value for name, value in self.settings.items() if value is not None}

    def rule_told(self) -> str:
        """Return the rule with its settings, for people."""
        given = ", ".join(f"{name} {value:g}" for name, value in self.given().items())
        return f"{self.rule} ({given})" if given else str(self.rule)

    def arguments(self, subject: int | None = None) -> dict[str, Any]:
        """Return what a pipeline is called with for all images, or for one of subject number."""
        name, every = ("prompt", self.prompts) if self.prompts else ("class_labels", self.classes)
        given: dict[str, Any] = {
            name: list(every if subject is None else every[subject : subject + 1]),
            "guidance_scale": self.guidance,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "num_images_per_prompt": self.count if subject is None else 1,
        }
        return given if self.kept is None else {**given, "codes": self.kept.codes}


def generator(seed: int) -> torch.Generator:
    """Return what seeds are drawn from."""
    import torch

    return torch.Generator().manual_seed(seed)


def draw_once(
    pipe: ImagePipeline, asked: Asked, dice: torch.Generator, subject: int | None = None
) -> Any:
    """Return what a pipeline draws of all that was asked for, or one image of a subject.

    Where a part of a picture is kept its own pixels are put back.
    """
    output = pipe(**asked.arguments(subject), generator=dice)
    if asked.kept is not None:
        output.images = [asked.kept.pasted(image) for image in output.images]
    return output


@dataclass(slots=True)
class Drawn:
    """The images of one way of drawing, in order; side by side in one batch or one by one."""

    outputs: list[Any]

    @property
    def images(self) -> list[Image]:
        """All images."""
        return [image for output in self.outputs for image in output.images]

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns (h, w) of the codes or latents of an image."""
        return tuple(self.outputs[0].acceptance_map.shape[1:])

    @property
    def codes(self) -> torch.Tensor:
        """The codes i64 [B, h, w]."""
        import torch

        return torch.cat([output.codes for output in self.outputs])

    @property
    def latents(self) -> torch.Tensor | None:
        """The latents f32 [B, h, w, D] of models that draw such."""
        import torch

        found = [getattr(output, "latents", None) for output in self.outputs]
        known = [each for each in found if each is not None]
        return torch.cat(known) if known else None

    @property
    def forwards(self) -> int:
        """Forward passes over all images."""
        return sum(output.stats.forwards for output in self.outputs)

    @property
    def seconds(self) -> float:
        """Seconds over all images."""
        return float(sum(output.stats.seconds for output in self.outputs))

    @property
    def tv_excess(self) -> float | None:
        """Mean excess a position; None where the rule does not measure it."""
        found = [output.stats.tv_excess for output in self.outputs for _ in output.images]
        return None if any(each is None for each in found) else fmean(found)

    @property
    def surprise(self) -> tuple[float, float] | None:
        """Mean surprise of a code and its error, nats; None where it was not measured."""
        import numpy as np

        found = np.concatenate([output.stats.surprises for output in self.outputs])
        if not found.size:
            return None
        return float(found.mean()), float(np.sqrt((found**2).mean() / found.size))

    @property
    def label(self) -> str:
        """The label that holds for all images."""
        from ragspec.visual.pipeline.output import weakest

        return weakest([output.label for output in self.outputs])

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each image."""
        return [seed for output in self.outputs for seed in output.stats.seeds]

    @property
    def codes_per_forward(self) -> float:
        """Codes by forward pass of decoding, the reading of conditions left out."""
        reports = [report for output in self.outputs for report in output.stats.reports]
        if not reports:  # masked models, plainly
            return fmean(output.stats.codes_per_forward for output in self.outputs)
        passes = sum(report.forwards for report in reports)
        codes = sum(report.tokens - 1 for report in reports)
        return float(codes / max(1, passes))

    @property
    def distance(self) -> tuple[float, float] | None:
        """Mean and largest distance of kept latents from the target's own, where it is told."""
        import numpy as np

        found = [getattr(output.stats, "distances", None) for output in self.outputs]
        known = [each[~np.isnan(each)] for each in found if each is not None]
        all_known = np.concatenate(known) if known else np.zeros(0)
        return (float(all_known.mean()), float(all_known.max())) if len(all_known) else None

    @property
    def told(self) -> str:
        """What it took, for people."""
        return f"{self.forwards} forwards, {self.seconds:.2f} s"

    def equal(self, plain: Drawn) -> list[bool]:
        """Say of each image whether it has the codes of the plain one, or its latents."""
        if self.latents is not None and plain.latents is not None:
            from ragspec.visual.evaluation.likeness import same_latents

            return same_latents(self.latents, plain.latents)
        return list(map(bool, (self.codes == plain.codes).flatten(1).all(1)))

    def parted(self, plain: Drawn) -> list[int | None]:
        """Return of each image the first code that is not the plain one's; None where all are."""
        other = (self.codes != plain.codes).flatten(1)
        return [int(row.int().argmax()) if bool(row.any()) else None for row in other]

    def psnr(self, plain: Drawn) -> float | None:
        """Return the median peak signal-to-noise ratio to the plain images, in dB, of latents.

        None for codes, and where at least half of the images are the same.
        """
        from ragspec.visual.evaluation.likeness import psnr

        if self.latents is None:
            return None
        found = [psnr(*pair) for pair in zip(self.images, plain.images, strict=True)]
        middle = float(median(found))
        return None if isinf(middle) else middle

    def ratio(self, plain: Drawn) -> float:
        """Return the median over images of plain seconds by ours."""
        pairs = zip(plain.outputs, self.outputs, strict=True)
        return float(median(one.stats.seconds / max(1e-9, two.stats.seconds) for one, two in pairs))
