"""The modes of model and head drafters: how drafts grow from a model's distributions."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from ragspec.drafters.base import DraftRequest
from ragspec.drafters.model.coupled import CoupledGrowth
from ragspec.drafters.model.sampled import SampledGrowth
from ragspec.drafters.model.static_tree import StaticGrowth, TreeShape
from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import SAMPLED_KINDS, DraftKind

WIDTH = 4
MODES = MappingProxyType({kind.value: kind for kind in DraftKind})

Growth = CoupledGrowth | SampledGrowth  # builds drafts from a draft model's distributions


def make_growth(
    request: DraftRequest,
    kind: DraftKind,
    name: str,
    widths: Sequence[int],
    shape: TreeShape | None = None,
) -> Growth:
    """Return the growth of the drafts of one row.

    Deterministic drafts ignore the noise and consist of the draft model's most probable tokens, as
    in EAGLE-2 (arXiv 2406.16858). Coupled ones are accepted more often. A relaxed rule can bound
    its change of the distribution only if the draft does not depend on the noise.

    Args:
        shape: Shape of a static tree; None grows best first.
    """
    if request.distribution is None:
        distribution = TokenDistribution(Sampling(), NoiseStream(0), len(request.prompt))
    else:
        distribution = request.distribution.without_lazy()
    if kind in SAMPLED_KINDS:
        return SampledGrowth(distribution, name, widths, kind)
    if kind is DraftKind.DETERMINISTIC:
        # The same processors, without the noise.
        greedy = TokenDistribution(Sampling(), distribution.noise, distribution.prompt_length)
        greedy.processors, distribution = distribution.processors, greedy
    growth = (
        CoupledGrowth(distribution, name, widths[0])
        if shape is None
        else StaticGrowth(distribution, name, shape)
    )
    growth.kind = kind
    return growth


def checked_settings(
    mode: str,
    depth: int | None,
    width: int | Sequence[int] | None,
    tree: TreeShape | Sequence[int] | None,
    min_expected_gain: float | None,
) -> tuple[DraftKind, tuple[int, ...], TreeShape | None]:
    """Return the kind, the widths and the static shape for the settings of `ModelDrafter`.

    Raises:
        InputError: A setting is out of range or does not fit the mode.
    """
    if mode not in MODES:
        raise InputError(f"got mode {mode!r}; expected one of {', '.join(map(repr, MODES))}.")
    if (depth is not None and depth < 1) or (min_expected_gain or 0.0) < 0.0:
        raise InputError(
            f"got depth {depth} and min_expected_gain {min_expected_gain}; expected at least 1 and "
            "at least 0. Use drafter=None for plain decoding."
        )
    kind = MODES[mode]
    sampled = kind in SAMPLED_KINDS
    if width is None:
        widths: tuple[int, ...] = (1,) if sampled else (WIDTH,)
    else:
        widths = (width,) if isinstance(width, int) else tuple(width)
    if not widths or min(widths) < 1 or (not sampled and len(widths) > 1):
        expected = "numbers" if sampled else "one number"
        raise InputError(
            f"got width {width!r} in mode {mode!r}; expected {expected} of at least 1."
        )
    if tree is not None and sampled:
        raise InputError(
            f"got a static tree in mode {mode!r}, whose shape is set by width; leave tree out."
        )
    if tree is None or isinstance(tree, TreeShape):
        return kind, widths, tree
    return kind, widths, TreeShape.by_rank(tree, width if isinstance(width, int) else None)
