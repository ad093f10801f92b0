"""The target view of an acceptance rule: the logits of one row, processed node by node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from ragspec.sampling.distribution import TokenDistribution, logprob_of
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.stopping import StopState
from ragspec.sampling.top_tokens import best_token
from ragspec.sampling.transform import RowTransform
from ragspec.trees.draft_tree import ROOT, DraftTree


class RowView:
    """The target's logits for one tree, each row processed when a rule reads it.

    Processors with state need this order of reading, which is that of the walk.

    Args:
        logits: Those after the root and after each node [N + 1, V].
        chosen: The target's tokens after them, if computed together on the device; below 0 for one
            that was not.
        transform: Changes the logits before the distribution's processors.
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
        """Prepare the views of all rows of a step, this one included; nothing by default."""

    def index(self, node: int) -> int:
        """Return the generated index of the token that follows the node."""
        return self._generated + len(self.path(node))

    def token(self, node: int) -> int:
        """Return the target's own token after the node."""
        if self._chosen is not None and (token := self._chosen[node + 1]) >= 0:
            return token
        return int(self._distribution.select(self.scores(node), [self.index(node)]))

    def choices(self, nodes: Sequence[int], k: int) -> list[list[int]]:
        """Return the k tokens that the target prefers after each of the nodes, its own first."""
        scores = torch.cat([self.scores(node) for node in nodes])
        indices = list(map(self.index, nodes))
        tokens: list[list[int]] = self._distribution.order(scores, indices, k).tolist()
        return tokens

    def probabilities(self, node: int) -> Tensor:
        """Return the distribution f64 [V] after the node, on the CPU."""
        return self._distribution.probabilities(self.scores(node))[0].cpu()

    def distributions(self, nodes: Sequence[int]) -> Tensor:
        """Return the distributions f64 [n, V] after several nodes at once, on the CPU."""
        scores = torch.cat([self.scores(node) for node in nodes])
        return self._distribution.probabilities(scores).cpu()

    def ends(self, node: int) -> bool:
        """Return whether the text ends with the node."""
        return self._stop.peek(self.path(node))

    def scores(self, node: int) -> Tensor:
        """Return the processed logits [1, V] after the node, computed once."""
        scores = self._scores.get(node)
        if scores is None:
            row = self._logits[node + 1 : node + 2]
            if self._transform is not None:
                row = self._transform.logits(node, row, self.index(node))
            context = self._context
            if len(context) > self._length:  # after the verdict, which committed more tokens
                context = context[: self._length]
            scores = self._distribution.process(row, context, [self.path(node)])
            self._scores[node] = scores
        return scores

    def logprob(self, node: int, token: int, top: int) -> TokenLogprob:
        """Return the log-probability of `token` after the node, and the `top` best ones."""
        return logprob_of(self.scores(node)[0], token, top)

    def path(self, node: int) -> list[int]:
        """Return the draft tokens from below the root to the node."""
        path = self._paths.get(node)
        if path is None:
            path = [*self.path(int(self._tree.parents[node])), int(self._tree.tokens[node])]
            self._paths[node] = path
        return path


def choose_together(
    logits: Sequence[Tensor],
    trees: Sequence[DraftTree],
    distributions: Sequence[TokenDistribution],
    contexts: Sequence[Sequence[int]],
) -> list[list[int]] | None:
    """Return the target's tokens after all nodes of all rows, with one copy to the host.

    Args:
        logits: One tensor [N + 1, V] per row.

    Returns:
        N + 1 tokens per row. None if tokens are better computed on demand: with lazy processors,
        and on a CPU unless all rows take an argmax, as filtering all nodes costs too much there.
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
    tokens: Iterator[int] = iter(torch.cat(chosen).tolist())
    return [list(islice(tokens, len(part))) for part in chosen]


def _choose_all(
    logits: Tensor, tree: DraftTree, distribution: TokenDistribution, context: Sequence[int]
) -> Tensor:
    paths: list[list[int]] = [[]]
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        paths.append([*paths[parent + 1], token])
    generated = len(context) - distribution.prompt_length
    scores = distribution.process(logits, context, paths)
    return distribution.select(scores, [generated + len(path) for path in paths])
