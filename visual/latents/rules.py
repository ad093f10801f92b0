"""Rules over latents: a drafted one is kept where the target might as well have drawn it.

All walk down a chain of drafts that were drawn by the target's own head at an earlier forward, with
the noise of their index, under states that have changed since (`jacobi`). What no forward has
drawn for its index is no draft, its law being unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ragspec.acceptance.base import Rule, TargetView, Verdict
from ragspec.acceptance.rejection import EXACT_LAW, children_of
from ragspec.errors import InputError, RuleError, UnknownNameError
from ragspec.registry import unknown
from ragspec.sampling.noise import Stream
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.visual.latents.sampler import Drawn
from ragspec.visual.latents.target import LatentView

KINDS = frozenset({DraftKind.COUPLED})
_TRIES = 8  # target paths that are drawn at once after a rejection, twice as many each time
_MOST_TRIES = 1 << 14

Emit = Callable[[LatentView, int, int, int], int]
"""A view, a node, its child's latent and the target's own: the latent that stands there."""


def walk(tree: DraftTree, view: LatentView, emit: Emit) -> Verdict:
    """Keep drafts for as long as `emit` takes them; a latent of its own ends the path."""
    children, path, node = children_of(tree), list[int](), ROOT
    while True:
        own, below = view.token(node), children[node]
        if not below:
            return Verdict(tuple(path), own)
        drafted = int(tree.tokens[below[0]])
        token = emit(view, node, drafted, own)
        if token != drafted:
            return Verdict(tuple(path), token)
        node = below[0]
        path.append(node)
        if view.ends(node):
            return Verdict(tuple(path), None)


class Near:
    """Keep a draft within r of the target's own latent, which was made with the same noise.

    r: Euclidean distance, in deviations of the latents; 0 keeps what is the same, so that the
    picture is the plain one. Raises InputError for an r below 0.
    """

    name = "near"
    accepts = KINDS

    def __init__(self, r: float = 0.02) -> None:
        if not (math.isfinite(r) and r >= 0.0):
            raise InputError(f"got r {r}; expected a distance of 0 or more, such as 0.02.")
        self.r = r
        self.label = "approximate" if r else "exact"

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the latent that follows it."""
        return walk(tree, expect_latents(self.name, target), self._emit)

    def _emit(self, view: LatentView, node: int, drafted: int, own: int) -> int:
        table = view.target.table
        if table.indices[drafted] != view.index(node):
            return own
        apart = torch.linalg.vector_norm(table.latents[drafted] - table.latents[own])
        return drafted if float(apart) <= self.r else own


