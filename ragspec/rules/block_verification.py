"""Block verification of a chain: Sun et al. (arXiv 2403.10444).

Instead of testing token after token, the chain is tested as a whole: with w_0 = 1 and
w_i = min(1, w_(i-1) p(x_i) / q(x_i)), the first i tokens pass with probability S / (S + 1 - w_i),
S = sum (w_i p - q)+ over the token that follows, the whole chain with probability w_D. The longest
prefix that passes is kept and a token is drawn from N[(w_i p - q)+], or from p after the whole
chain. It keeps the target's distribution and never accepts fewer tokens on average than
`ChainRejection`.

Whether a prefix passes depends on the tokens after it. So the drafter must not use a random number
twice: the noise of one step must not return in the next one. Key it by the index of the root and
the node, not by the index of the token. The rule keys its own numbers by the root and the depth.
"""

from functools import partial

from torch import Tensor

from ragspec.needs import Needs
from ragspec.rules.base import EXACT_FOR_LABEL, Rule, TargetView, Verdict
from ragspec.rules.rejection import check_draws, draft_distribution, draw, normalised, ratio
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree


class Block(Rule):
    """Accept the longest prefix of a chain that passes as a whole."""

    name = "block"
    label = EXACT_FOR_LABEL
    accepts = frozenset({DraftKind.SAMPLED})
    needs = Needs(probabilities=True, ahead=True)

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it.

        The rule reads the distributions after the root and after all nodes, up to the one that
        ends the text.

        Raises:
            RuleError: The tree is no chain, or has no distributions q.
        """
        check_draws(self, tree, chain=True)
        ended = next((node for node in range(len(tree)) if target.ends(node)), None)
        nodes = len(tree) if ended is None else ended + 1
        uniform = partial(target.noise.uniform, target.index(ROOT), NoiseUse.ACCEPT)
        accepted, weight, distribution = 0, 1.0, target.probabilities(ROOT)
        for depth in range(nodes):  # the prefix of `depth` tokens ends in node depth - 1
            p = target.probabilities(depth - 1)
            q = draft_distribution(tree, depth - 1, p)
            left = weight * p - q
            if depth == 0 or uniform(depth) < _chance(left, weight):
                accepted, distribution = depth, normalised(left, p)
            weight = min(1.0, weight * ratio(p, q, int(tree.tokens[depth])))
        if nodes and uniform(nodes) < weight:
            if ended is not None:
                return Verdict(tuple(range(nodes)), None)
            accepted, distribution = nodes, target.probabilities(nodes - 1)
        token = draw(distribution, target.noise, target.index(accepted - 1))
        return Verdict(tuple(range(accepted)), token)


def _chance(left: Tensor, weight: float) -> float:
    """Return the probability that a prefix passes, given that no longer one does."""
    spare = float(left.clamp(min=0.0).sum())
    total = spare + 1.0 - weight
    return spare / total if total > 0.0 else 0.0
