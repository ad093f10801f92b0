"""What was asked to be drawn and what came of it, plain and speculative side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isinf
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from ragspec.errors import InputError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

LETTERS = 40


_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1  # of a torch generator


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be drawn, and how; settings are those of the rule, None where not given.

    rule: None until it is known what draws.
    """

    prompt: str | None
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

    def source(self) -> str:
        """Return the set or folder to draw with; raises InputError for contradictions."""
        if (self.prompt is None) == (not self.classes):
            got = "neither a prompt nor --class" if self.prompt is None else "both"
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

    def check_kind(self, classes: bool) -> None:
        """Raise InputError for a prompt where the model draws classes, and the other way round."""
        if classes and not self.classes:
            raise InputError(
                f"got the prompt {self.prompt!r}, but {self.source()} draws classes; expected "
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
        if self.prompt is not None:
            return [self.prompt]
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


MOST_ROWS = 6  # images of a comparison picture


@dataclass(slots=True)
class Drawn:
    """The images of one way of drawing, in order; side by side in one batch or one by one."""

    outputs: list[Any]

    @property
    def images(self) -> list[Image]:
        """All images."""
        return [image for output in self.outputs for image in output.images]

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


def distance_told(distance: tuple[float, float]) -> str:
    """Return how far kept latents were, for people."""
    return f"kept latents {distance[0]:.3f} off on average, {distance[1]:.3f} at most"


def comparison_picture(asked: Asked, drawn: Drawn, plain: Drawn, seed: int) -> Image:
    """Return plain and speculative images side by side, and what was accepted."""
    from ragspec.visual.evaluation import pictures

    count = len(drawn.images)
    rows = shown_rows(count)
    relaxed = _relaxed(drawn)
    together = [each for output in drawn.outputs for each in output.acceptance_map]
    maps = [pictures.heat_map(drawn.images[n], together[n], relaxed[n]) for n in rows]
    notes = [
        f"label {drawn.label} · {sum(drawn.equal(plain))} of {count} images the same as plain ones"
    ]
    psnr = drawn.psnr(plain)
    if psnr is not None:
        notes[0] += f" · {psnr:.1f} dB to the plain ones"
    if drawn.distance is not None:
        notes[0] += f" · {distance_told(drawn.distance)}"
    if drawn.tv_excess is not None and not drawn.label.startswith("exact"):
        notes[0] += f" · tv_excess {drawn.tv_excess:.4f} a position"
        if drawn.surprise is not None:
            notes[0] += " · surprise {:+.3f} ± {:.3f} a code".format(*drawn.surprise)
    if len(rows) < count:
        notes.append(f"{len(rows)} of {count} shown")
    columns = [
        pictures.Column("plain", plain.told, [plain.images[n] for n in rows]),
        pictures.Column(asked.rule_told(), drawn.told, [drawn.images[n] for n in rows]),
        pictures.Column(
            "what was accepted", f"{drawn.codes_per_forward:.2f} codes a forward", maps
        ),
    ]
    return pictures.comparison(
        columns,
        title=f"{asked.subject}, seed {seed}: {drawn.ratio(plain):.2f} times as fast",
        notes=notes,
        rows=[f"image {n}: {asked.subjects[n // asked.count]}" for n in rows] if count > 1 else (),
        dots=any(each is not None for each in relaxed),
    )


def shown_rows(count: int) -> list[int]:
    """Return the numbers of the images that a comparison shows, spread evenly over all."""
    shown = min(count, MOST_ROWS)
    return [row * count // shown for row in range(shown)]


def _relaxed(drawn: Drawn) -> list[Any]:
    """Return for each image where the rule took another code than the target's, where it is known.

    A rule that takes one for another has an excess of 0 or 1 at every code; other excesses are
    parts of a law and mark no code.
    """
    found: list[Any] = []
    for output in drawn.outputs:
        for excess in output.stats.excess:
            whole = output.label == "approximate" and set(excess.reshape(-1).tolist()) <= {0.0, 1.0}
            found.append(excess > 0 if whole else None)
    return found
