"""Acceptance rules: which nodes of a draft are kept, and the token that follows them.

The default is `Walk`. Start at the root, take the target's own token there, descend if a child
carries it, else emit it and stop. The target's token is `argmax(log p + g)` with the noise g of
its position, so the output never depends on the draft: it is exact for every tree, however it was
built, pruned or merged. The coupling is that of Daliri, Musco and Suresh (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from ragspec.draft import ROOT, Drafter, DraftKind, DraftTree, Verdict
from ragspec.errors import InputError, RuleError
from ragspec.noise import NoiseStream

ALL_KINDS = frozenset(DraftKind)


class TargetView(Protocol):
    """The target's verdict on one row of one step, computed only where a rule looks.

    `node` is a draft node, or -1 for the root; the answer is about the token that follows it.
    """

    noise: NoiseStream

    def index(self, node: int) -> int:
        """Return the generated index of the token that follows the node."""
        ...

    def token(self, node: int) -> int:
        """Return the target's own token after the node, argmax(log p + g)."""
        ...

    def choices(self, nodes: Sequence[int], k: int) -> list[list[int]]:
        """Return the first k tokens by log p + g after each of the nodes, `token(node)` first."""
        ...

    def probabilities(self, node: int) -> torch.Tensor:
        """Return the law after the node, all processors applied: f64 [V], on the CPU."""
        ...

    def ends(self, node: int) -> bool:
        """Return whether the text ends with the node, so that nothing follows it."""
        ...


@runtime_checkable
class Rule(Protocol):
    """Judges one draft tree; holds no state.

    A rule that must keep count over a whole row offers `open()`, see `open_rule`.
    """

    @property
    def name(self) -> str:
        """The name by which the rule is chosen and reported."""
        ...

    @property
    def label(self) -> str:
        """`exact` where the output law is the target's and the seed decides alone,
        `exact-for(law)` where only the law is kept, else `approximate`."""
        ...

    @property
    def accepts(self) -> frozenset[DraftKind]:
        """The kinds of draft that the rule may judge without a bias."""
        ...

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it."""
        ...


class Walk:
    """Follow the target's own tokens through the tree (exact for every draft)."""

    name = "walk"
    label = "exact"
    accepts = ALL_KINDS

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it; asks about A + 1 nodes.

        Where the text ends on the path the walk ends with it, as plain decoding would.
        """
        child = {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
            )
        }
        path: list[int] = []
        node = ROOT
        while True:
            token = target.token(node)
            following = child.get((node, token))
            if following is None:
                return Verdict(tuple(path), token)
            path.append(following)
            node = following
            if target.ends(node):
                return Verdict(tuple(path), None)


def open_rule(rule: Rule) -> Rule:
    """Return the rule for one row: what its `open()` makes, or itself where it keeps no count."""
    opening = getattr(rule, "open", None)
    opened: Rule = rule if opening is None else opening()
    return opened


def expect_rule(rule: object) -> Rule:
    """Return the rule; raises InputError for what judges no drafts, a class of rules included."""
    if isinstance(rule, Rule) and not isinstance(rule, type):
        return rule
    raise InputError(
        f"got rule={rule!r}; expected a name such as 'walk', or a Rule, which has name, label, "
        "accepts and judge."
    )


def check_pairing(rule: Rule, drafter: Drafter) -> None:
    """Refuse a rule that cannot judge the drafter's trees.

    Raises RuleError with the kinds that were got and expected.
    """
    if drafter.kind not in rule.accepts:
        expected = ", ".join(sorted(rule.accepts))
        raise RuleError(
            f"rule {rule.name!r} cannot judge {drafter.kind.value!r} drafts (drafter "
            f"{drafter.name!r}): it accepts {expected}. Use rule='walk', which judges every "
            "draft, or a drafter of one of those kinds."
        )