class Horizon:
    """Couple the last s denoising steps of draft and target; the text follows the target's law.

    Draft and target share the noise down to x_s. From there the draft's path is kept with the
    chance min(1, p / q) of its last s steps; where it is not, one is drawn from what q leaves of p.
    s = 1 is CSpD's aligned criterion (Wang et al., arXiv 2411.11925) without its factor of
    deviations, which biases it; the residual is drawn by reflection there (De Bortoli et al., arXiv
    2501.05370), as both deviations are the schedule's. s = T ("path") judges whole paths. Raises
    InputError.
    """

    name = "horizon"
    label = EXACT_LAW
    accepts = KINDS

    def __init__(self, s: int = 4) -> None:
        if s < 1:
            raise InputError(f"got s {s}; expected at least 1 denoising step.")
        self.s = s

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the latent that follows it."""
        return walk(tree, expect_latents(self.name, target), self._emit)

    def _emit(self, view: LatentView, node: int, drafted: int, own: int) -> int:
        table, index = view.target.table, view.index(node)
        if table.indices[drafted] != index:
            return own
        ratio = self._log_ratio(view, drafted, own)
        if view.noise.uniform(index, Stream.ACCEPT) < math.exp(min(ratio, 0.0)):
            return drafted
        if self._steps(view) == 1:
            return table.add_latent(self._reflected(view, drafted, own))
        return table.add_latent(self._residual(view, index, drafted, own))

    def _steps(self, view: LatentView) -> int:
        return min(self.s, view.target.sampler.schedule.steps)

    @torch.no_grad()
    def _log_ratio(self, view: LatentView, drafted: int, own: int) -> float:
        """Return log p / q of the draft's last s steps."""
        table, s = view.target.table, self._steps(view)
        path = table.paths[drafted]
        by_target = torch.empty_like(table.means[drafted][:s])
        by_target[s - 1] = table.means[own][s - 1]  # given x_s of its own
        if s > 1:
            told = table.told[own].expand(s - 1, -1, -1)
            by_target[: s - 1] = view.target.sampler.means(told, path[1:s], torch.arange(1, s))
        return float(_log_density(view, path[:s], by_target, table.means[drafted][:s]))

    def _reflected(self, view: LatentView, drafted: int, own: int) -> torch.Tensor:
        """Return the target's latent where the last step's draft was not kept: mirrored [D]."""
        table, deviation = view.target.table, float(view.target.sampler.deviations[0])
        by_target, by_draft = table.means[own][0], table.means[drafted][0]
        noise = (table.paths[drafted][0] - by_draft) / deviation
        apart = by_draft - by_target
        length = torch.linalg.vector_norm(apart)
        if not float(length):  # one law, where only rounding rejects
            return table.latents[own]
        apart = apart / length
        mirrored: torch.Tensor = by_target + deviation * (noise - 2.0 * (apart @ noise) * apart)
        return mirrored

    @torch.no_grad()
    def _residual(self, view: LatentView, index: int, drafted: int, own: int) -> torch.Tensor:
        """Return a latent [D] from what the draft's law leaves of the target's, by rejection.

        Paths of the target are drawn until one is kept, with 1 - q / p; of paths that are all but
        equally likely under both, which are hardly ever rejected in the first place, the target's
        own stands in after 16,384 tries.
        """
        target, s = view.target, self._steps(view)
        table, done, count = target.table, 0, _TRIES
        while done < _MOST_TRIES:
            drawn = self._paths(view, index, own, range(done, done + count))
            by_draft = torch.empty_like(drawn.means)
            by_draft[:, s - 1] = table.means[drafted][s - 1]  # given x_s of the draft
            if s > 1:
                between = drawn.path[:, 1:s].flatten(0, 1)
                told = table.told[drafted].expand(len(between), -1, -1)
                steps = torch.arange(1, s).repeat(count)
                by_draft[:, : s - 1] = target.sampler.means(told, between, steps).reshape(
                    count, s - 1, -1
                )
            ratios = _log_density(view, drawn.path[:, :s], drawn.means, by_draft)
            for row, ratio in enumerate(ratios.tolist()):
                kept = -math.expm1(-ratio) if ratio > 0.0 else 0.0
                if view.noise.uniform(index, Stream.RESIDUAL, done + row) < kept:
                    return drawn.path[row, 0]
            done, count = done + count, 2 * count
        return table.latents[own]

    def _paths(self, view: LatentView, index: int, own: int, tries: range) -> Drawn:
        """Return paths of the target from its own x_s on, with fresh noise."""
        target, s = view.target, self._steps(view)
        width = target.table.paths.shape[-1]
        lanes = torch.arange(tries.start * s * width, tries.stop * s * width)
        # Lanes above all that number the uniforms of tries.
        fresh = view.noise.normal_rows([index], lanes[None] + (1 << 40), Stream.RESIDUAL)
        noise = fresh.reshape(len(tries), s, width).to(target.table.paths)
        start = target.table.paths[own][s].expand(len(tries), 1, width)
        told = target.table.told[own].expand(len(tries), -1, -1)
        return target.sampler.draw(told, torch.cat([noise, start], 1), s)


def make_latent_rule(name: str, **settings: Any) -> Rule:
    """Return a rule over latents by its name, None among its settings standing for the default.

    "near" takes r, "horizon" s; "aligned" and "path" are horizons of one step and of all. Raises
    UnknownNameError, InputError for a setting that the rule has not.
    """
    rules: dict[str, tuple[Callable[..., Rule], frozenset[str]]] = {
        "near": (Near, frozenset({"r"})),
        "aligned": (lambda: Horizon(1), frozenset()),
        "horizon": (Horizon, frozenset({"s"})),
        "path": (lambda: Horizon(1 << 30), frozenset()),
    }
    if name not in rules:
        raise UnknownNameError(unknown("latent rule", name, list(rules)))
    made, known = rules[name]
    given = {key: value for key, value in settings.items() if value is not None}
    foreign = sorted(given.keys() - known)
    if foreign:
        raise InputError(
            f"rule {name!r} has no {', '.join(foreign)}; it takes "
            f"{', '.join(sorted(known)) or 'no settings'}."
        )
    return made(**given)


def expect_latents(rule: str, target: TargetView) -> LatentView:
    """Return the view; raises RuleError where the target has no latents."""
    if isinstance(target, LatentView):
        return target
    raise RuleError(
        f"rule {rule!r} got a model of tokens; expected one of continuous latents. Use 'walk'."
    )


def _log_density(
    view: LatentView, path: torch.Tensor, first: torch.Tensor, second: torch.Tensor
) -> torch.Tensor:
    """Return log N(path; first) - log N(path; second) of s steps [.., s, D], summed: f64 [..]."""
    deviations = view.target.sampler.deviations[: path.shape[-2], None].to(path.device)
    first, second = ((path.double() - mean.double()) / deviations for mean in (first, second))
    return 0.5 * (second.square() - first.square()).sum((-1, -2))
