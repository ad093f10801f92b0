"""Rejection rules for drafts that were drawn from a distribution that is known: `tree.q`.

All walk down from the root. At a node with the target's distribution p and the draft's distribution
q the children x are tried in the order in which they were drawn: x is kept with probability min(1,
p(x) / q(x)), else p becomes `N[(p - q)+]` and the next child is tried; what is left of p in the end
is drawn from. So the text follows the target's distribution. The rules differ in the children that
they expect:

- `ChainRejection`, one: Leviathan, Kalman and Matias (arXiv 2211.17192), Chen et al. (arXiv
  2302.01318).
- `MultiStep`, several that were drawn independently: SpecInfer, Miao et al. (arXiv 2305.09781).
  Deviation: one q per node instead of one per draft model.
- `WithoutReplacement`, several distinct ones, each drawn from what the earlier ones left of q:
  MCSD, Yang et al. (arXiv 2401.06706), and RSD, Jeon et al. (arXiv 2402.14160).

Nodes must stand in the order of their draws, and none may have been dropped or moved because of
the token that it drew: pruning or sorting by q biases the text, and no rule can see it. What a
budget may cut of such drafts is said at `trees.operations.keep_order`.
A step's numbers come from the indices that it emits, so no two steps share any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ragspec.errors import RuleError
from ragspec.rules.base import Rule, TargetView, Verdict
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree

EXACT_FOR_LABEL = "exact-for(distribution)"

Choice = tuple[int | None, Tensor]
"""The rank of the child that is kept, or None and the law (f64 [V]) to draw from instead."""

Choose = Callable[[Sequence[int], Tensor, Tensor, Callable[[int], float]], Choice]
"""Children's tokens, target law p, draft law q, and the uniform of each rank -> Choice."""


class Descent:
    """A rule that walks down from the root and lets `choose` keep a child or end the path.

    Subclasses name themselves, the draws that they accept and their `choose`.
    """

    name: str
    label = EXACT_FOR_LABEL
    accepts = frozenset({DraftKind.SAMPLED})
    choose: Choose

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it.

        Raises RuleError where the tree lacks its distributions q, or a draw has q = 0.
        """
        return descend(self, tree, target, self.choose)


class MultiStep(Descent):
    """Try independently drawn children one after the other."""

    name = "multi-step"

    @staticmethod
    def choose(
        tokens: Sequence[int], p: Tensor, q: Tensor, uniform: Callable[[int], float]
    ) -> Choice:
        """Keep each token with probability min(1, p / q), and take q from p after each refusal."""
        for rank, token in enumerate(tokens):
            if uniform(rank) < ratio(p, q, token):
                return rank, p
            p = normalised(p - q, p)
        return None, p


class ChainRejection(MultiStep):
    """Keep each drawn token with probability min(1, p / q); one child per node."""

    name = "rejection"

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it.

        Raises RuleError where the tree is no chain or lacks its distributions q.
        """
        check_chain(self, tree)
        return super().judge(tree, target)


class WithoutReplacement(Descent):
    """Try distinct children one after the other, striking each from q once it is rejected."""

    name = "without-replacement"
    accepts = frozenset({DraftKind.SAMPLED_WITHOUT_REPLACEMENT})

    @staticmethod
    def choose(
        tokens: Sequence[int], p: Tensor, q: Tensor, uniform: Callable[[int], float]
    ) -> Choice:
        """Keep each token as `MultiStep` does, and strike it from q after its refusal."""
        for rank, token in enumerate(tokens):
            if uniform(rank) < ratio(p, q, token):
                return rank, p
            p = normalised(p - q, p)
            q = q.index_fill(0, torch.tensor([token], device=q.device), 0.0)
            q = q / q.sum()
        return None, p


