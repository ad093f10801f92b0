"""The settings of model and head drafters: which drafts grow from a model's distributions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ragspec.drafters.base import DraftRequest
from ragspec.drafters.model.coupled import CoupledGrowth
from ragspec.drafters.model.growth import Growth
from ragspec.drafters.model.sampled import SampledGrowth
from ragspec.drafters.model.static_tree import StaticGrowth
from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling, checked_count, checked_number
from ragspec.trees.draft_tree import SAMPLED_KINDS, DraftKind

WIDTH = 4


@dataclass(frozen=True, slots=True)
class GrowthSettings:
    """The checked settings of a drafter, see `ModelDrafter`.

    Attributes:
        widths: The width, or in sampled modes the children of each node by depth.
        shape: Shape of a static tree; None grows best first.
    """

    kind: DraftKind
    depth: int | None
    widths: tuple[int, ...]
    shape: TreeShape | None
    min_expected_gain: float | None

    @classmethod
    def checked(
        cls,
        mode: str,
        depth: int | None,
        width: int | Sequence[int] | TreeShape | None,
        min_expected_gain: float | None,
        chains: bool,
    ) -> Self:
        """Return the settings for a model that reads trees or, if `chains`, one path at a time.

        Raises:
            InputError: A setting is out of range or does not fit the mode.
        """
        if mode not in (modes := [kind.value for kind in DraftKind]):
            raise InputError(f"got mode {mode!r}; expected one of {', '.join(map(repr, modes))}.")
        depth = None if depth is None else checked_count(depth, "depth")
        if min_expected_gain is not None:
            checked_number(min_expected_gain, "min_expected_gain")
        kind = DraftKind(mode)
        sampled = kind in SAMPLED_KINDS
        if isinstance(width, TreeShape) and not sampled:
            return cls(kind, depth, (), width, min_expected_gain)
        one = (1 if sampled or chains else WIDTH) if width is None else width
        several = one if isinstance(one, (list, tuple)) else (one,)
        widths = tuple(checked_count(each, "width") for each in several)
        if not widths:
            raise InputError("got no numbers as width; expected at least one, or leave it out.")
        shape = None if sampled or several == (one,) else TreeShape.by_rank(widths)
        return cls(kind, depth, widths, shape, min_expected_gain)

    def open(self, request: DraftRequest, name: str) -> Growth:
        """Return the growth of the drafts of one row.

        A relaxed rule can bound its change of the distribution only if the draft does not depend on
        the noise, which deterministic drafts ignore. Coupled ones are accepted more often.

        Args:
            name: The source name of the nodes.
        """
        if request.distribution is None:
            distribution = TokenDistribution(Sampling(), NoiseStream(0), len(request.prompt))
        else:
            distribution = request.distribution.without_lazy()
        if self.kind in SAMPLED_KINDS:
            return SampledGrowth(distribution, name, self.widths, self.kind)
        if self.kind is DraftKind.DETERMINISTIC:
            # The same processors, without the noise.
            rest = distribution.noise, distribution.prompt_length, distribution.processors
            distribution = TokenDistribution(Sampling(), *rest)
        if self.shape is None:
            return CoupledGrowth(distribution, name, self.widths[0], self.kind)
        return StaticGrowth(distribution, name, self.shape, self.kind)
