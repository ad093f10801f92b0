"""What changes the law of the target before a token is chosen from it.

The mixture of a kNN language model is one: it adds what a datastore knows of the next token. The
changed law is the one that is decoded exactly, so that drafts, sampling and penalties stay as they
are, and the text depends on the seed and never on the drafts.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from ragspec.sampling.distribution import TokenLaw


class RowTransform(Protocol):
    """The transform of one text on its way. What it gives depends on the text alone."""

    def forward(self, states: torch.Tensor) -> None:
        """Hear of the target's last hidden states [N + 1, H] at the root and the nodes.

        Called once a forward, before any of its places is asked about.
        """
        ...

    def logits(self, node: int, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Return the changed logits [1, V] after a node, -1 for the root, from the target's own.

        index: the generated index of the token that follows. Asked once for every node that the
        rule visits, in its order.
        """
        ...


@runtime_checkable
class Transform(Protocol):
    """Makes the transforms of texts, see `Options.transform`. Reads hidden states.

    name: of the changed law, as the label `exact-for(name)` says it.
    """

    @property
    def name(self) -> str:
        """The name of the law."""
        ...

    def open(self, law: TokenLaw) -> RowTransform:
        """Return the transform of one text, whose processors, settings and noise are the law's."""
        ...
