"""The default rule: follow the target's own tokens through the tree.

Start at the root, take the target's own token there, descend if a child carries it, else emit it
and stop. The target's token is `argmax(log p + g)` with the noise g of its position, so the output
never depends on the draft: it is exact for every tree, however it was built, pruned or merged. The
coupling is that of Daliri, Musco and Suresh (arXiv 2408.07978).
"""

from __future__ import annotations

from ragspec.rules.base import Rule, TargetView, Verdict
from ragspec.trees.draft_tree import ROOT, DraftTree


class Walk(Rule):
    """Follows the target's own tokens through the tree; exact for every draft."""

    name = "walk"
    label = "exact"

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it; reads A + 1 nodes.

        If the text ends on the path, the walk ends there, as plain decoding would.
        """
        edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        child = {edge: node for node, edge in enumerate(edges)}
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
