"""The recommended drafter: all available sources in one tree.

These are the text of the request, the target's own second choices (Token Recycling), the stores if
any, and the engine's draft model if it has one. There are no quotas: the adviser of the
sequence corrects the claims of each source and uses costly ones only if they pay (see
`budget.goodput`).
"""

from pathlib import Path

from ragspec.drafters.base import Drafter
from ragspec.drafters.fuse import Fuse
from ragspec.drafters.method import Method
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.retrievers.methods.next_tokens import NextTokenDrafter
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter


class AutoDrafter(Fuse):
    """Fuses the context, then the stores' drafters, then the target's second choices.

    Second choices are learned only while decoding, from all texts of an owner: for the prompt they
    would cost the prefill a pass of the output head over every token. A table of next tokens that
    comes with the model takes their place: they cost more and add little to it.
    """

    method = Method(
        "all available sources in one tree",
        "ours",
        make=lambda sources: [
            AutoDrafter(
                *sources.past(), top_k_feedback=sources.top_k_feedback, table=sources.table
            ),
            *sources.models(),
        ],
        uses=frozenset({"store", "draft model", "table"}),
    )

    def __init__(
        self, *stores: Drafter, top_k_feedback: bool = True, table: Path | None = None
    ) -> None:
        learned: list[Drafter] = [NeighbourDrafter(reads_prompt=False)] if top_k_feedback else []
        if table is not None:
            learned = [NextTokenDrafter(table)]
        super().__init__([ContextDrafter(), *stores, *learned], name="auto")
