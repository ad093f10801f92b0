"""The recommended drafter: everything that is there to draft from, as one tree.

The text of the request, the target's own second choices (Token Recycling), and stores where they
are given; a draft model joins where the engine has one. There are no quotas: the adviser of the
row corrects what each source claims and asks costly ones only where they pay (see
`budget.source_choice`).
"""

from __future__ import annotations

from ragspec.drafters.base import Drafter
from ragspec.drafters.fuse import Fuse
from ragspec.drafters.method import Drafters, Method, Sources
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter


class AutoDrafter(Fuse):
    """The context, then the stores' drafters, then the target's second choices, fused.

    The second choices are learned while writing only: at the prompt they would cost the prefill a
    pass of the output head over every token.
    """

    method = Method(
        "all available sources in one tree",
        "ours",
        make=lambda sources: _over(sources),
        uses=frozenset({"store"}),
    )

    def __init__(self, *stores: Drafter, top_k_feedback: bool = True) -> None:
        learned = [NeighbourDrafter(reads_prompt=False)] if top_k_feedback else []
        super().__init__([ContextDrafter(), *stores, *learned], name="auto")


def _over(sources: Sources) -> Drafters:
    drafter = AutoDrafter(*sources.past(), top_k_feedback=sources.top_k_feedback)
    return [drafter, *sources.models()] if sources.draft_model is not None else drafter
