"""`ImageOutput` and `ImageStats`: what a call of an image pipeline returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.reports.generation import Generation
from ragspec.reports.report import Report, kind_of_label
from ragspec.visual.checks import check_finite
from ragspec.visual.models.raster import Raster
from ragspec.visual.rules.tv_budget import position_excess

LABELS = (  # from the strongest to the weakest
    *("exact", "exact up to rounding", "exact-for", "exact-for up to rounding"),
    *("bounded", "approximate"),
)
UNFINISHED = "unfinished"  # the label of images if one was interrupted
OUTCOMES = ("target", "accepted", "reflected", "redrawn")
"""There was no draft; it was kept; its mirror image replaced it; another latent replaced it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageSample:
    """One image of h * w codes or latents.

    Attributes:
        values: Codes i64 [h, w], or latents f32 [h, w, D] in the scale of the autoencoder.
        label, map i64 [h, w]: See `label` and `acceptance_map` of `ImageOutput`.
        excess, gaps, outcomes, distances, report, prefixes: Its part of `ImageStats`.
    """

    values: Tensor
    label: str
    map: NDArray[np.int64]
    excess: NDArray[np.float64]
    gaps: NDArray[np.float64]
    outcomes: NDArray[np.int64] | None = None
    distances: NDArray[np.float64] | None = None
    report: Report | None = None
    prefixes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageStats:
    """Statistics of one call; B images of h * w codes or latents.

    Attributes:
        seconds: Wall time of the codes or latents, without decoding the images.
        reports: One for each image that was begun; empty for a masked model without drafts.
        excess f64 [B, h, w]: The total variation that a relaxed rule may have added at each code;
            0 under exact rules, NaN under rules that do not measure it.
        repeatable: Whether the same seeds give the same images again. They may not under an inexact
            rule with a budget that depends on time, as the drafts differ.
        gaps f64 [n]: Of each image, those of its measured codes; see `nll_gap`.
        outcomes i64 [B, h, w]: Of latents: indices into `OUTCOMES`, -1 where none was generated.
        distances f64 [B, h, w]: How far latents that an approximate rule accepted are from the
            target's own, in deviations of the latents; NaN elsewhere and under lossless rules.
        prefixes: Masked prefixes that a masked model read for all images; a forward that verifies n
            drafts reads n + 1.
    """

    excess: NDArray[np.float64]
    gaps: Sequence[NDArray[np.float64]] = ()
    outcomes: NDArray[np.int64] | None = None
    distances: NDArray[np.float64] | None = None
    reports: Sequence[Report] = ()
    prefixes: int = 0
    seconds: float = 0.0
    seeds: tuple[int, ...] = ()
    repeatable: bool = True

    @classmethod
    def of(cls, samples: Sequence[ImageSample], **call: Any) -> "ImageStats":
        """Return the statistics of images; `call` has the fields that they do not tell."""
        names = ("excess", "outcomes", "distances")
        parts = {name: [getattr(each, name) for each in samples] for name in names}
        stacked: Any = {n: None if part[0] is None else np.stack(part) for n, part in parts.items()}
        return cls(
            **stacked,
            gaps=[each.gaps for each in samples],
            reports=[each.report for each in samples if each.report is not None],
            prefixes=sum(each.prefixes for each in samples),
            **call,
        )

    @property
    def forwards(self) -> int:
        """Forward passes of the target over all images, prefill included.

        A pass over several images counts for each of them.
        """
        return sum(each.forward_passes for each in self.reports) if self.reports else self.prefixes

    @property
    def codes_per_forward(self) -> float:
        """Codes or latents per forward pass, prefill excluded."""
        if not self.reports:
            known = self.excess.size if self.outcomes is None else int((self.outcomes >= 0).sum())
            return known / max(1, self.forwards)
        passes = sum(report.forwards for report in self.reports)
        return sum(report.tokens - 1 for report in self.reports) / max(1, passes)

    @property
    def tv_excess(self) -> float | None:
        """The mean excess per position; None if the rule does not measure it."""
        mean = float(self.excess.mean()) if self.excess.size else 0.0
        return None if np.isnan(mean) else mean

    @property
    def nll_gaps(self) -> NDArray[np.float64]:
        """The NLL gaps of all measured codes, f64 [n]."""
        return np.concatenate([np.zeros(0), *self.gaps])

    @property
    def nll_gap(self) -> float | None:
        """The mean of -log p(code) - H(p) over all codes, in nats; about 0 without relaxation.

        None if it was not measured; see `nll_gap_of` in `ragspec.visual.rules.tv_budget`.
        """
        return float(self.nll_gaps.mean()) if self.nll_gaps.size else None

    @property
    def nll_gap_error(self) -> float | None:
        """One standard error of `nll_gap`."""
        size = self.nll_gaps.size
        return float(np.sqrt((self.nll_gaps**2).mean() / size)) if size else None

    @property
    def acceptance(self) -> float | None:
        """The share of judged latents that were accepted; None without drafts of latents."""
        if self.outcomes is None:
            return None
        judged = int((self.outcomes > 0).sum())
        return int((self.outcomes == OUTCOMES.index("accepted")).sum()) / judged if judged else None

    @property
    def distance_mean(self) -> float | None:
        """The mean distance of accepted latents; None if none was measured."""
        return self._distance(np.nanmean)

    @property
    def distance_most(self) -> float | None:
        """The largest distance of an accepted latent; None if none was measured."""
        return self._distance(np.nanmax)

    def summary(self) -> str:
        """Return a summary of one line."""
        count, excess = len(self.seeds), self.tv_excess
        unit = "codes" if self.outcomes is None else "latents"
        line = f"{count} image{'s' * (count > 1)}, {self.forwards} forward passes, "
        line += f"{self.codes_per_forward:.2f} {unit} a pass, {self.seconds:.2f} s"
        line += f", tv_excess {excess:.4f} a position" if excess else ""
        if excess and self.nll_gap is not None:
            line += f", NLL gap {self.nll_gap:+.3f} +- {self.nll_gap_error:.3f} nats a code"
        if self.prefixes and self.reports:
            line += f", {self.prefixes / max(1, self.forwards):.2f} masked prefixes a pass"
        if self.distance_mean is not None:
            line += (
                f", {self.acceptance:.0%} of drafts accepted, {self.distance_mean:.4f} from the "
                f"target on average, {self.distance_most:.4f} at most"
            )
        return line + ("" if self.repeatable else ", not repeatable (the budget goes by the clock)")

    def _distance(self, over: Callable[..., float]) -> float | None:
        if self.distances is None or np.isnan(self.distances).all():
            return None
        return float(over(self.distances))


