"""Whether the denoising paths of committed latents are the target's own.

Under the target's law each step z_t = (x_(t - 1) - mu(x_t)) / sigma_t, mu and sigma of the target
at what was committed before, is standard normal: over many pictures the mean square of its numbers
is 1 within sqrt(2 / count), at every step. What a committed latent's path is hangs on the rule:

- plain pictures, and latents that no draft was judged for: all T steps, as they were drawn;
- a rule that couples the last s steps (aligned 1, horizon s, path T): the target's own steps above
  x_s, which target and draft share, then the s steps of what stands there: of the draft that was
  kept, with the target's means at the draft's states (the first from the target's own x_s), or of
  the path that was drawn in its place. A reflected latent has one such step;
- a rule without steps, such as near: as if it coupled one, x_0 being all that it puts in place.

A lossless rule makes whole paths of that kind follow the target's law, whatever was drafted, so a
figure that is not 1 within its error proves it wrong. Plain pictures are 1 up to the noise itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch

from ragspec.rules.base import Verdict
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.latents.judged import Judged, WatchedTarget
from ragspec.visual.latents.rules.coupling import gaussians_of, sampled_with, step_densities
from ragspec.visual.latents.sampler import LatentSample, Sampler
from ragspec.visual.latents.target import LatentView

_NOT_SAMPLED = -1  # the index of latents of the table that were made after a rejection


class _Redraws(Sampler):
    """A sampler that keeps the last paths which started from a state of another one."""

    last: LatentSample | None = None

    def draw(
        self, message: torch.Tensor, noise: torch.Tensor, start: int | None = None
    ) -> LatentSample:
        sample = super().draw(message, noise, start)
        if start is not None:
            self.last = sample
        return sample


class PathTarget(WatchedTarget):
    """A target that also keeps the paths of latents that were drawn after a rejection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        current = self.sampler
        self.redraws = self.sampler = _Redraws(current.head, current.schedule, current.scale)
        self.redrawn: dict[int, torch.Tensor] = {}  # [s + 1, D], by number

    def note(self, tree: DraftTree, view: LatentView, verdict: Verdict) -> None:
        """Take note of a verdict, and of the path of a latent that it brought."""
        super().note(tree, view, verdict)
        last, self.redraws.last = self.redraws.last, None
        number = verdict.token
        if last is None or number is None or self.table.indices[number] != _NOT_SAMPLED:
            return
        same = (last.path[:, 0] == self.table.latents[number]).all(-1).nonzero()
        if len(same):
            self.redrawn[number] = last.path[int(same[0])].clone()  # not all the tries

    @torch.no_grad()
    def squares(self, numbers: Sequence[int], steps: int | None) -> torch.Tensor:
        """Return the mean square over D of each step of committed latents: f64 [n, T].

        steps: those by which the rule judges, None where it has none. [:, t - 1] is of z_t.
        """
        table, s = self.table, steps or 1
        judged = [self.judged[number] for number in numbers]
        current = torch.tensor([each.target_number for each in judged])
        path, means = table.paths[current].clone(), table.means[current].clone()
        deviations = table.deviations[current].clone()
        other = [row for row, each in enumerate(judged) if each.emitted != each.target_number]
        for row in other:
            states = self._states(judged[row], s)
            path[row, : len(states)] = states
        for row in other if s > 1 else ():
            result = gaussians_of(table, int(current[row]), path[row][None], s)
            for selected, each in zip((means, deviations), result, strict=True):
                selected[row, : s - 1] = each[0, : s - 1]
        z = (path[:, :-1].double() - means.double()) / deviations.double()
        return z.square().mean(-1).cpu()

    @torch.no_grad()
    def ratios(self, numbers: Sequence[int], steps: int | None) -> torch.Tensor:
        """Return log p / q of each step of the drafts that were judged: f64 [n, T].

        [:, t - 1] is that of x_(t - 1), as a rule of so many steps counts it; NaN of other steps,
        and where there was no draft.
        """
        table, most = self.table, self.sampler.schedule.steps
        result = torch.full((len(numbers), most), torch.nan, dtype=torch.float64)
        s, judged = steps or 1, [self.judged[number] for number in numbers]
        rows = [row for row, each in enumerate(judged) if each.drafted is not None]
        if not rows:
            return result
        for row in rows:
            drafted, current = judged[row].drafted, judged[row].target_number
            assert drafted is not None
            path = table.paths[drafted][None]
            distributions = (gaussians_of(table, current, path, s), sampled_with(table, drafted, s))
            p, q = (step_densities(path[:, :s], *distribution) for distribution in distributions)
            result[row, :s] = (p - q)[0].cpu()
        return result

    def _states(self, judged: Judged, s: int) -> torch.Tensor:
        """Return the states x_0 .. x_(s - 1) of what stands in place of the target's own."""
        if judged.accepted:
            return self.table.paths[judged.emitted][:s]
        result = self.redrawn.get(judged.emitted)
        return self.table.latents[judged.emitted][None] if result is None else result[:s]


@dataclass(slots=True)
class PathMoments:
    """Mean squares of the steps of many committed latents. width: D."""

    width: int
    latents: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def add(self, squares: torch.Tensor) -> None:
        """Take in the mean squares f64 [n, T] of n latents."""
        self.latents += len(squares)
        self.sums = self.sums + squares.sum(0) if len(self.sums) else squares.sum(0)

    @property
    def by_step(self) -> list[float]:
        """The mean square of each step, that of the last one, z_1, first [T]."""
        means: list[float] = (self.sums / self.latents).tolist()
        return means

    @property
    def total(self) -> float:
        """The mean square over all steps."""
        return float(self.sums.mean()) / self.latents

    @property
    def error(self) -> float:
        """The standard error of one step's mean square under the target's law."""
        return sqrt(2.0 / (self.latents * self.width))

    @property
    def total_error(self) -> float:
        """That of the mean over all steps."""
        return self.error / sqrt(len(self.sums))

    @property
    def worst(self) -> float:
        """The largest deviation from 1 of a step or of all, in standard errors."""
        steps = max(abs(value - 1.0) for value in self.by_step) / self.error
        return max(steps, abs(self.total - 1.0) / self.total_error)
