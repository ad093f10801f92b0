"""Transforms of the target's distribution, applied before a token is chosen from it.

A kNN language model mixes in a datastore's distribution of the next token. RAPID steers by the
distribution of a model that reads less. The changed distribution is decoded exactly: drafts,
sampling and penalties work as before, and the text depends on the seed and never on the drafts.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ragspec.needs import Needs
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class TextStart:
    """The facts about a text for its transform.

    Attributes:
        distribution: The text's own processors, settings and noise.
        prompt: Token ids, without those that earlier calls wrote.
        draft_prompt: Token ids that models with a context of their own read in place of the prompt.
    """

    distribution: TokenDistribution
    prompt: tuple[int, ...]
    vocab_size: int
    draft_prompt: tuple[int, ...] | None = None


class RowTransform(ABC):
    """The transform of one text; its logits depend on the text alone."""

    @property
    def drift(self) -> float | None:
        """Mean total variation from the target's distribution, over the visited nodes, if known."""
        return None

    @abstractmethod
    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Take a forward of the target, before `logits` is called for any of its nodes.

        Args:
            states: Last hidden states [N + 1, H] at the root and the nodes, None if not needed.
            tree: The draft tree of the forward.
            tokens: The text so far, the root last; the list is lent and grows after the step.
        """

    @abstractmethod
    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the changed logits [1, V] after a node, -1 for the root, from the target's own.

        It is called once for every node that the rule visits, in the rule's order.

        Args:
            index: The generated index of the token that follows.
        """


class Transform(ABC):
    """Makes the transforms of texts, see `Options.transform`.

    Attributes:
        name: The name of the changed distribution, as in the label `exact-for(name)`.
        needs: The data that `RowTransform.forward` gets; hidden states only if they are needed.
    """

    name: str
    needs: Needs = Needs()

    @abstractmethod
    def open(self, start: TextStart) -> RowTransform:
        """Return the transform of one text."""
