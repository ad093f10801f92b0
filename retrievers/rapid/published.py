"""RAPID's acceptance as it was published, which is not lossless.

RAPID (Chen et al. 2025, arXiv 2502.20330, equations 6 to 9): a token x that the drafter drew from q
is kept with probability min(1, p_hat(x) / q(x)); after a rejection the text goes on with
N[max(p - p_hat, p - q, 0)], and where all is kept with p. The paper's appendix B argues that this
follows p. It does only where min(q, p_hat) <= p everywhere, and p_hat is made to be above p: what
comes out differs from p by sum(max(min(q, p_hat) - p, 0)), which is reported. `Steering` is the
lossless way to the same end. For comparison.

Deviation: where p_hat stands, as everywhere here, the shift counts for the tokens of which the
drafter is at least a tenth as sure as of its first (the code of the paper; the text puts back p
where p_hat is small, which gives no law).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ragspec.retrievers.rapid.distribution import ALPHA, ETA, checked, shift
from ragspec.rules.base import TargetView, Verdict
from ragspec.rules.rejection import Choice, check_chain, descend, normalised, ratio
from ragspec.trees.draft_tree import DraftKind, DraftTree


class Published:
    """Keep drawn tokens by a law between target and drafter; go on by the target's.

    eta: how far the target's logits are moved, in units of temperature; 0 is rejection sampling.
    """

    name = "rapid-paper"
    label = "approximate"
    accepts = frozenset({DraftKind.SAMPLED})

    def __init__(self, eta: float = ETA, alpha: float = ALPHA) -> None:
        self.eta, self.alpha = checked(eta, alpha)

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it, with the drift of each token.

        Raises RuleError where the tree is no chain or lacks its laws q.
        """
        check_chain(self, tree)
        drifts: list[float] = []

        def choose(
            tokens: Sequence[int],
            p: torch.Tensor,
            q: torch.Tensor,
            uniform: Callable[[int], float],
        ) -> Choice:
            between = (p.log() + shift(p, q, self.eta, self.alpha)).softmax(-1)
            drifts.append(float((torch.minimum(q, between) - p).clamp(min=0.0).sum()))
            if uniform(0) < ratio(between, q, tokens[0]):
                return 0, p
            return None, normalised(torch.maximum(p - between, p - q), p)

        verdict = descend(self, tree, target, choose)
        emitted = len(verdict.path) + (verdict.token is not None)
        return replace(verdict, excess=(*drifts, 0.0)[:emitted])
