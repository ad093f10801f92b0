"""What an acceptance rule sees of the target: the logits of one row, asked node by node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragspec.sampling.distribution import TokenDistribution, logprob_of
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.stopping import StopState
from ragspec.sampling.top_tokens import best_token
from ragspec.sampling.transform import RowTransform
from ragspec.trees.draft_tree import ROOT, DraftTree


class RowView:
    """The target's logits for one tree, processed only where a rule looks.

    logits [N + 1, V]: the root's row, then the nodes'. chosen: the target's tokens of all of
    them, where they were computed together on the device, below 0 where not; each of the others
    is computed when asked for, in the order of the walk, which is what processors with a memory
    need. transform: changes the logits before the distribution's processors.
    """

    def __init__(
        self,
        logits: Tensor,
        tree: DraftTree,
        distribution: TokenDistribution,
        stop: StopState,
        context: Sequence[int],
        chosen: Sequence[int] | None = None,
        transform: RowTransform | None = None,
    ) -> None:
        self.noise = distribution.noise
        self._logits = logits
        self._tree = tree
        self._distribution = distribution
        self._stop = stop
        self._context = context
        self._chosen = chosen
        self._transform = transform
        self._length = len(context)
        self._generated = len(context) - distribution.prompt_length
        self._paths: dict[int, list[int]] = {ROOT: []}
        self._scores: dict[int, Tensor] = {}

    def prepare_batch(self, views: Sequence[RowView]) -> None:
        """Hear of the views of all rows of a step, this one among them, before any is asked."""

    def index(self, node: int) -> int:
        """Return the generated index of the token that follows the node."""
        return self._generated + len(self.path(node))

    def token(self, node: int) -> int:
        """Return the target's own token after the node."""
        if self._chosen is not None and (known := self._chosen[node + 1]) >= 0:
            return known
        return int(self._distribution.select(self.scores(node), [self.index(node)]))

    def choices(self, nodes: Sequence[int], k: int) -> list[list[int]]:
        """Return the k tokens that the target prefers after each of the nodes, its own first."""
        scores = torch.cat([self.scores(node) for node in nodes])
        result: list[list[int]] = self._distribution.order(
            scores, list(map(self.index, nodes)), k
        ).tolist()
        return result

    def probabilities(self, node: int) -> Tensor:
        """Return the distribution after the node: f64 [V]."""
        return self._distribution.probabilities(self.scores(node))[0].cpu()

    def distributions(self, nodes: Sequence[int]) -> Tensor:
        """Return the distributions after several nodes at once: f64 [n, V]."""
        return self._distribution.probabilities(
            torch.cat([self.scores(node) for node in nodes])
        ).cpu()

    def ends(self, node: int) -> bool:
        """Return whether the text ends with the node."""
        return self._stop.peek(self.path(node))

    def scores(self, node: int) -> Tensor:
        """Return the processed logits after the node, computed once: [1, V]."""
        result = self._scores.get(node)
        if result is None:
            row = self._logits[node + 1 : node + 2]
            if self._transform is not None:
                row = self._transform.logits(node, row, self.index(node))
            context = self._context
            if len(context) > self._length:  # asked after the verdict: tokens were committed
                context = context[: self._length]
            result = self._distribution.process(row, context, [self.path(node)])
            self._scores[node] = result
        return result

    def logprob(self, node: int, token: int, top: int) -> TokenLogprob:
        """Return the log-probability of `token` after the node, and the `top` best ones."""
        return logprob_of(self.scores(node)[0], token, top)

    def path(self, node: int) -> list[int]:
        """Return the draft tokens from below the root to the node."""
        result = self._paths.get(node)
        if result is None:
            parent = int(self._tree.parents[node])
            result = [*self.path(parent), int(self._tree.tokens[node])]
            self._paths[node] = result
        return result


def choose_together(
    logits: Sequence[Tensor],
    trees: Sequence[DraftTree],
    distributions: Sequence[TokenDistribution],
    contexts: Sequence[Sequence[int]],
) -> list[list[int]] | None:
    """Work out the target's tokens of all nodes of all rows with one copy to the host.

    logits: a tensor [N + 1, V] for each row. Returns N + 1 tokens a row, or None where nodes are
    better asked one by one: with processors that are lazy, and on a CPU, where visiting a few
    nodes costs less than filtering them all.
    """
    if any(distribution.lazy for distribution in distributions):
        return None
    if all(distribution.trivial for distribution in distributions):
        chosen = [best_token(rows) for rows in logits]
    elif logits[0].device.type == "cpu":
        return None
    else:
        chosen = [
            _choose_all(*row) for row in zip(logits, trees, distributions, contexts, strict=True)
        ]
    if len(chosen) == 1:
        return [chosen[0].tolist()]
    flat: list[int] = torch.cat(chosen).tolist()
    sizes = [len(part) for part in chosen]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [flat[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _choose_all(
    logits: Tensor, tree: DraftTree, distribution: TokenDistribution, context: Sequence[int]
) -> Tensor:
    paths: list[list[int]] = [[]]
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        paths.append([*paths[parent + 1], token])
    generated = len(context) - distribution.prompt_length
    scores = distribution.process(logits, context, paths)
    return distribution.select(scores, [generated + len(path) for path in paths])
