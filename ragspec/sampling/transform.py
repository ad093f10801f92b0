"""What changes the law of the target before a token is chosen from it.

The mixture of a kNN language model is one: it adds what a datastore knows of the next token; the
steering of RAPID another: it adds what a model says that reads less. The changed law is the one
that is decoded exactly, so that drafts, sampling and penalties stay as they are, and the text
depends on the seed and never on the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class TextStart:
    """What a transform is told of a text.

    law: processors, settings and noise of its own. prompt: without what was written before this
    call. draft_prompt: what is read in place of the prompt by who does not read that.
    """

    distribution: TokenDistribution
    prompt: tuple[int, ...]
    vocab_size: int
    draft_prompt: tuple[int, ...] | None = None


class RowTransform(Protocol):
    """The transform of one text on its way. What it gives depends on the text alone.

    One that measures by how much its law differs from the target's own may have `drift`: the mean
    total variation of the places that were asked.
    """

    def forward(self, states: torch.Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Hear of a forward of the target, before any of its places is asked about.

        states: its last hidden states [N + 1, H] at the root and the nodes of the tree, None where
        they are not read. tokens: the text so far, the root last; lent, it grows after the step.
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
    """Makes the transforms of texts, see `Options.transform`.

    name: of the changed law, as the label `exact-for(name)` says it. reads_hidden: whether it needs
    the target's last hidden states.
    """

    @property
    def name(self) -> str:
        """The name of the law."""
        ...

    @property
    def reads_hidden(self) -> bool:
        """Whether the states of `RowTransform.forward` are wanted."""
        ...

    def open(self, start: TextStart) -> RowTransform:
        """Return the transform of one text."""
        ...
