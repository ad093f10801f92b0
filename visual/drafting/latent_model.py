"""Drafts of continuous latents by a smaller model that samples with the target's noise.

CSpD's draft (Wang et al., arXiv 2411.11925) is a chain of latents. The draft model samples each on
the target's time grid with the noise of its index, under the target's guidance. The target's table
stores the conditioning, the paths and their means, so that every rule over latents can judge them.
Deviation: a chain ends when the next latent's acceptance probability is small.
"""

from contextlib import nullcontext
from typing import Any, cast

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.method import Method
from ragspec.drafters.model.cache import DraftCache
from ragspec.rules.base import Step
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.latents.target import LatentDraws, LatentTarget
from ragspec.visual.masked.target import MaskedTarget, picture_of

MIN_EXPECTED_GAIN = 0.1
_RATE = 0.1
_TYPICAL = 0.5  # the acceptance rate that a session starts with


class LatentDrafter(Drafter):
    """Drafts chains of latents, with a smaller model or by the target's last forward.

    Args:
        draft: The smaller model as a target with the `table` of `target`, and the same conditions
            in the same order. None drafts the latents that the last forward of `target`, a
            `MaskedTarget`, sampled for the next places; its `ahead` is at least the window.
        target: The target that judges the latents.
        window: The most latents in a draft.
        min_expected_gain: The least acceptance probability, estimated from the row so far, for
            latents after the first; 0 fills the window, None is 0.1.
        begin: The index of the first drafted latent; the target generates those before it alone
            (CSpD's pre-filling, section 2).
    """

    method = Method("a smaller model of latents", "CSpD", listed=False)
    kind = DraftKind.COUPLED

    def __init__(
        self,
        draft: LatentTarget | MaskedTarget | None,
        target: LatentDraws,
        window: int = 16,
        min_expected_gain: float | None = None,
        begin: int = 0,
    ) -> None:
        assert draft is None or draft.table is target.table
        self.name = "jacobi" if draft is None else "model"
        self.draft: Any = draft
        self.target, self.window = target, window
        gain = MIN_EXPECTED_GAIN if min_expected_gain is None else min_expected_gain
        self.min_expected_gain, self.begin = gain, begin

    def open(self, request: DraftRequest) -> "LatentSession":
        """Return a session for one row."""
        return LatentSession(self, request)


class LatentSession(DraftSession):
    """Drafts a chain for one row until its acceptance probability is too small."""

    def __init__(self, drafter: LatentDrafter, request: DraftRequest) -> None:
        distribution, self._prompt = request.distribution, request.prompt
        self._noise = NoiseStream(0) if distribution is None else distribution.noise
        draft, self._cache = drafter.draft, None
        if isinstance(draft, LatentTarget):
            width = draft.copies * int(draft.model.config.hidden_size)
            self._cache = DraftCache(draft, width, len(request.prompt) + 256)
        self._drafter, self._accept_rate = drafter, _TYPICAL
        self._drafted: list[int] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` latents, empty before the index `begin`."""
        drafter, drafted, accept_prob = self._drafter, self._drafted, list[float]()
        drafted.clear()
        room = context.remaining - 1
        if self._cache is not None:
            room = min(room, int(self._cache.room(context.tokens)))
        size = min(drafter.window, budget, room)
        with nullcontext() if self._cache is None else self._cache.lease():
            while len(drafted) < size and context.generated >= drafter.begin:
                chance = self._accept_rate ** (len(drafted) + 1)
                if drafted and chance < drafter.min_expected_gain:
                    break
                number = self._next(context)
                if number is None:
                    break
                drafted.append(number)
                accept_prob.append(chance)
        return DraftTree.chain(drafted, drafter.name, accept_prob=accept_prob, kind=drafter.kind)

    def observe(self, step: Step) -> None:
        """Update the acceptance rate by the judged part of the draft, and the cache."""
        judged = self._drafted[: len(step.tree)]  # a budget may have cut the rest
        for drafted, token in zip(judged, step.tokens, strict=False):
            self._accept_rate += _RATE * ((drafted == token) - self._accept_rate)
            if drafted != token:
                break
        if self._cache is not None:
            self._cache.commit(step.tokens)

    def _next(self, context: DraftContext) -> int | None:
        """Return the number of the next latent, sampled here or by the target's last forward."""
        draft, size = self._drafter.draft, len(self._drafted)
        indices = [context.generated + size]
        if draft is None:
            target: Any = self._drafter.target
            return cast("int | None", target.guess(picture_of(self._prompt), indices[0]))
        if self._cache is None:  # of a masked model, which reads every text anew
            picture, numbers = picture_of(self._prompt), [*context.tokens[1:], *self._drafted]
            states = draft.at(draft.read([picture], [numbers])[0], picture, [len(numbers)])
        elif size:  # the last draft
            states = self._cache.extend(self._drafted[-1:], [size - 2])
        else:
            states = self._cache.read(context.tokens)
        return int(draft.add(states, draft.noise(self._noise, indices), indices)[0])
