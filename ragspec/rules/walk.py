"""The default rule: follow the target's own tokens through the tree.

Start at the root, take the target's own token there, descend if a child carries it, else emit it
and stop. The target's token is `argmax(log p + g)` with the noise g of its position, so the output
never depends on the draft: it is exact for every tree, however it was built, pruned or merged. The
coupling is that of Daliri, Musco and Suresh (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.rules.base import Rule, TargetView, Verdict
from ragspec.rules.descent import descend
from ragspec.trees.draft_tree import DraftTree


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
