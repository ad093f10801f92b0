"""What judges a draft: the rule, what it sees of the target, and what comes of a step.

Legend used in all docstrings: B rows, N draft nodes, V vocabulary, T committed tokens,
D depth, A accepted nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree, Ints

if TYPE_CHECKING:
    from ragspec.sampling.top_tokens import TopTokens

ALL_KINDS = frozenset(DraftKind)


class TargetView(Protocol):
    """The target's verdict on one row of one step, computed only where a rule looks.

    `node` is a draft node, or -1 for the root; the answer is about the token that follows it.
    """

    noise: NoiseStream

    def index(self, node: int) -> int:
        """Return the generated index of the token that follows the node."""

    def token(self, node: int) -> int:
        """Return the target's own token after the node, argmax(log p + g)."""

    def choices(self, nodes: Sequence[int], k: int) -> list[list[int]]:
        """Return the first k tokens by log p + g after each of the nodes, `token(node)` first."""

    def probabilities(self, node: int) -> Tensor:
        """Return the distribution after the node, all processors applied: f64 [V], on the CPU."""

    def ends(self, node: int) -> bool:
        """Return whether the text ends with the node, so that nothing follows it."""


@runtime_checkable
class Rule(Protocol):
    """Judges one draft tree; holds no state.

    A rule that must keep count over a whole row offers `open()`, see `open_rule`.
    """

    @property
    def name(self) -> str:
        """The name by which the rule is chosen and reported."""

    @property
    def label(self) -> str:
        """`exact` where the output distribution is the target's and the seed decides alone,
        `exact-for(distribution)` where only the distribution is kept, else `approximate`."""

    @property
    def accepts(self) -> frozenset[DraftKind]:
        """The kinds of draft that the rule may judge without a bias."""

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it."""


def open_rule(rule: Rule) -> Rule:
    """Return the rule for one row: what its `open()` makes, or itself where it keeps no count."""
    opening = getattr(rule, "open", None)
    opened: Rule = rule if opening is None else opening()
    return opened


class Around:
    """A rule around another one, which it lets decide; subclasses look at the verdicts."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.accepts: frozenset[DraftKind] = rule.accepts

    @property
    def name(self) -> str:
        """The name of the rule inside."""
        return self.rule.name

    @property
    def label(self) -> str:
        """The label of the rule inside, which may depend on what it met."""
        return self.rule.label

    def open(self) -> Self:
        """Return the rule for one row."""
        return type(self)(open_rule(self.rule))


def expect_rule(rule: object) -> Rule:
    """Return the rule; raises InputError for what judges no drafts, a class of rules included."""
    if isinstance(rule, Rule) and not isinstance(rule, type):
        return rule
    raise InputError(
        f"got rule={rule!r}; expected a name such as 'walk', or a Rule, which has name, label, "
        "accepts and judge."
    )


@dataclass(slots=True)
class Step:
    """One draft, one forward of the target, one verdict.

    path: accepted nodes, root side first [A]. tokens: what was emitted, the accepted tokens and
    the target's own last one [A + 1] (shorter where a stop condition cut it).
    best: optional, the target's best tokens at the root and every node, where the target made them;
    `top` has them on the host. hidden: optional [copies, N + 1, H], the target's last hidden states
    there, for drafters that declare `needs_hidden`; with guidance a sequence has several copies,
    the conditional one first. view: the target's own choices and distributions there, those of
    nodes that no rule visited too; not `ends`; None with processors that keep a memory. All three
    are lent for the time of `observe`. excess: total variation that a relaxed rule may have added,
    one figure for each of `tokens`; none from rules that measure none. NLL gap: -log p less the
    entropy of p, for each of `tokens` under the target's distribution p at its place, likewise.
    """

    tree: DraftTree
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    milliseconds: dict[str, float] = field(default_factory=dict)
    best: TopTokens | None = None
    hidden: Tensor | None = None
    view: TargetView | None = None
    excess: tuple[float, ...] = ()
    nll_gap: tuple[float, ...] = ()

    @property
    def top(self) -> Ints | None:
        """The target's best tokens at the root and every node, on the host: i64 [N + 1, k]."""
        return None if self.best is None else self.best.host()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decided: accepted nodes from the root down [A], and the target's own token.

    token is None where the text ends with the path. excess: what a relaxed rule measured, the
    total variation that each emitted position may add, in their order; none from other rules.
    NLL gap: see `Step`.
    """

    path: tuple[int, ...]
    token: int | None
    excess: tuple[float, ...] = ()
    nll_gap: tuple[float, ...] = ()
