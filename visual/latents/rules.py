"""Rules over latents, by name: CSpD's, and `near`.

CSpD is speculative sampling of the last denoising steps, with the noise before them shared.

Draft and target share the noise of an index. Given the state x_s of each, the last s steps are two
distributions of paths with densities. The draft's path is kept with probability min(1, p / q); else
a path is drawn from the residual of p and q. The latents then follow the target's distribution for
any draft, as no index is judged twice. Densities are compared in log space, in float64.

`Aligned` judges one step, `Horizon` s, `Path` all.

`Near` keeps a draft close to the target's own latent of the same noise. It is `walk` over latents:
it needs no density, and with r = 0 the image equals that of plain decoding.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from ragspec.needs import Capabilities, Needs, match
from ragspec.registry import expect_known
from ragspec.reports.report import ROUNDED
from ragspec.rules.base import EXACT_FOR_LABEL, Rule, TargetView, Verdict
from ragspec.rules.walk import descend
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.checks import RULE_SETTINGS, check_setting, check_settings
from ragspec.visual.latents.target import Judged, LatentTable, LatentView


class LatentRule(Rule):
    """A base of rules over latents: a rule keeps a draft, or emits another latent in its place."""

    accepts = frozenset({DraftKind.COUPLED})
    needs = Needs(latents=True)

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the latent after it; raise RuleError without latents."""
        if not isinstance(target, LatentView):
            match(f"rule {self.name!r}", self.needs, Capabilities())
        view = cast(LatentView, target)

        def decide(node: int, siblings: Sequence[int]) -> tuple[int | None, int]:
            sampled, index = view.token(node), view.index(node)
            drafted = int(tree.tokens[siblings[0]]) if siblings else None
            if drafted is not None and view.target.table.indices[drafted] != index:
                drafted = None  # only a latent sampled for this index is a draft
            token = sampled if drafted is None else self._emit(view, index, drafted, sampled)
            view.target.note(Judged(drafted, sampled, token))
            return siblings[0] if token == drafted else None, token

        return descend(tree, view, decide)

    def _emit(self, view: LatentView, index: int, drafted: int, sampled: int) -> int:
        """Return the latent to emit at an index, by a draft and the target's own sample."""
        raise NotImplementedError


MOST_TRIES = 1 << 14
_TRIES = 8  # paths of the target in the first batch; every batch doubles

Propose = Callable[[range], tuple[Tensor, Tensor]]
"""Maps the numbers of n tries to latents of the target [n, D] and their log f p / q [n]."""
Gaussians = tuple[Tensor, Tensor]
"""Means and deviations of steps, [n, s, D] each."""


class Coupled(LatentRule):
    """A base of rules that keep a draft with probability min(1, p / q) of its last `s` steps."""

    s: float  # the number of judged denoising steps, where there are as many
    label = EXACT_FOR_LABEL

    def log_factor(self, table: LatentTable, drafted: int, sampled: int) -> float:
        """Return log f, by which p is weighed beside q; 0 keeps the target's distribution."""
        return 0.0

    def log_ratio(self, view: LatentView, drafted: int, sampled: int) -> float:
        """Return log f p / q of a draft, by its number and that of the target's sample."""
        table, s = view.target.table, int(min(self.s, view.target.steps))
        path = table.paths[drafted][None]
        target, draft = gaussians_of(table, sampled, path, s), sampled_with(table, drafted, s)
        ratio = float(log_ratios(path[:, :s], target, draft))
        return self.log_factor(table, drafted, sampled) + ratio

    def left(self, view: LatentView, index: int, drafted: int, sampled: int) -> Tensor:
        """Return a latent [D] from the residual max(0, f p - q).

        The target's sample stands in after 16,384 tries, as nearly equal distributions may need.
        """
        latent = first_accepted(view, index, self.tries(view, index, drafted, sampled))
        return view.target.table.latents[sampled] if latent is None else latent

    def tries(self, view: LatentView, index: int, drafted: int, sampled: int) -> Propose:
        """Return a function that draws paths of the target, from its own x_s on, as tries."""
        table, s = view.target.table, int(min(self.s, view.target.steps))
        factor = self.log_factor(table, drafted, sampled)

        def propose(tries: range) -> tuple[Tensor, Tensor]:
            fresh = fresh_noise(view, index, tries, s).to(table.paths)
            start = table.paths[sampled][s].expand(len(tries), 1, -1)
            conditioning = table.conditioning[sampled][None]
            sample = table.samplers[sampled].draw(conditioning, torch.cat([fresh, start], 1), s)
            target = sample.means, sample.deviations
            draft = gaussians_of(table, drafted, sample.path, s)
            return sample.latents, factor + log_ratios(sample.path[:, :s], target, draft)

        return propose

    def _emit(self, view: LatentView, index: int, drafted: int, sampled: int) -> int:
        ratio = self.log_ratio(view, drafted, sampled)
        if view.noise.uniform(index, NoiseUse.ACCEPT) < math.exp(min(ratio, 0.0)):
            return drafted
        return view.target.table.add_latent(self.left(view, index, drafted, sampled))


@torch.no_grad()
def first_accepted(
    view: LatentView, index: int, propose: Propose, most: int = MOST_TRIES
) -> Tensor | None:
    """Return the first try [D] kept with probability 1 - q / p, or None after `most` tries."""
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
    """Return normal numbers for tries, independent of all drafts: f64 [n, rows, D]."""
    width = view.target.table.paths.shape[-1]
    lanes = torch.arange(tries.start * rows * width, tries.stop * rows * width)
    # These lanes are above those of the tries' uniform numbers.
    fresh = view.noise.normal([index], lanes[None] + (1 << 40), NoiseUse.RESIDUAL)
    return fresh.reshape(len(tries), rows, width)


