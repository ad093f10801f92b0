"""Speculative sampling of the last denoising steps, with the noise before them shared.

Draft and target share the noise of an index. Given x_s of each, which it made, the last s steps are
two distributions of paths with densities: the draft's path is kept with the chance min(1, p / q),
and where it is not, a path is drawn from what q leaves of p. The text then follows the target's
distribution whatever the draft is, as no index is judged twice. Densities are compared in log
space, in float64.

`Aligned` judges one step, `Horizon` s, `Path` all; `CspdPaper` is the criterion as published.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ragspec.errors import InputError, RuleError
from ragspec.rules.base import TargetView, Verdict
from ragspec.rules.rejection import EXACT_FOR_LABEL, children_of
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.visual.checks import whole
from ragspec.visual.latents.table import LatentTable
from ragspec.visual.latents.target import LatentView

KINDS = frozenset({DraftKind.COUPLED})

Emit = Callable[[LatentView, int, int, int], int]
"""A view, a node, its child's latent and the target's own: the latent that stands there."""


def walk(tree: DraftTree, view: LatentView, emit: Emit) -> Verdict:
    """Keep drafts for as long as `emit` takes them; a latent of its own ends the path."""
    children, path, node = children_of(tree), list[int](), ROOT
    while True:
        current, below = view.token(node), children[node]
        if not below:
            return Verdict(tuple(path), current)
        drafted = int(tree.tokens[below[0]])
        token = emit(view, node, drafted, current)
        if token != drafted:
            return Verdict(tuple(path), token)
        node = below[0]
        path.append(node)
        if view.ends(node):
            return Verdict(tuple(path), None)


def expect_latents(rule: str, target: TargetView) -> LatentView:
    """Return the view; raises RuleError where the target has no latents."""
    if isinstance(target, LatentView):
        return target
    raise RuleError(
        f"rule {rule!r} got a model of tokens; expected one of continuous latents. Use 'walk'."
    )


MOST_TRIES = 1 << 14
_TRIES = 8  # paths of the target that are drawn at once, twice as many each time

Propose = Callable[[range], tuple[Tensor, Tensor]]
"""Tries by number: latents of the target [n, D], and log p / q of each [n]."""


class Coupled:
    """Keeps a draft with the chance min(1, p / q) of its last steps; a base of rules.

    A rule says by `steps` how many these are, and may draw what is left of p in its own way.
    """

    name: str
    label = EXACT_FOR_LABEL
    accepts = KINDS

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the latent that follows it."""
        return walk(tree, expect_latents(self.name, target), self._emit)

    def steps(self, most: int) -> int:
        """Return s, how many of at most T denoising steps are judged."""
        raise NotImplementedError

    def log_ratio(self, view: LatentView, drafted: int, current: int) -> float:
        """Return log p / q of a draft, by its number and that of the target's own latent."""
        return log_ratio(view.target.table, drafted, current, self.steps(view.target.steps))

    def left(self, view: LatentView, index: int, drafted: int, current: int) -> Tensor:
        """Return a latent [D] from what the draft's distribution leaves of the target's.

        Of two distributions that are all but one, which hardly ever reject in the first place, the
        target's own latent stands in after 16,384 tries.
        """
        result = left_of_paths(view, index, drafted, current, self.steps(view.target.steps))
        return view.target.table.latents[current] if result is None else result

    def _emit(self, view: LatentView, node: int, drafted: int, current: int) -> int:
        table, index = view.target.table, view.index(node)
        if table.indices[drafted] != index:
            return current
        ratio = self.log_ratio(view, drafted, current)
        if view.noise.uniform(index, NoiseUse.ACCEPT) < math.exp(min(ratio, 0.0)):
            return drafted
        return table.add_latent(self.left(view, index, drafted, current))


