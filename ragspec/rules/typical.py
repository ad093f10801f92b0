"""Typical acceptance of Medusa, Cai et al. (arXiv 2401.10774). It changes the distribution.

A draft token x passes if p(x) > min(epsilon, delta * exp(-H(p))), H being the entropy of the
target's distribution p in nats. The longest path of passing tokens is accepted; among equally long
paths, the most probable one. The target's own token follows.

Deviation: the token that follows is the target's own under the seed; the published code takes the
most probable one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.needs import Needs
from ragspec.rules.base import Rule, TargetView, Verdict
from ragspec.rules.walk import path_to
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import children


@dataclass(frozen=True, slots=True)
class Typical(Rule):
    """Accepts tokens that are typical under the target: more tokens, another distribution.

    Attributes:
        epsilon: Probability above which every token passes.
        delta: Share of exp(-H) above which a token passes.

    Raises:
        InputError: One of them lies outside (0, 1].
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name = "typical"
    label = "approximate"
    needs = Needs(probabilities=True, ahead=True)

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if not 0.0 < value <= 1.0:
                raise InputError(
                    f"typical acceptance got {name}={value}; expected a number above 0 and at "
                    "most 1. The published values are epsilon=0.09 and delta=0.3."
                )

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it."""
        tokens, below = tree.tokens.tolist(), children(tree.parents)
        passed = [(0, 0.0, ROOT)]
        for depth, likelihood, node in passed:
            if node not in below or (depth and target.ends(node)):
                continue
            p = target.probabilities(node)
            enough = self.threshold(p)
            for child in below[node]:
                chance = p[tokens[child]]
                if float(chance) > enough:
                    passed.append((depth + 1, likelihood + float(chance.log()), child))
        last = max(passed, key=lambda each: each[:2])[2]  # the first of equals
        path = path_to(tree, last)
        return Verdict(path, None if path and target.ends(last) else target.token(last))

    def threshold(self, p: Tensor) -> float:
        """Return the probability that a token must exceed under the distribution p [V]."""
        entropy = float(torch.special.entr(p).sum())
        return min(self.epsilon, self.delta * float(torch.tensor(-entropy).exp()))
