"""RAPID: a draft model that reads what was retrieved instead of the whole document.

RAPID (Chen et al. 2025, arXiv 2502.20330, section 3.1): over a long context the target pays for all
of it at every token; a drafter that reads a few retrieved chunks pays for those alone, and may then
be as large as the target, or be the target. It reads `Options.draft_prompt` in place of the prompt,
and behind it what was generated; noise goes by the index of the generated token, so that its drafts
are coupled to the target's choices all the same.

Where we deviate: drafts are judged by the target's own distribution unless another mode is asked
for, so that the text is that of plain decoding. The paper moves the distribution towards the
drafter's (eta above 0), which is another text: `steering` does that without a loss, where the
published acceptance is approximate. The drafter reads its prompt when a draft is first wanted, and
falls silent where its context is full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Feedback
from ragspec.drafters.delegate import KnowsDistributions
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.retrievers.rapid.steering import eta_of
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import DraftTree

if TYPE_CHECKING:
    from ragspec.drafters.model.cache import KnownDistribution
    from ragspec.sampling.transform import Transform


class Rapid:
    """Drafts with a model over a prompt of its own.

    Args:
        drafter: A transformers causal model of the target's vocabulary (the target itself, too), or
            any drafter. Without `draft_prompt` it reads the prompt, as that drafter would.
        mode: "exact", the distribution of the text is the target's; "steered", the one between both
            (`Steering`), whatever is drafted.
        eta: How far the distribution moves, None for 10 (0 in mode "exact").

    Raises:
        InputError: For no model or an eta below 0.
        UnknownNameError: For another mode.
    """

    method = Method(
        "a model that reads `draft_prompt=`",
        "RAPID",
        make=lambda sources: Rapid(sources.draft_model),
        needs=frozenset({"draft model"}),
        uses=frozenset({"draft model"}),
        colour=5,
    )
    wants_draft_prompt = True

    def __init__(
        self,
        drafter: Any = None,
        *,
        mode: str = "exact",
        eta: float | None = None,
        name: str = "rapid",
    ) -> None:
        from ragspec.drafters.model.drafter import ModelDrafter

        eta = eta_of(mode, eta)
        current = isinstance(drafter, Drafter) and not isinstance(drafter, type)
        self.drafter: Drafter = drafter if current else ModelDrafter(drafter, name=name)
        self.kind = self.drafter.kind
        self.name = name
        self.mode = mode
        self.transform: Transform | None = None
        if mode == "steered" and eta:
            self.transform = self._steering(eta)

    def _steering(self, eta: float) -> Transform:
        from ragspec.retrievers.rapid.steering import Steering

        model = getattr(self.drafter, "model", None)
        if model is None:
            raise InputError(
                f"got the drafter {self.drafter.name!r} with mode='steered'; expected a draft "
                "model, whose distribution steers."
            )
        return Steering(model, eta)

    def open(self, request: DraftRequest) -> RapidSession:
        """Return a session that reads its prompt when it is first asked for a draft."""
        return RapidSession(self.drafter, request)


class RapidSession:
    """A drafter over another beginning of the same text; see `Rapid`."""

    def __init__(self, drafter: Drafter, request: DraftRequest) -> None:
        current = request.prompt if request.draft_prompt is None else request.draft_prompt
        distribution = request.distribution
        self._drafter = drafter
        self._request = replace(
            request,
            prompt=tuple(current),
            spans=(),
            draft_prompt=None,
            # Penalties count what was generated, which begins elsewhere here.
            distribution=None
            if distribution is None
            else TokenDistribution(distribution.sampling, distribution.noise, len(current)),
        )
        self._tokens = list(current)
        self._length = len(current)
        self._visible: int | None = None  # tokens of the text that are here, too
        self._session: DraftSession | None = None

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the drafter's tree below the text, as far as it sees it."""
        known = context.prompt_length if self._visible is None else self._visible
        self._tokens += context.tokens[known:]
        self._visible = len(context.tokens)
        if self._session is None:
            self._session = self._drafter.open(replace(self._request, prompt=tuple(self._tokens)))
        translated = DraftContext(self._tokens, self._length, context.remaining, context.adviser)
        return self._session.propose(translated, budget)

    def distributions(self) -> Iterable[KnownDistribution]:
        """Return what the draft model knew at the last proposal."""
        return (
            self._session.distributions() if isinstance(self._session, KnowsDistributions) else ()
        )

    def observe(self, feedback: Feedback) -> None:
        """Hand on what came of the step, once there is a drafter."""
        if self._session is not None:
            self._session.observe(feedback)  # type: ignore[arg-type]