def log_ratio(table: LatentTable, drafted: int, current: int, s: int) -> float:
    """Return log p / q of the last s steps of a draft's path."""
    path = table.paths[drafted][None]
    by_target = log_density(path[:, :s], *gaussians_of(table, current, path, s))
    by_draft = log_density(path[:, :s], *sampled_with(table, drafted, s))
    return float(by_target - by_draft)


def left_of_paths(
    view: LatentView,
    index: int,
    drafted: int,
    current: int,
    s: int,
    log_factor: float = 0.0,
    most: int = MOST_TRIES,
) -> Tensor | None:
    """Return a latent [D] of max(0, f p - q), by paths of the target from its own x_s on.

    log_factor: log f, of rules that weigh p. None where `most` tries bring none.
    """
    table = view.target.table
    width = table.paths.shape[-1]

    def propose(tries: range) -> tuple[Tensor, Tensor]:
        fresh = fresh_noise(view, index, tries, s).to(table.paths)
        start = table.paths[current][s].expand(len(tries), 1, width)
        conditioning = table.conditioning[current][None]
        sample = table.sampler(current).draw(conditioning, torch.cat([fresh, start], 1), s)
        by_target = log_density(sample.path[:, :s], sample.means, sample.deviations)
        by_draft = log_density(sample.path[:, :s], *gaussians_of(table, drafted, sample.path, s))
        return sample.latents, log_factor + by_target - by_draft

    return first_accepted(view, index, propose, most)


@torch.no_grad()
def first_accepted(
    view: LatentView, index: int, propose: Propose, most: int = MOST_TRIES
) -> Tensor | None:
    """Return the first try that is kept with the chance 1 - q / p, [D]; None after `most`."""
    done, count = 0, _TRIES
    while done < most:
        tries = range(done, min(done + count, most))
        latents, ratios = propose(tries)
        for row, (number, ratio) in enumerate(zip(tries, ratios.tolist(), strict=True)):
            accepted = -math.expm1(-ratio) if ratio > 0.0 else 0.0
            if view.noise.uniform(index, NoiseUse.RESIDUAL, number) < accepted:
                return latents[row]
        done, count = tries.stop, 2 * count
    return None


def fresh_noise(view: LatentView, index: int, tries: range, rows: int) -> Tensor:
    """Return normal numbers of tries that no draft has seen: f64 [n, rows, D]."""
    width = view.target.table.paths.shape[-1]
    lanes = torch.arange(tries.start * rows * width, tries.stop * rows * width)
    # Lanes above all that number the uniforms of tries.
    fresh = view.noise.normal_rows([index], lanes[None] + (1 << 40), NoiseUse.RESIDUAL)
    return fresh.reshape(len(tries), rows, width)


Gaussians = tuple[Tensor, Tensor]
"""Means and deviations of steps, [n, s, D] and [n, s, D] or [n, s, 1]."""


def sampled_with(table: LatentTable, number: int, s: int) -> Gaussians:
    """Return the Gaussians that the last s steps of a latent's path were drawn from."""
    return table.means[number][None, :s], table.deviations[number][None, :s]


@torch.no_grad()
def gaussians_of(table: LatentTable, number: int, paths: Tensor, s: int) -> Gaussians:
    """Return the Gaussians of the last s steps of paths [n, > s - 1, D], under what drew a latent.

    The first of these steps starts from that latent's own x_s, the others from the path's states.
    """
    count = len(paths)
    first = (each[:, s - 1 :].expand(count, -1, -1) for each in sampled_with(table, number, s))
    if s == 1:
        return next(first), next(first)
    between = paths[:, 1:s].flatten(0, 1)
    steps = torch.arange(1, s).repeat(count)
    result = table.sampler(number).gaussian(table.conditioning[number][None], between, steps)
    rest = (each.expand(len(between), -1).reshape(count, s - 1, -1) for each in result)
    means, deviations = (torch.cat(parts, 1) for parts in zip(rest, first, strict=True))
    return means, deviations


