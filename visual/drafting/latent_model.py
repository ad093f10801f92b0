"""Drafts of continuous latents by a smaller model that samples with the target's noise.

CSpD's draft (Wang et al., arXiv 2411.11925) is a chain of latents. The draft model samples each on
the target's time grid with the noise of its index, under the target's guidance. The target's table
stores the conditioning, the paths and their means, so that every rule over latents can judge them.
Deviation: a chain ends when the next latent's acceptance probability is small.
"""

from __future__ import annotations

from typing import Any

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.latents.target import LatentDraws
from ragspec.visual.masked.target import picture_of

MIN_EXPECTED_GAIN = 0.1
_RATE = 0.1
_TYPICAL = 0.5  # the acceptance rate that a session starts with


class ChainDrafter(Drafter):
    """The base of drafters of chains of latents.

    Args:
        target: The target that judges the latents.
        window: The most latents in a draft.
        min_expected_gain: The least acceptance probability, estimated from the row so far, for
            latents after the first; 0 fills the window.
        begin: The index of the first drafted latent; the target generates those before it alone
            (CSpD's pre-filling, section 2).

    Raises:
        InputError: window or min_expected_gain is out of range.
    """

    kind = DraftKind.COUPLED

    def __init__(
        self,
        target: Any,
        window: int = 12,
        min_expected_gain: float = MIN_EXPECTED_GAIN,
        begin: int = 0,
    ) -> None:
        if window < 1 or not 0.0 <= min_expected_gain < 1.0:
            raise InputError(
                f"got window {window} and worth {min_expected_gain}; expected at least 1, and "
                "0 to 1."
            )
        self.target, self.window = target, window
        self.min_expected_gain, self.begin = min_expected_gain, begin


class LatentDrafter(ChainDrafter):
    """Drafts chains of latents with a smaller model.

    Args:
        draft: The smaller model as a target with the `table` of `target`, and the same conditions
            in the same order.
        window, min_expected_gain, begin: See `ChainDrafter`.

    Raises:
        InputError: draft is no such target, or window or min_expected_gain is out of range.
    """

    method = Method("a smaller model of latents", "CSpD", listed=False)
    name = "model"

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
        super().__init__(target, window, min_expected_gain, begin)
        self.draft: Any = draft

    def open(self, request: DraftRequest) -> LatentSession:
        """Return a session for one row, with an empty cache."""
        noise = NoiseStream(0) if request.distribution is None else request.distribution.noise
        cache = self.draft.draft_cache(len(request.prompt) + 256)
        return LatentSession(self, noise, cache)


class ChainSession(DraftSession):
    """The base of sessions that draft a chain until its acceptance probability is too small."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._accept_rate = _TYPICAL
        self._drafted: list[int] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` latents, empty before the index `begin`."""
        drafter, drafted, accept_prob = self._drafter, self._drafted, list[float]()
        drafted.clear()
        size = min(drafter.window, budget, context.remaining - 1, self.room(context))
        while len(drafted) < size and context.generated >= drafter.begin:
            chance = self._accept_rate ** (len(drafted) + 1)
            if drafted and chance < drafter.min_expected_gain:
                break
            number = self.next(context)
            if number is None:
                break
            drafted.append(number)
            accept_prob.append(chance)
        return DraftTree.chain(drafted, drafter.name, accept_prob=accept_prob, kind=drafter.kind)

    def observe(self, step: Step) -> None:
        """Update the acceptance rate by the judged part of the draft."""
        judged = self._drafted[: len(step.tree)]  # a budget may have cut the rest
        for drafted, token in zip(judged, step.tokens, strict=False):
            self._accept_rate += _RATE * ((drafted == token) - self._accept_rate)
            if drafted != token:
                break

    def room(self, context: DraftContext) -> int:
        """Return the most latents that fit into a draft."""
        return context.remaining

    def next(self, context: DraftContext) -> int | None:
        """Draft the next latent and return its number, or None to end the chain."""
        raise NotImplementedError


class LatentSession(ChainSession):
    """Drafts one row with the smaller model and its cache."""

    def __init__(self, drafter: LatentDrafter, noise: NoiseStream, cache: Any) -> None:
        super().__init__(drafter)
        self._noise = noise
        self._cache = cache

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` latents; the model reads one after the other."""
        with self._cache.lease():
            return super().propose(context, budget)

    def observe(self, step: Step) -> None:
        """Commit the emitted latents to the cache and update the acceptance rate."""
        super().observe(step)
        self._cache.commit(step.tokens)

    def room(self, context: DraftContext) -> int:
        """Return the most latents that fit into the smaller model's context."""
        return int(self._cache.room(context.tokens))

    def next(self, context: DraftContext) -> int | None:
        """Read the text, or the last draft, and sample the next latent."""
        draft, size = self._drafter.draft, len(self._drafted)
        if size:
            states = self._cache.extend(self._drafted[-1:], [size - 2])
        else:
            states = self._cache.read(context.tokens)
        indices = [context.generated + size]
        return int(draft.add(states, draft.noise(self._noise, indices), indices)[0])


class MaskedJacobiDrafter(ChainDrafter):
    """Drafts the latents that the target's last forward sampled for the next places.

    Args:
        target: A `MaskedTarget`, whose `ahead` must be at least the window.
        window, min_expected_gain, begin: See `ChainDrafter`.

    Raises:
        InputError: window or min_expected_gain is out of range.
    """

    method = Method("a masked target's last forward", "SJD, MAR", listed=False)
    name = "jacobi"

    def open(self, request: DraftRequest) -> MaskedJacobiSession:
        """Return a session for the image that the prompt stands for."""
        return MaskedJacobiSession(self, picture_of(request.prompt))


class MaskedJacobiSession(ChainSession):
    """Drafts one image from the target's last forward."""

    def __init__(self, drafter: MaskedJacobiDrafter, picture: int) -> None:
        super().__init__(drafter)
        self._picture = picture

    def next(self, context: DraftContext) -> int | None:
        """Return the number that the last forward sampled for the next index."""
        index = context.generated + len(self._drafted)
        number: int | None = self._drafter.target.guess(self._picture, index)
        return number
