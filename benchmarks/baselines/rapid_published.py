"""RAPID's published acceptance (arXiv 2502.20330, section 3.2): approximate, for comparison.

Use it with drawn chains: `Engine(target, tokenizer, Rapid(ModelDrafter(model, mode="sampled")),
rule=PublishedRapid(eta))`. `mode="steered"` of the library moves the distribution without a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ragspec.retrievers.rapid.steering import ALPHA, ETA, checked, shift
from ragspec.rules.base import TargetView, Verdict
from ragspec.rules.rejection import Choice, check_chain, descend, normalised, ratio
from ragspec.trees.draft_tree import DraftKind, DraftTree


class PublishedRapid:
    """Keep drawn tokens by a distribution between target and drafter; go on by the target's.

    eta: how far the target's logits are moved, in units of temperature; 0 is rejection sampling.
    """

    name = "rapid-paper"
    label = "approximate"
    accepts = frozenset({DraftKind.SAMPLED})

    def __init__(self, eta: float = ETA, alpha: float = ALPHA) -> None:
        self.eta, self.alpha = checked(eta, alpha)

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the token that follows it, with the drift of each token.

        Raises RuleError where the tree is no chain or lacks its distributions q.
        """
        check_chain(self, tree)
        drifts: list[float] = []

        def choose(
            tokens: Sequence[int], p: torch.Tensor, q: torch.Tensor, uniform: Callable[[int], float]
        ) -> Choice:
            between = (p.log() + shift(p, q, self.eta, self.alpha)).softmax(-1)
            drifts.append(float((torch.minimum(q, between) - p).clamp(min=0.0).sum()))
            if uniform(0) < ratio(between, q, tokens[0]):
                return 0, p
            return None, normalised(torch.maximum(p - between, p - q), p)

        verdict = descend(self, tree, target, choose)
        emitted = len(verdict.path) + (verdict.token is not None)
        return replace(verdict, excess=(*drifts, 0.0)[:emitted])
