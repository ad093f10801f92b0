"""A draft model that does not see the noise: it proposes the codes that it thinks most probable.

A coupled draft accepts more, but says nothing about the target's choice before that is made. Only a
draft that does not depend on the noise lets a relaxed rule know beforehand how much it may change,
so that a budget of total variation bounds the law of the picture (see `variation`). The tree grows
best first by the draft's own probabilities, as in EAGLE-2 (arXiv 2406.16858) and LANTERN.
"""

from __future__ import annotations

from typing import Any

from ragspec.coupled import CoupledGrowth
from ragspec.draft import DraftKind, DraftRequest
from ragspec.draft_cache import DraftCache
from ragspec.law import TokenLaw
from ragspec.model_drafter import ModelDrafter, ModelSession
from ragspec.noise import NoiseStream
from ragspec.sampling import Sampling


class BlindDrafter(ModelDrafter):
    """Drafts with a smaller model's most probable codes; arguments as for `ModelDrafter`."""

    def __init__(
        self,
        model: Any = None,
        depth: int | None = None,
        width: int | None = None,
        *,
        worth: float | None = None,
        name: str = "model",
    ) -> None:
        super().__init__(model, depth, width, worth=worth, name=name)
        self.kind = DraftKind.DETERMINISTIC

    def open(self, request: DraftRequest) -> ModelSession:
        """Return a session whose cache holds the prompt, so that drafting begins at once."""
        length = len(request.prompt)
        law = TokenLaw(Sampling(), NoiseStream(0), length)
        if request.law is not None:
            law.processors = request.law.without_lazy().processors
        growth = CoupledGrowth(law, self.name, self.widths[0])
        growth.kind = self.kind
        cache = DraftCache(self.model, request.vocab_size, length + 256)
        if request.prompt and cache.readable(request.prompt):
            with cache.lease():
                cache.read(request.prompt)
        return ModelSession(cache, growth, self.depth, self.worth)