def log_density(path: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
    """Return log N(path; means) of s steps [n, s, D], summed: f64 [n]; see `step_densities`."""
    return step_densities(path, means, deviations).sum(-1)


def step_densities(path: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
    """Return log N(path; means) of each of s steps [n, s, D], less a constant of D: f64 [n, s].

    deviations [n, s, D] or [n, s, 1].
    """
    deviations = deviations.double()
    difference = (path.double() - means.double()) / deviations
    return -(0.5 * difference.square() + deviations.log()).sum(-1)


class Aligned(Coupled):
    """Couple the last denoising step of draft and target.

    The text follows the target's distribution.
    """

    name = "aligned"

    def steps(self, most: int) -> int:
        """Return 1."""
        return 1

    def left(self, view: LatentView, index: int, drafted: int, current: int) -> Tensor:
        """Return the draft mirrored, or a latent that tries bring: [D]."""
        table = view.target.table
        if not bool((table.deviations[current][0] == table.deviations[drafted][0]).all()):
            return super().left(view, index, drafted, current)
        return self.mirrored(view, drafted, current)

    def mirrored(self, view: LatentView, drafted: int, current: int) -> Tensor:
        """Return the target's latent [D] with the draft's last noise, mirrored between the means.

        Right for two Gaussians of the same deviations alone.
        """
        table = view.target.table
        by_target, by_draft = table.means[current][0], table.means[drafted][0]
        deviation = table.deviations[current][0].to(by_target)
        noise = (table.paths[drafted][0] - by_draft) / deviation
        difference = (by_draft - by_target) / deviation
        length = torch.linalg.vector_norm(difference)
        if not float(length):  # one distribution, where only rounding rejects
            return table.latents[current]
        difference = difference / length
        result: Tensor = by_target + deviation * (noise - 2.0 * (difference @ noise) * difference)
        return result


class Horizon(Coupled):
    """Couple the last s denoising steps of draft and target; the target's distribution stays.

    Between `aligned` (s = 1) and `path` (s = T): an early difference of the states costs less the
    earlier the paths are compared, and each step that is compared costs some. Raises InputError.
    """

    name = "horizon"

    def __init__(self, s: int = 4) -> None:
        number = whole(s)
        if number is None or number < 1:
            raise InputError(f"got s {s!r}; expected at least 1 denoising step, a whole number.")
        self.s = number

    def steps(self, most: int) -> int:
        """Return s, or T where there are fewer."""
        return min(self.s, most)


class Path(Coupled):
    """Couple whole paths of draft and target; the text follows the target's distribution.

    Every step is judged on the draft's own states, so that a forward of the head over all of them
    at once is all that it takes.
    """

    name = "path"

    def steps(self, most: int) -> int:
        """Return T."""
        return most


class CspdPaper(Coupled):
    """Keep a draft with the chance min(1, f p / q), else draw of max(0, f p - q); biased by f."""

    name = "cspd-paper"
    label = "approximate"

    def steps(self, most: int) -> int:
        """Return 1."""
        return 1

    def log_ratio(self, view: LatentView, drafted: int, current: int) -> float:
        """Return log f p / q of a draft."""
        table = view.target.table
        return log_factor(table, drafted, current) + log_ratio(table, drafted, current, 1)

    def left(self, view: LatentView, index: int, drafted: int, current: int) -> Tensor:
        """Return a latent [D] of max(0, f p - q), the target's own where nothing is left of it."""
        table = view.target.table
        factor = log_factor(table, drafted, current)
        result = left_of_paths(view, index, drafted, current, 1, factor)
        return table.latents[current] if result is None else result


def log_factor(table: LatentTable, drafted: int, current: int) -> float:
    """Return log f of the deviations of all steps but the last."""
    both = (table.deviations[each][1:].double() for each in (drafted, current))
    by_draft, by_target = (each.expand_as(table.means[current][1:]).log() for each in both)
    return float((by_draft - by_target).sum())
