"""A test whether the denoising paths of committed latents follow the target's distribution.

Each step is z_t = (x_(t - 1) - mu(x_t)) / sigma_t, with the target's mu and sigma after the latents
committed before. Under the target's distribution z_t is standard normal: over many pictures the
mean square of its numbers is 1 within sqrt(2 / count), at every step. The rule decides what the
path of a committed latent is:

- Plain pictures, and latents without a judged draft: all T steps, as they were sampled.
- A rule that couples the last s steps (aligned 1, horizon s, path T): the target's steps above x_s,
  which target and draft share, then s steps of the committed latent. These are the steps of an
  accepted draft, with the target's means at the draft's states (the first from the target's x_s),
  or of the path that replaced it. A reflected latent has one such step.
- A rule without steps, such as near: as a rule that couples one step, since it replaces x_0 alone.

A lossless rule makes all such paths follow the target's distribution, whatever was drafted. A
figure that is not 1 within its error disproves that. Plain pictures are 1 up to the noise itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch

from ragspec.visual.latents.rules import gaussians_of, sampled_with, step_densities
from ragspec.visual.latents.sampler import LatentSample, Sampler
from ragspec.visual.latents.target import Judged, LatentTarget

_NOT_SAMPLED = -1  # the index of latents of the table that were sampled after a rejection


class _RecordingSampler(Sampler):
    """A sampler that records the last paths which started from a state of another path."""

    last: LatentSample | None = None

    def draw(
        self, conditioning: torch.Tensor, noise: torch.Tensor, start: int | None = None
    ) -> LatentSample:
        sample = super().draw(conditioning, noise, start)
        if start is not None:
            self.last = sample
        return sample


class PathTarget(LatentTarget):
    """A target that also records the paths of latents that were sampled after a rejection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sampler = self.sampler
        self.recorder = self.sampler = _RecordingSampler(
            sampler.head, sampler.schedule, sampler.scale
        )
        self.resampled: dict[int, torch.Tensor] = {}  # [s + 1, D], by number

    def note(self, judged: Judged) -> None:
        """Record a verdict and the path of the latent that it sampled."""
        super().note(judged)
        last, self.recorder.last = self.recorder.last, None
        number = judged.emitted
        if last is None or self.table.indices[number] != _NOT_SAMPLED:
            return
        same = (last.path[:, 0] == self.table.latents[number]).all(-1).nonzero()
        if len(same):
            self.resampled[number] = last.path[int(same[0])].clone()  # only the accepted attempt

    @torch.no_grad()
    def squares(self, numbers: Sequence[int], steps: int | None) -> torch.Tensor:
        """Return the mean square over D of each step of committed latents.

        Args:
            numbers: Numbers of the latents in the table.
            steps: Steps that the rule judges; None if it compares no densities.

        Returns:
            f64 [n, T]; column t - 1 is of z_t.
        """
        table, s = self.table, steps or 1
        judged = [self.table.judged[number] for number in numbers]
        targets = torch.tensor([each.target_number for each in judged])
        path, means = table.paths[targets].clone(), table.means[targets].clone()
        deviations = table.deviations[targets].clone()
        replaced = [row for row, each in enumerate(judged) if each.emitted != each.target_number]
        for row in replaced:
            states = self._states(judged[row], s)
            path[row, : len(states)] = states
        for row in replaced if s > 1 else ():
            gaussians = gaussians_of(table, int(targets[row]), path[row][None], s)
            for into, each in zip((means, deviations), gaussians, strict=True):
                into[row, : s - 1] = each[0, : s - 1]
        z = (path[:, :-1].double() - means.double()) / deviations.double()
        return z.square().mean(-1).cpu()

    @torch.no_grad()
    def ratios(self, numbers: Sequence[int], steps: int | None) -> torch.Tensor:
        """Return log p / q of each step of the judged drafts.

        Args:
            numbers: Numbers of the latents in the table.
            steps: Steps that the rule judges; None if it compares no densities.

        Returns:
            f64 [n, T]; column t - 1 is of x_(t - 1). NaN of other steps and without a draft.
        """
        table, most = self.table, self.sampler.schedule.steps
        log_ratios = torch.full((len(numbers), most), torch.nan, dtype=torch.float64)
        s, judged = steps or 1, [self.table.judged[number] for number in numbers]
        rows = [row for row, each in enumerate(judged) if each.drafted is not None]
        if not rows:
            return log_ratios
        for row in rows:
            drafted, target = judged[row].drafted, judged[row].target_number
            assert drafted is not None
            path = table.paths[drafted][None]
            distributions = (gaussians_of(table, target, path, s), sampled_with(table, drafted, s))
            p, q = (step_densities(path[:, :s], *distribution) for distribution in distributions)
            log_ratios[row, :s] = (p - q)[0].cpu()
        return log_ratios

    def _states(self, judged: Judged, s: int) -> torch.Tensor:
        """Return the states x_0 .. x_(s - 1) that replace those of the target."""
        if judged.accepted:
            return self.table.paths[judged.emitted][:s]
        path = self.resampled.get(judged.emitted)
        return self.table.latents[judged.emitted][None] if path is None else path[:s]


@dataclass(slots=True)
class PathMoments:
    """Mean squares of the steps of many committed latents of `width` numbers each."""

    width: int
    latents: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def add(self, squares: torch.Tensor) -> None:
        """Add the mean squares f64 [n, T] of n latents."""
        self.latents += len(squares)
        self.sums = self.sums + squares.sum(0) if len(self.sums) else squares.sum(0)

    @property
    def by_step(self) -> list[float]:
        """The mean square of each step [T], the last one, z_1, first."""
        means: list[float] = (self.sums / self.latents).tolist()
        return means

    @property
    def total(self) -> float:
        """The mean square over all steps."""
        return float(self.sums.mean()) / self.latents

    @property
    def error(self) -> float:
        """The standard error of one step's mean square under the target's distribution."""
        return sqrt(2.0 / (self.latents * self.width))

    @property
    def total_error(self) -> float:
        """The standard error of the mean over all steps."""
        return self.error / sqrt(len(self.sums))

    @property
    def worst(self) -> float:
        """The largest deviation from 1 of a step or of all steps, in standard errors."""
        steps = max(abs(value - 1.0) for value in self.by_step) / self.error
        return max(steps, abs(self.total - 1.0) / self.total_error)
