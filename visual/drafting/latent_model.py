"""Drafts of continuous latents by a smaller model, which draws with the noise of the target.

CSpD's draft (Wang et al., arXiv 2411.11925): a chain of latents, each drawn by the draft's trunk
and head on the target's time grid with the noise of its index, guided as the target is. What its
head was told, its paths and their means lie in the target's table, so that every rule over latents
can judge them. Deviation: a chain ends where the next latent's chance to be kept is small.
"""

from __future__ import annotations

import torch

from ragspec.acceptance.base import Step
from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.drafters.method import Method
from ragspec.drafters.model.cache import DraftCache
from ragspec.errors import InputError
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.latents.target import LatentTarget

WORTH = 0.1
_RATE = 0.1
_TYPICAL = 0.5  # chance of a draft to be kept, before any was judged


class LatentDrafter:
    """Drafts chains of latents with a smaller model.

    draft: the smaller `LatentModel` as a target of its own, with the `table` of the target that it
    drafts for, and its conditions in the same order. window: the most latents of a draft. worth:
    the least chance to be kept, by what was kept of this row so far, for which a latent is drawn
    behind the first; 0 fills the window. Raises InputError.
    """

    method = Method("a smaller model of latents", "CSpD", listed=False)
    name = "model"
    kind = DraftKind.COUPLED

    def __init__(
        self, draft: LatentTarget, target: LatentTarget, window: int = 16, worth: float = WORTH
    ) -> None:
        if not isinstance(draft, LatentTarget) or draft.table is not target.table:
            raise InputError(
                f"got a {type(draft).__name__} to draft with; expected a LatentTarget over the "
                "smaller model that was made with table=target.table."
            )
        if window < 1 or not 0.0 <= worth < 1.0:
            raise InputError(
                f"got window {window} and worth {worth}; expected at least 1, and 0 to 1."
            )
        self.draft = draft
        self.window = window
        self.worth = worth

    def open(self, request: DraftRequest) -> LatentSession:
        """Return a session for one row, which has read nothing yet."""
        noise = NoiseStream(0) if request.law is None else request.law.noise
        return LatentSession(self, noise, len(request.prompt))


class LatentSession:
    """The smaller model's cache for one row, and how often its drafts are kept."""

    def __init__(self, drafter: LatentDrafter, noise: NoiseStream, prompt_length: int) -> None:
        draft = drafter.draft
        states = draft.copies * int(draft.model.config.hidden_size)
        self._drafter = drafter
        self._noise = noise
        self._cache = DraftCache(draft, states, prompt_length + 256)
        self._kept = _TYPICAL
        self._drafted: list[int] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a chain of at most `budget` latents, read and drawn one after the other."""
        drafter, cache = self._drafter, self._cache
        room = min(budget, context.remaining - 1, cache.room(context.tokens))
        size = min(drafter.window, room)
        drafted, reach = self._drafted, list[float]()
        drafted.clear()
        with cache.lease():
            while len(drafted) < size:
                chance = self._kept ** (len(drafted) + 1)
                if drafted and chance < drafter.worth:
                    break
                index = context.generated + len(drafted)
                states = self._states(context)
                noise = drafter.draft.noise(self._noise, [index])
                drafted.extend(drafter.draft.add(states, noise, [index]))
                reach.append(chance)
        return DraftTree.chain(drafted, drafter.name, reach=reach, kind=drafter.kind)

    def observe(self, step: Step) -> None:
        """Keep in the cache what the target kept of the draft, and learn how much that is."""
        judged = self._drafted[: len(step.tree)]  # a budget may have cut the rest
        for drafted, token in zip(judged, step.tokens, strict=False):
            self._kept += _RATE * ((drafted == token) - self._kept)
            if drafted != token:
                break
        self._cache.commit(step.tokens)

    def _states(self, context: DraftContext) -> torch.Tensor:
        """Read the text, or the last draft; return the states of what follows [1, C * H]."""
        if not self._drafted:
            return self._cache.read(context.tokens)
        slot = len(self._drafted) - 1
        return self._cache.extend(self._drafted[slot:], [slot - 1])
