"""Drafts for a masked target out of its own last forward, without a model.

Every forward of a masked model tells of all places that are still masked. What it drew at the
places of a draft that fell, under drafts that have gone since, is drafted again, as in speculative
Jacobi decoding (Teng et al., arXiv 2410.01699); what comes behind is its joint prediction under the
deepest prefix that it read, which is how MAR draws many latents at once (Li et al., 2406.11838).
Noise goes by the index, so each is judged once by any rule over latents.
"""

from __future__ import annotations

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.method import Method
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.drafting.latent_model import MIN_EXPECTED_GAIN, ChainSession, check_window
from ragspec.visual.masked.target import MaskedTarget, picture_of


class MaskedJacobiDrafter:
    """Drafts what the target's last forward drew for the next places.

    target: whose `ahead` is the window at least. window, worth, begin: see `LatentDrafter`. Raises
    InputError.
    """

    method = Method("a masked target's last forward", "SJD, MAR", listed=False)
    name = "jacobi"
    kind = DraftKind.COUPLED

    def __init__(
        self,
        target: MaskedTarget,
        window: int = 12,
        min_expected_gain: float = MIN_EXPECTED_GAIN,
        begin: int = 0,
    ) -> None:
        check_window(window, min_expected_gain)
        self.target, self.window, self.min_expected_gain, self.begin = (
            target,
            window,
            min_expected_gain,
            begin,
        )

    def open(self, request: DraftRequest) -> MaskedJacobiSession:
        """Return a session for the picture that the prompt names."""
        return MaskedJacobiSession(self, picture_of(request.prompt))


class MaskedJacobiSession(ChainSession):
    """How often what a forward foresaw of one picture was kept."""

    def __init__(self, drafter: MaskedJacobiDrafter, picture: int) -> None:
        super().__init__(drafter)
        self._target, self._picture = drafter.target, picture

    def next(self, context: DraftContext) -> int | None:
        """Return what the last forward drew for the next index."""
        return self._target.guess(self._picture, context.generated + len(self._drafted))
