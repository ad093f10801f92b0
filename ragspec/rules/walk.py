"""The default rule: follow the target's own tokens through the tree.

Start at the root, take the target's own token there, descend if a child carries it, else emit it
and stop. The target's token is `argmax(log p + g)` with the noise g of its position, so the output
never depends on the draft: it is exact for every tree, however it was built, pruned or merged. The
coupling is that of Daliri, Musco and Suresh (arXiv 2408.07978).
"""

from collections.abc import Callable, Sequence

from ragspec.rules.base import Rule, TargetView, Verdict
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import children

Decide = Callable[[int, Sequence[int]], tuple[int | None, int]]
"""A node and its children -> the accepted child, if any, and the token if there is none."""


class Walk(Rule):
    """Follows the target's own tokens through the tree; exact for every draft."""

    name = "walk"
    label = "exact"

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it; reads A + 1 nodes."""
        tokens = tree.tokens.tolist()

        def follow(node: int, siblings: Sequence[int]) -> tuple[int | None, int]:
            token = target.token(node)
            return next((each for each in siblings if tokens[each] == token), None), token

        return descend(tree, target, follow)


def descend(tree: DraftTree, target: TargetView, decide: Decide) -> Verdict:
    """Walk from the root; `decide` accepts a child or ends the path, at one node after the other.

    Siblings with the accepted token stand for the same text, so their children are tried together.
    If the text ends on the path, the descent ends there, as plain decoding would.
    """
    tokens, below = tree.tokens.tolist(), children(tree.parents)
    node, siblings = ROOT, below.get(ROOT, [])
    while True:
        accepted, token = decide(node, siblings)
        if accepted is None:
            return Verdict(path_to(tree, node), token)
        if target.ends(accepted):
            return Verdict(path_to(tree, accepted), None)
        twins = [each for each in siblings if tokens[each] == tokens[accepted]]
        node, siblings = accepted, [child for twin in twins for child in below.get(twin, ())]


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Return the nodes from the root's child down to `node` [A]; empty for the root."""
    path, parents = list[int](), tree.parents.tolist()
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))
