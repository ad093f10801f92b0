"""The protocol of an acceptance rule, its view of the target, and the records of a step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ragspec.errors import InputError
from ragspec.needs import HiddenStates, Needs
from ragspec.trees.draft_tree import DraftKind, DraftTree, Ints

if TYPE_CHECKING:
    from torch import Tensor

    from ragspec.rules.target_view import RowView
    from ragspec.sampling.noise import NoiseStream
    from ragspec.sampling.top_tokens import TopTokens

ALL_KINDS = frozenset(DraftKind)
EXACT_FOR_LABEL = "exact-for(distribution)"


class TargetView(Protocol):
    """The target's distributions in one step of one row, each computed when a rule reads it.

    `node` is a draft node, or -1 for the root; each method is about the token that follows it.
    """

    noise: "NoiseStream"

    def index(self, node: int) -> int:
        """Return the generated index of the token that follows the node."""

    def token(self, node: int) -> int:
        """Return the target's own token after the node, argmax(log p + g)."""

    def probabilities(self, node: int) -> "Tensor":
        """Return the distribution after the node, all processors applied: f64 [V], on the CPU."""

    def ends(self, node: int) -> bool:
        """Return whether the text ends with the node, so that nothing follows it."""


class Rule(ABC):
    """Judges one draft tree.

    Attributes:
        name: The name by which the rule is chosen and reported.
        accepts: The kinds of draft that the rule can judge without bias.
        needs: The data of the target that it uses beside the chosen tokens.
        relaxed_by: The setting that determines how far a relaxed rule relaxes; None for others.
    """

    name: str
    accepts: frozenset[DraftKind] = ALL_KINDS
    needs: Needs = Needs()
    relaxed_by: str | None = None

    @property
    @abstractmethod
    def label(self) -> str:
        """`exact` if each seed gives the output of plain decoding, `exact-for(distribution)` if
        only the distribution of the output is the same, else `approximate`."""

    def open(self) -> "Rule":
        """Return the rule for one row: itself, unless it keeps state."""
        return self

    @abstractmethod
    def judge(self, tree: DraftTree, target: TargetView) -> "Verdict":
        """Return the accepted path and the token that follows it."""


def expect_rule(rule: object) -> Rule:
    """Return the rule unchanged.

    Raises:
        InputError: The object is no rule, or a class instead of an instance.
    """
    if isinstance(rule, Rule):
        return rule
    raise InputError(f"got rule={rule!r}; expected a name such as 'walk', or a Rule.")


@dataclass(slots=True)
class Step:
    """One draft, one forward of the target, one verdict.

    `best`, `hidden` and `view` are valid only during `observe`.

    Attributes:
        path: Accepted nodes, root side first [A].
        tokens: Emitted tokens: those of `path` and one by the target [A + 1]; fewer after a stop.
        best: The target's best tokens at the root and every node, if computed; `top` copies them.
        hidden: The target's hidden states there, N + 1 of them, for drafters that need
            them. With guidance a sequence has several copies, the conditional one first.
        view: The target's choices and distributions at all nodes, visited or not; `ends` is not
            valid. None with processors that keep state.
        excess: Total variation that a relaxed rule may have added, one value per emitted token;
            empty if the rule does not measure it.
        nll_gap: -log p less the entropy of p, one value per emitted token, under the target's
            distribution p there; empty if the rule does not measure it.
    """

    tree: DraftTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    milliseconds: dict[str, float] = field(default_factory=dict)
    best: "TopTokens | None" = None
    hidden: HiddenStates | None = None
    view: "RowView | None" = None
    excess: tuple[float, ...] = ()
    nll_gap: tuple[float, ...] = ()

    @property
    def top(self) -> Ints | None:
        """The target's best tokens at the root and every node, on the host: i64 [N + 1, k]."""
        return None if self.best is None else self.best.host()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of a rule on one draft.

    Attributes:
        path: Accepted nodes from the root down [A].
        token: The token after the path; None if the text ends with the path.
        excess, nll_gap: See `Step`.
    """

    path: tuple[int, ...]
    token: int | None
    excess: tuple[float, ...] = ()
    nll_gap: tuple[float, ...] = ()