def sampled_with(table: LatentTable, number: int, s: int) -> Gaussians:
    """Return the Gaussians that the last s steps of a latent's path were drawn from."""
    return table.means[number][None, :s], table.deviations[number][None, :s]


@torch.no_grad()
def gaussians_of(table: LatentTable, number: int, paths: Tensor, s: int) -> Gaussians:
    """Return the Gaussians of the last s steps of paths [n, > s - 1, D] under a latent's sampler.

    The first of these steps starts from that latent's own x_s, the others from the path's states.
    """
    count = len(paths)
    first = (each[:, s - 1 :].expand(count, -1, -1) for each in sampled_with(table, number, s))
    if s == 1:
        return next(first), next(first)
    between = paths[:, 1:s].flatten(0, 1)
    steps = torch.arange(1, s).repeat(count)
    later = table.samplers[number].gaussian(table.conditioning[number][None], between, steps)
    rest = (each.expand_as(between).reshape(count, s - 1, -1) for each in later)
    means, deviations = (torch.cat(parts, 1) for parts in zip(rest, first, strict=True))
    return means, deviations


def log_ratios(path: Tensor, target: Gaussians, draft: Gaussians) -> Tensor:
    """Return log p / q of s steps [n, s, D] of paths, summed: f64 [n]."""
    return step_densities(path, *target).sum(-1) - step_densities(path, *draft).sum(-1)


def step_densities(path: Tensor, means: Tensor, deviations: Tensor) -> Tensor:
    """Return log N(path; means) of each of s steps [n, s, D], less a constant of D: f64 [n, s].

    Args:
        deviations: [n, s, D] or [n, s, 1].
    """
    deviations = deviations.double()
    difference = (path.double() - means.double()) / deviations
    return -(0.5 * difference.square() + deviations.log()).sum(-1)


class Aligned(Coupled):
    """Couples the last denoising step of draft and target; keeps the target's distribution."""

    name = "aligned"
    s = 1

    def left(self, view: LatentView, index: int, drafted: int, sampled: int) -> Tensor:
        """Return the mirrored draft [D], or one by tries if the deviations differ."""
        table = view.target.table
        if not bool((table.deviations[sampled][0] == table.deviations[drafted][0]).all()):
            return super().left(view, index, drafted, sampled)
        return self.mirrored(view, drafted, sampled)

    def mirrored(self, view: LatentView, drafted: int, sampled: int) -> Tensor:
        """Return the target's latent [D] with the draft's last noise, mirrored between the means.

        This is exact only for two Gaussians of the same deviations.
        """
        table = view.target.table
        by_target, by_draft = table.means[sampled][0], table.means[drafted][0]
        deviation = table.deviations[sampled][0].to(by_target)
        noise = (table.paths[drafted][0] - by_draft) / deviation
        difference = (by_draft - by_target) / deviation
        length = torch.linalg.vector_norm(difference)
        if not float(length):  # equal distributions: only rounding rejects
            return table.latents[sampled]
        difference = difference / length
        latent: Tensor = by_target + deviation * (noise - 2.0 * (difference @ noise) * difference)
        return latent


class Horizon(Coupled):
    """Couples the last s denoising steps of draft and target; keeps the target's distribution.

    It lies between `aligned` (s = 1) and `path` (s = T). A larger s makes an early difference of
    the states cost less, but every compared step costs some acceptance.
    """

    name = "horizon"

    def __init__(self, s: int = 4) -> None:
        check_setting("s", s)
        self.s = int(s)


class Path(Coupled):
    """Couples whole paths of draft and target; keeps the target's distribution.

    Every step is judged on the draft's own states, so that one forward of the head suffices.
    """

    name = "path"
    s = math.inf


class Near(LatentRule):
    """Keeps a draft within r of the target's own latent, which has the same noise.

    Args:
        r: Euclidean distance of 0 or more, in deviations of the latents. 0 gives the image of plain
            decoding.
    """

    name = "near"

    def __init__(self, r: float = 0.02) -> None:
        check_setting("r", r)
        self.r = r

    @property
    def label(self) -> str:
        """`exact up to rounding` if only equal latents are kept, else `approximate`."""
        return "approximate" if self.r else f"exact{ROUNDED}"

    def _emit(self, view: LatentView, index: int, drafted: int, sampled: int) -> int:
        latents = view.target.table.latents
        difference = torch.linalg.vector_norm(latents[drafted] - latents[sampled])
        return drafted if float(difference) <= self.r else sampled


RULES: dict[str, Callable[..., Rule]] = {rule.name: rule for rule in (Near, Aligned, Horizon, Path)}


def make_latent_rule(name: str, **settings: object) -> Rule:
    """Return a rule over latents by its name.

    Args:
        settings: r of "near", s of "horizon"; None stands for the default.

    Raises:
        UnknownNameError: There is no such rule.
        InputError: The rule has no such setting.
    """
    expect_known("latent rule", [name], RULES)
    inputs = {key: value for key, value in settings.items() if value is not None}
    check_settings(name, inputs, {*RULE_SETTINGS[name]})
    return RULES[name](**inputs)