@dataclass(frozen=True, slots=True, eq=False)
class ImageOutput:
    """The output of a call, for B images of h * w codes or latents.

    Attributes:
        images: A list of PIL images, float32 [B, H, W, 3] in 0 .. 1 ("np"), a tensor [B, 3, H, W]
            in 0 .. 1 ("pt"), or the codes or latents ("latent").
        acceptance_map i64 [B, h, w]: For each code or latent, how many of them its forward
            produced; 0 for those that an early end left out.
        label: Exact, exact-for(distribution), bounded(tv<=x), approximate, or unfinished if a
            callback ended the call early.
        codes i64 [B, h, w]: An image that ended early repeats its last code. None for latents.
        latents f32 [B, h, w, D]: In the scale of the autoencoder; None for codes.
    """

    images: Any
    stats: ImageStats
    acceptance_map: NDArray[np.int64]
    label: str
    codes: Any = None
    latents: Any = None


def samples_of(generations: Sequence[Generation], raster: Raster) -> list[ImageSample]:
    """Return images of codes; figures leave the ends of rows out."""
    samples, places = list[ImageSample](), set(raster.places.tolist())
    for generation in generations:
        steps, gaps, first = generation.steps, list[float](), 0
        for step in steps:
            gaps += [gap for index, gap in enumerate(step.nll_gap, first) if index in places]
            first += len(step.tokens)
        lengths = np.array([len(step.tokens) for step in steps], dtype=np.int64)
        counts, excess = np.zeros(raster.tokens, dtype=np.int64), np.zeros(raster.tokens)
        counts[:first] = lengths.repeat(lengths)
        excess[:first] = position_excess(steps, generation.label)
        sample = ImageSample(
            values=codes_of(generation.tokens, raster),
            label=generation.label if first >= raster.tokens else UNFINISHED,
            map=raster.grid(counts),
            excess=raster.grid(excess),
            gaps=np.asarray(gaps),
            report=generation.report,
        )
        samples.append(sample)
    return samples


def unfinished(like: ImageSample) -> ImageSample:
    """Return the sample of an image that an early end left out."""
    return ImageSample(
        values=torch.zeros_like(like.values),
        label=UNFINISHED,
        map=np.zeros_like(like.map),
        excess=np.zeros_like(like.excess),
        gaps=np.zeros(0),
        outcomes=None if like.outcomes is None else np.full_like(like.map, -1),
        distances=None if like.distances is None else np.full_like(like.excess, np.nan),
    )


def codes_of(tokens: Sequence[int], raster: Raster) -> Tensor:
    """Return an image's codes i64 [h, w]; one that ended early repeats its last code."""
    codes = raster.known(tokens) or [0]
    return torch.tensor(codes + [codes[-1]] * (raster.codes - len(codes))).reshape(raster.shape)


def weakest(labels: Sequence[str]) -> str:
    """Return the label with the weakest guarantee."""
    ranks = {label: rank for rank, label in enumerate(LABELS)}
    return max(labels, key=lambda each: (ranks.get(kind_of_label(each), len(ranks)), each))


def as_images(pixels: Tensor, output_type: str) -> object:
    """Return pixels [B, 3, H, W] in [-1, 1] as an output type; raise ModelError if not finite."""
    check_finite(pixels, "the decoder returned pixels")
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor().postprocess(pixels, output_type)
