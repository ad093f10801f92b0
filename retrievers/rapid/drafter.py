"""RAPID: a draft model that reads retrieved chunks instead of the whole document.

RAPID (Chen et al. 2025, arXiv 2502.20330, section 3.1): with a long context the target pays for all
of it at every token. A drafter that reads a few retrieved chunks pays for those alone, so it may be
as large as the target, or be the target. It reads `draft_prompt` in place of the prompt, then the
generated tokens. Noise depends on the index of the generated token, so its drafts stay coupled to
the target's choices.

Deviations: drafts are judged by the target's own distribution unless `eta` is above 0, so the text
is that of plain decoding. The paper moves the distribution towards the drafter's (eta above
0), which gives another text. `steering` does that exactly; the published acceptance rule is
approximate. The published code ends a draft after a token of probability below 0.1. Here a draft
ends where its next forward does not pay; with `ModelDrafter(model, width=1, min_expected_gain=0.1)`
it ends where the path is expected to be accepted with a probability below 0.1. The drafter reads
its prompt at the first draft, and drafts nothing once its context is full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ragspec.drafters.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    DraftSession,
    KnownDistribution,
)
from ragspec.drafters.fuse import Combined, match_drafter
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.needs import Capabilities, Needs
from ragspec.retrievers.rapid.steering import Steering
from ragspec.rules.base import Step
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import DraftTree

# The target reads another prompt than the drafter.
_OFFERED = Capabilities(
    hidden_states=False,
    owner="Rapid, whose target reads another prompt",
    error=InputError,
    remedy="Use ModelDrafter, or a drafter of text.",
)


class Rapid(Combined):
    """Drafts with a model that reads `draft_prompt`, or the prompt if a request has none.

    Args:
        drafter: A transformers causal model of the target's vocabulary (the target itself, too), or
            any drafter.
        eta: 0: the text follows the target's distribution. Above: it follows one between the
            target's and the model's (`Steering`), whatever is drafted.

    Raises:
        InputError: The model is missing, or `eta` is out of range.
    """

    method = Method(
        "a model that reads `draft_prompt=`",
        "RAPID",
        make=lambda sources: Rapid(sources.draft_model),
        needs=frozenset({"draft model"}),
        uses=frozenset({"draft model"}),
        colour=5,
    )

    def __init__(self, drafter: Any = None, *, eta: float = 0.0, name: str = "rapid") -> None:
        from ragspec.drafters.model.drafter import ModelDrafter

        is_drafter = isinstance(drafter, Drafter)
        self.drafter: Drafter = drafter if is_drafter else ModelDrafter(drafter, name=name)
        match_drafter(self.drafter, _OFFERED)
        super().__init__(name, [self.drafter], Needs(draft_prompt=True))
        # The best tokens of the prompt are those of another prompt than the drafter's.
        self.needs = replace(self.needs, prompt_top_tokens=False)
        self.kind = self.drafter.kind
        if eta:
            if not isinstance(self.drafter, ModelDrafter):
                raise InputError(
                    f"got the drafter {self.drafter.name!r} with eta {eta:g}; expected a draft "
                    "model, whose distribution steers."
                )
            self.transform = Steering(self.drafter.model, eta)

    def open(self, request: DraftRequest) -> RapidSession:
        """Return a session that reads its prompt at the first proposal."""
        return RapidSession(self.drafter, request)


class RapidSession(DraftSession):
    """A drafter's session over another prompt with the same output; see `Rapid`."""

    def __init__(self, drafter: Drafter, request: DraftRequest) -> None:
        prompt = request.prompt if request.draft_prompt is None else request.draft_prompt
        distribution = request.distribution
        self._drafter = drafter
        self._request = replace(
            request,
            prompt=tuple(prompt),
            spans=(),
            draft_prompt=None,
            # Penalties count generated tokens, which begin at another index here.
            distribution=None
            if distribution is None
            else TokenDistribution(distribution.sampling, distribution.noise, len(prompt)),
        )
        self._tokens = list(prompt)
        self._length = len(prompt)
        self._copied: int | None = None  # tokens of the target's text that are in `_tokens`
        self._session: DraftSession | None = None

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the drafter's tree below its own prompt and the output."""
        copied = context.prompt_length if self._copied is None else self._copied
        self._tokens += context.tokens[copied:]
        self._copied = len(context.tokens)
        if self._session is None:
            self._session = self._drafter.open(replace(self._request, prompt=tuple(self._tokens)))
        translated = DraftContext(self._tokens, self._length, context.remaining, context.adviser)
        return self._session.propose(translated, budget)

    def distributions(self) -> Iterable[KnownDistribution] | None:
        """Return the draft model's distributions at the last proposal."""
        return None if self._session is None else self._session.distributions()

    def observe(self, step: Step) -> None:
        """Pass the step to the drafter's session, if it is open."""
        if self._session is not None:
            self._session.observe(step)
