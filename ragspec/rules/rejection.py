"""Rejection rules for sampled drafts, whose distributions are in `tree.q`.

All rules walk down from the root. At a node, p is the target's distribution and q the draft's. The
children x are tried in the order of their draws. A child is accepted with probability min(1,
p(x) / q(x)); otherwise p becomes `N[(p - q)+]` and the next child is tried. If none is accepted, a
token is drawn from the final p. So the text follows the target's distribution. The rules differ in
the children that they expect:

- `ChainRejection`, one: Leviathan, Kalman and Matias (arXiv 2211.17192), Chen et al. (arXiv
  2302.01318).
- `MultiStep`, several that were drawn independently: SpecInfer, Miao et al. (arXiv 2305.09781).
  Deviation: one q per node instead of one per draft model.
- `WithoutReplacement`, several distinct ones, each drawn from q without the earlier ones:
  MCSD, Yang et al. (arXiv 2401.06706), and RSD, Jeon et al. (arXiv 2402.14160).

Nodes must be in the order of their draws, and none may have been dropped or moved because of its
token. Pruning or sorting by q biases the text, and no rule can detect it. See
`trees.operations.keep_order` for the nodes that a budget may cut from such drafts.
The random numbers of a step are keyed by the indices that it emits, so no two steps share any.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ragspec.errors import RuleError
from ragspec.needs import Capabilities, Needs, match
from ragspec.rules.base import EXACT_FOR_LABEL, Rule, TargetView, Verdict
from ragspec.rules.walk import descend
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import DraftKind, DraftTree

Choice = tuple[int | None, Tensor]
"""The rank of the accepted child, or None and the distribution f64 [V] to draw from instead."""

Uniform = Callable[[int], float]
Choose = Callable[[Sequence[int], Tensor, Tensor, Uniform], Choice]
"""Children's tokens, the target's p, the draft's q, and the uniform of each rank -> Choice."""


class Descent(Rule):
    """A rule that walks down from the root; `choose` accepts a child or ends the path.

    Subclasses set `name`, `accepts` and `choose`.

    Attributes:
        chain: Whether the draft must be a chain.
    """

    label = EXACT_FOR_LABEL
    accepts = frozenset({DraftKind.SAMPLED})
    needs = Needs(probabilities=True)
    chain = False
    choose: Choose

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it.

        Raises:
            RuleError: The tree is refused, see `check_draws`, or a draft token has q = 0.
        """
        check_draws(self, tree, self.chain)
        tokens = tree.tokens.tolist()

        def decide(node: int, siblings: Sequence[int]) -> tuple[int | None, int]:
            distribution, index = target.probabilities(node), target.index(node)
            if siblings:
                # Of twins one alone may have been read; the siblings are its children.
                rank, distribution = self.choose(
                    [tokens[sibling] for sibling in siblings],
                    distribution,
                    draft_distribution(tree, int(tree.parents[siblings[0]]), distribution),
                    partial(target.noise.uniform, index, NoiseUse.ACCEPT),
                )
                if rank is not None:
                    return siblings[rank], tokens[siblings[rank]]
            return None, draw(distribution, target.noise, index)

        return descend(tree, target, decide)


class MultiStep(Descent):
    """Tries independently drawn children one after the other."""

    name = "multi-step"
    distinct = False  # whether a rejected child is removed from q

    @classmethod
    def choose(cls, tokens: Sequence[int], p: Tensor, q: Tensor, uniform: Uniform) -> Choice:
        """Accept each token with probability min(1, p / q); subtract q from p on a rejection."""
        for rank, token in enumerate(tokens):
            if uniform(rank) < ratio(p, q, token):
                return rank, p
            p = normalised(p - q, p)
            if cls.distinct:
                q = q.index_fill(0, torch.tensor([token], device=q.device), 0.0)
                q = q / q.sum()
        return None, p


class ChainRejection(MultiStep):
    """Accepts the one child of each node with probability min(1, p / q)."""

    name = "rejection"
    chain = True


class WithoutReplacement(MultiStep):
    """Tries distinct children one after the other and removes each rejected one from q."""

    name = "without-replacement"
    accepts = frozenset({DraftKind.SAMPLED_WITHOUT_REPLACEMENT})
    distinct = True


def ratio(p: Tensor, q: Tensor, token: int) -> float:
    """Return p(token) / q(token).

    Raises:
        RuleError: q(token) is zero or NaN, so the token was not drawn from q.
    """
    chance = float(q[token])
    if not chance > 0.0:
        raise RuleError(
            f"draft token {token} has probability {chance} in q; expected a positive one. Pass the "
            "distribution that drew it as q (after temperature and cuts), with distinct siblings "
            "if they exclude each other, or use rule='walk', which needs no q."
        )
    return float(p[token]) / chance


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return the positive weights [V] as a distribution, or `otherwise` if there are none.

    There are none if target and draft agree; then only rounding can lead to a rejection.
    """
    weights = weights.clamp(min=0.0)
    total = weights.sum()
    return weights / total if float(total) > 0.0 else otherwise


def draw(distribution: Tensor, noise: NoiseStream, index: int) -> int:
    """Return a token drawn from the distribution [V] with the residual noise of the index."""
    tokens = distribution.nonzero().flatten()
    scores = distribution[tokens].log() + noise.gumbel([index], tokens, NoiseUse.RESIDUAL)
    return int(tokens[torch.argmax(scores)])


def draft_distribution(tree: DraftTree, node: int, like: Tensor) -> Tensor:
    """Return q after the node [V], with the dtype and device of the target's distribution `like`.

    Raises:
        RuleError: The two vocabularies differ.
    """
    assert tree.q is not None  # see `check_draws`
    if tree.q.shape[1] != len(like):
        raise RuleError(
            f"the draft has q over {tree.q.shape[1]} tokens, the target's p has {len(like)}; "
            "expected one vocabulary. Use a draft model with the target's, or rule='walk'."
        )
    return tree.q[node + 1].to(like)


def check_draws(rule: Rule, tree: DraftTree, chain: bool = False) -> None:
    """Raise RuleError for a tree of another kind than the rule accepts, or without its q.

    A tree without nodes passes.

    Args:
        chain: Whether every node must continue the one before it.
    """
    if len(tree) == 0:
        return
    if tree.kind not in rule.accepts:
        offered = Capabilities(kinds=rule.accepts, judge=f"rule {rule.name!r}")
        match(f"a draft of {', '.join(tree.sources)}", Needs(), offered, tree.kind)
    if tree.q is None or tree.q.shape[0] != len(tree) + 1:
        got = "no q" if tree.q is None else f"q of {tree.q.shape[0]} rows"
        raise RuleError(
            f"rule {rule.name!r} got a draft of {len(tree)} nodes with {got}; expected the "
            "distributions that its tokens were drawn from, one row for the root and one per node. "
            "Use a drafter that fills q, or rule='walk', which needs none."
        )
    if chain and any(parent != node - 1 for node, parent in enumerate(tree.parents.tolist())):
        raise RuleError(
            f"rule {rule.name!r} got a tree with branches; expected a chain. Set the drafter to "
            "one candidate per node, or use rule='multi-step' or 'walk'."
        )
