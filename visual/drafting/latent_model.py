"""Drafts of continuous latents by a smaller model, which draws with the noise of the target.

CSpD's draft (Wang et al., arXiv 2411.11925): a chain of latents, each drawn by the draft's trunk
and head on the target's time grid with the noise of its index, guided as the target is. What its
head was told, its paths and their means lie in the target's table, so that every rule over latents
can judge them. Deviation: a chain ends where the next latent's chance to be kept is small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.latents.target import LatentDraws
from ragspec.visual.masked.target import MaskedTarget, picture_of

MIN_EXPECTED_GAIN = 0.1
_RATE = 0.1
_TYPICAL = 0.5  # chance of a draft to be kept, before any was judged


class LatentDrafter:
    """Drafts chains of latents with a smaller model.

    draft: the smaller model as a target of its own, with the `table` of the target that it drafts
    for, and its conditions in the same order. window: the most latents of a draft.
    min_expected_gain: the least chance to be kept, by what was kept of this row so far, for which a
    latent is drawn behind the first; 0 fills the window. begin: index of the first latent that is
    drafted, the target draws those before it alone (CSpD's pre-filling, section 2). Raises
    InputError.
    """

    method = Method("a smaller model of latents", "CSpD", listed=False)
    name = "model"
    kind = DraftKind.COUPLED

    def __init__(
        self,
        draft: Any,
        target: LatentDraws,
        window: int = 16,
        min_expected_gain: float = MIN_EXPECTED_GAIN,
        begin: int = 0,
    ) -> None:
        if not isinstance(draft, LatentDraws) or draft.table is not target.table:
            raise InputError(
                f"got a {type(draft).__name__} to draft with; expected a LatentTarget or a "
                "MaskedTarget over the smaller model that was made with table=target.table."
            )
        check_window(window, min_expected_gain)
        self.draft: Any = draft
        self.window = window
        self.min_expected_gain = min_expected_gain
        self.begin = begin

    def open(self, request: DraftRequest) -> LatentSession:
        """Return a session for one row, which has read nothing yet."""
        noise = NoiseStream(0) if request.distribution is None else request.distribution.noise
        cache = self.draft.draft_cache(len(request.prompt) + 256)
        return LatentSession(self, noise, cache)


def check_window(window: int, min_expected_gain: float) -> None:
    """Raise InputError for a window without latents, and a worth that is no chance."""
    if window < 1 or not 0.0 <= min_expected_gain < 1.0:
        raise InputError(
            f"got window {window} and worth {min_expected_gain}; expected at least 1, and 0 to 1."
        )


class ChainSession:
    """Chains of latents, as long as they are likely enough to be kept; a base of sessions."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._selection = _TYPICAL
        self._drafted: list[int] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` latents; none before the drafter begins."""
        drafter, drafted, accept_prob = self._drafter, self._drafted, list[float]()
        drafted.clear()
        size = min(drafter.window, budget, context.remaining - 1, self.room(context))
        while len(drafted) < size and context.generated >= drafter.begin:
            chance = self._selection ** (len(drafted) + 1)
            if drafted and chance < drafter.min_expected_gain:
                break
            number = self.next(context)
            if number is None:
                break
            drafted.append(number)
            accept_prob.append(chance)
        return DraftTree.chain(drafted, drafter.name, accept_prob=accept_prob, kind=drafter.kind)

    def observe(self, step: Step) -> None:
        """Learn how much of the draft the target kept."""
        judged = self._drafted[: len(step.tree)]  # a budget may have cut the rest
        for drafted, token in zip(judged, step.tokens, strict=False):
            self._selection += _RATE * ((drafted == token) - self._selection)
            if drafted != token:
                break

    def room(self, context: DraftContext) -> int:
        """Return how many latents may be drafted at most."""
        return context.remaining

    def next(self, context: DraftContext) -> int | None:
        """Return the number of the latent that follows those drafted so far, None for none."""
        raise NotImplementedError


class LatentSession(ChainSession):
    """The smaller model's cache for one row, and how often its drafts are kept."""

    def __init__(self, drafter: LatentDrafter, noise: NoiseStream, cache: Any) -> None:
        super().__init__(drafter)
        self._noise = noise
        self._cache = cache

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` latents, read and drawn one after the other."""
        with self._cache.lease():
            return super().propose(context, budget)

    def observe(self, step: Step) -> None:
        """Keep in the cache what the target kept of the draft, and learn how much that is."""
        super().observe(step)
        self._cache.commit(step.tokens)

    def room(self, context: DraftContext) -> int:
        """Return how deep a draft may be, by the smaller model's context."""
        return int(self._cache.room(context.tokens))

    def next(self, context: DraftContext) -> int | None:
        """Read the text, or the last draft, and draw what follows."""
        draft, index = self._drafter.draft, context.generated + len(self._drafted)
        states = self._states(context)
        noise = draft.noise(self._noise, [index])
        return int(draft.add(states, noise, [index])[0])

    def _states(self, context: DraftContext) -> Tensor:
        """Read the text, or the last draft; return the states of what follows [1, C * H]."""
        if not self._drafted:
            return torch.as_tensor(self._cache.read(context.tokens))
        slot = len(self._drafted) - 1
        return torch.as_tensor(self._cache.extend(self._drafted[slot:], [slot - 1]))


class MaskedJacobiDrafter:
    """Drafts what the target's last forward drew for the next places.

    target: whose `ahead` is the window at least. window, min_expected_gain, begin: see
    `LatentDrafter`. Raises InputError.
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
        """Return a session for the image that the prompt names."""
        return MaskedJacobiSession(self, picture_of(request.prompt))


class MaskedJacobiSession(ChainSession):
    """How often what a forward foresaw of one image was kept."""

    def __init__(self, drafter: MaskedJacobiDrafter, picture: int) -> None:
        super().__init__(drafter)
        self._target, self._picture = drafter.target, picture

    def next(self, context: DraftContext) -> int | None:
        """Return what the last forward drew for the next index."""
        return self._target.guess(self._picture, context.generated + len(self._drafted))
