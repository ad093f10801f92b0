"""How drafts grow from a draft model's distributions: modes of model and head drafters."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol

from ragspec.drafters.base import DraftRequest
from ragspec.drafters.model.cache import DraftState, KnownDistribution
from ragspec.drafters.model.coupled import CoupledGrowth
from ragspec.drafters.model.sampled import SampledGrowth
from ragspec.drafters.model.static_tree import StaticGrowth, TreeShape
from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftKind, DraftTree

WIDTH = 4
MODES = MappingProxyType({kind.value: kind for kind in DraftKind})
_BEST_FIRST = (DraftKind.COUPLED, DraftKind.DETERMINISTIC)


class Growth(Protocol):
    """Makes one draft out of a draft model's distributions."""

    kind: DraftKind

    def grow(self, draft_state: DraftState) -> DraftTree:
        """Return the draft that this ground bears."""

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the tokens that were emitted in place of the last draft."""

    def distributions(self) -> list[KnownDistribution]:
        """Return what the last draft knew at the root and at its nodes that were read."""


def make_growth(
    request: DraftRequest,
    kind: DraftKind,
    name: str,
    widths: Sequence[int],
    shape: TreeShape | None = None,
) -> Growth:
    """Return what grows the drafts of one row; shape: of a static tree, None grows best first.

    Deterministic drafts do not see the noise: they hold what the draft model thinks most probable,
    as in EAGLE-2 (arXiv 2406.16858). Coupled ones are accepted more often; but only where a draft
    does not depend on the noise can a relaxed rule know beforehand how much it may change.
    """
    distribution = _distribution_of(request)
    if kind not in _BEST_FIRST:
        return SampledGrowth(distribution, name, widths, kind)
    if kind is DraftKind.DETERMINISTIC:
        distribution = _blind(distribution)
    growth = (
        CoupledGrowth(distribution, name, widths[0])
        if shape is None
        else StaticGrowth(distribution, name, shape)
    )
    growth.kind = kind
    return growth


def checked_mode(mode: str, depth: int | None, min_expected_gain: float | None) -> DraftKind:
    """Return the kind of draft that a mode makes; raises InputError for what cannot be."""
    if mode not in MODES:
        raise InputError(f"got mode {mode!r}; expected one of {', '.join(map(repr, MODES))}.")
    if (depth is not None and depth < 1) or (min_expected_gain or 0.0) < 0.0:
        raise InputError(
            f"got depth {depth} and worth {min_expected_gain}; expected at least 1, and 0 or "
            f"more. Use "
            "drafter=None for plain decoding."
        )
    return MODES[mode]


def checked_widths(width: int | Sequence[int] | None, mode: str) -> tuple[int, ...]:
    """Return the width of a tree that grows best first, or the children by depth of a drawn one.

    Raises InputError for widths below 1, and for several where one is wanted.
    """
    one = MODES[mode] in _BEST_FIRST
    if width is None:
        return (WIDTH,) if one else (1,)
    widths = (width,) if isinstance(width, int) else tuple(width)
    if not widths or min(widths) < 1 or (one and len(widths) > 1):
        expected = "one number" if one else "numbers"
        raise InputError(
            f"got width {width!r} in mode {mode!r}; expected {expected} of at least 1."
        )
    return widths


def checked_shape(
    tree: TreeShape | Sequence[int] | None, width: int | Sequence[int] | None, mode: str
) -> TreeShape | None:
    """Return the static shape that is asked for, or whose levels are given; None for none.

    Raises InputError for modes that draw, and for levels that cannot be filled.
    """
    if tree is None:
        return None
    if MODES[mode] not in _BEST_FIRST:
        raise InputError(
            f"got a static tree in mode {mode!r}, whose shape is set by width; leave tree out."
        )
    if isinstance(tree, TreeShape):
        return tree
    return TreeShape.by_rank(tree, width if isinstance(width, int) else None)


def _distribution_of(request: DraftRequest) -> TokenDistribution:
    if request.distribution is not None:
        return request.distribution.without_lazy()
    return TokenDistribution(Sampling(), NoiseStream(0), len(request.prompt))


def _blind(distribution: TokenDistribution) -> TokenDistribution:
    """Return a distribution of the same processors that takes the most probable tokens."""
    blind = TokenDistribution(Sampling(), distribution.noise, distribution.prompt_length)
    blind.processors = distribution.processors
    return blind