def descend(rule: Rule, tree: DraftTree, target: TargetView, choose: Choose) -> Verdict:
    """Walk from the root, letting `choose` keep a child or end the path at every node.

    Siblings with the kept token stand for one text, so their children are tried together.
    Raises RuleError for a tree that the rule cannot judge.
    """
    check_draws(rule, tree)
    tokens, children = tree.tokens.tolist(), children_of(tree)
    node, siblings = ROOT, children[ROOT]
    while True:
        distribution, index = target.probabilities(node), target.index(node)
        accepted: int | None = None
        if siblings:
            accepted, distribution = choose(
                [tokens[sibling] for sibling in siblings],
                distribution,
                draft_distribution(tree, node, distribution),
                partial(target.noise.uniform, index, NoiseUse.ACCEPT),
            )
        if accepted is None:
            return Verdict(path_to(tree, node), draw(distribution, target.noise, index))
        node = siblings[accepted]
        if target.ends(node):
            return Verdict(path_to(tree, node), None)
        twins = [sibling for sibling in siblings if tokens[sibling] == tokens[node]]
        siblings = [child for twin in twins for child in children[twin]]


def ratio(p: Tensor, q: Tensor, token: int) -> float:
    """Return p(token) / q(token).

    Raises RuleError where q is zero (or no number): such a token was not drawn from q.
    """
    chance = float(q[token])
    if not chance > 0.0:
        raise RuleError(
            f"draft token {token} has probability {chance} in the law that it is said to be drawn "
            "from; expected a positive one. Pass the law that was used for drawing as q (after "
            "temperature and cuts), with distinct siblings if they exclude each other, or use "
            "rule='walk', which needs no q."
        )
    return float(p[token]) / chance


def normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return the positive weights [V] as a distribution, or `otherwise` where there are none.

    There is none when target and draft agree, where only rounding can lead to a rejection.
    """
    weights = weights.clamp(min=0.0)
    total = weights.sum()
    return weights / total if float(total) > 0.0 else otherwise


def draw(distribution: Tensor, noise: NoiseStream, index: int) -> int:
    """Return a token drawn from the distribution [V] with the residual noise of the index."""
    tokens = distribution.nonzero().flatten()
    scores = distribution[tokens].log() + noise.gumbel(index, tokens, NoiseUse.RESIDUAL)
    return int(tokens[torch.argmax(scores)])


def draft_distribution(tree: DraftTree, node: int, like: Tensor) -> Tensor:
    """Return q after the node [V], with the type and device of the target's distribution `like`.

    Raises RuleError where the two vocabularies differ.
    """
    if tree.q is None or tree.q.shape[1] != len(like):
        got = "no laws" if tree.q is None else f"laws over {tree.q.shape[1]} tokens"
        raise RuleError(
            f"the draft carries {got}, the target's law has {len(like)} tokens; expected one "
            "vocabulary. Use a draft model with the target's vocabulary, or rule='walk'."
        )
    return tree.q[node + 1].to(like)


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """Return the nodes from the root's child down to `node` [A]; none for the root."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = int(tree.parents[node])
    return tuple(reversed(path))


def children_of(tree: DraftTree) -> defaultdict[int, list[int]]:
    """Return the children of every node, and of the root, in node order."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for child, parent in enumerate(tree.parents.tolist()):
        children[parent].append(child)
    return children


def check_draws(rule: Rule, tree: DraftTree) -> None:
    """Refuse a tree that was not drawn as the rule expects, or lacks the distributions q.

    A tree without nodes passes: there is nothing to judge. Raises RuleError.
    """
    if len(tree) == 0:
        return
    if tree.kind not in rule.accepts:
        expected = ", ".join(sorted(rule.accepts))
        raise RuleError(
            f"rule {rule.name!r} got a {tree.kind.value!r} draft; it accepts {expected}. "
            "Use rule='walk', which judges every draft, or a drafter of one of those kinds."
        )
    if tree.q is None or tree.q.shape[0] != len(tree) + 1:
        got = "no q" if tree.q is None else f"q of {tree.q.shape[0]} rows"
        raise RuleError(
            f"rule {rule.name!r} got a draft of {len(tree)} nodes with {got}; expected the laws "
            "that its tokens were drawn from, one row for the root and one per node. Use a "
            "drafter that fills q, or rule='walk', which needs none."
        )


def check_chain(rule: Rule, tree: DraftTree) -> None:
    """Refuse a tree in which some node does not continue the one before it (RuleError)."""
    if any(parent != node - 1 for node, parent in enumerate(tree.parents.tolist())):
        raise RuleError(
            f"rule {rule.name!r} got a tree with branches; expected a chain. Set the drafter to "
            "one candidate per node, or use rule='multi-step' or 'walk'."
        )
