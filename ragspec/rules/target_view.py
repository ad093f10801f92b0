"""The target view of an acceptance rule: the logits of one row, processed node by node."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite

import torch
from torch import Tensor

from ragspec.errors import ModelError, SamplingError
from ragspec.sampling.distribution import TokenDistribution, logprob_of
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.stopping import StopState
from ragspec.sampling.top_tokens import best_token, sure_token, sure_tokens
from ragspec.sampling.transform import RowTransform
from ragspec.trees.draft_tree import ROOT, DraftTree


@dataclass(eq=False)
class RowView:
    """The target's logits for one tree, each row processed when a rule reads it.

    Processors with state need this order of reading, which is that of the walk.

    Attributes:
        logits: Those after the root and after each node [N + 1, V].
        chosen: The target's tokens after them, if the session computed them; below 0 for one that
            it did not, empty if it computed none.
        transform: Changes the logits before the distribution's processors.
    """

    logits: Tensor
    tree: DraftTree
    distribution: TokenDistribution
    stop: StopState
    context: Sequence[int]
    chosen: Sequence[int] | None = None
    transform: RowTransform | None = None

    def __post_init__(self) -> None:
        self.noise = self.distribution.noise
        self._length = len(self.context)
        self._generated = self._length - self.distribution.prompt_length
        self._paths: dict[int, list[int]] = {ROOT: []}
        self._scores: dict[int, Tensor] = {}

    def prepare_batch(self, views: "Sequence[RowView]") -> None:
        """Choose the tokens of all rows of a step, this one included, with one copy to the host.

        Tokens are better computed on demand with lazy processors, and on a CPU unless all rows take
        an argmax, as filtering all nodes costs too much there.
        """
        on_cpu = self.logits.device.type == "cpu"
        for view in views:
            late = view.distribution.lazy or (on_cpu and not view.distribution.trivial)
            if late or view.chosen is not None or view.transform is not None:
                return
        if on_cpu:
            for view in views:
                view.chosen = sure_tokens(view.logits)
            return
        parts = [view.all_tokens() for view in views]
        tokens = iter((torch.cat(parts) if len(parts) > 1 else parts[0]).tolist())
        for view, part in zip(views, parts, strict=True):
            view.chosen = list(islice(tokens, len(part)))

    def all_tokens(self) -> Tensor:
        """Return the target's tokens after the root and all nodes, on its device: i64 [N + 1]."""
        if self.distribution.trivial:
            return sure_token(best_token(self.logits), self.logits)
        nodes = range(ROOT, len(self.tree))
        scores = self.distribution.process(self.logits, self.context, [*map(self.path, nodes)])
        return sure_token(self.distribution.select(scores, list(map(self.index, nodes))), scores)

    def index(self, node: int) -> int:
        """Return the generated index of the token that follows the node."""
        return self._generated + len(self.path(node))

    def token(self, node: int) -> int:
        """Return the target's own token after the node.

        Raises:
            ModelError: The model's logits are not finite there.
            SamplingError: Processors, biases or penalties leave no token there.
        """
        if self.chosen and (token := self.chosen[node + 1]) >= 0:
            return token
        scores = self.scores(node)
        token = int(self.distribution.select(scores, [self.index(node)]))
        if not isfinite(scores[0, token]):
            self._refuse(node)
        return token

    def choices(self, nodes: Sequence[int], k: int) -> list[list[int]]:
        """Return the first k tokens by log p + g after each of the nodes, `token(node)` first."""
        scores = torch.cat([self.scores(node) for node in nodes])
        return self.distribution.best(scores, list(map(self.index, nodes)), k)[0].tolist()

    def probabilities(self, node: int) -> Tensor:
        """Return the distribution f64 [V] after the node, on the CPU; see `token` for errors."""
        scores = self.scores(node)
        probabilities = self.distribution.probabilities(scores)[0].cpu()
        if not isfinite(scores.max() if self.distribution.sampling.greedy else probabilities.sum()):
            self._refuse(node)
        return probabilities

    def distributions(self, nodes: Sequence[int]) -> Tensor:
        """Return the distributions f64 [n, V] after several nodes at once, on the CPU."""
        scores = torch.cat([self.scores(node) for node in nodes])
        return self.distribution.probabilities(scores).cpu()

    def ends(self, node: int) -> bool:
        """Return whether the text ends with the node."""
        return self.stop.peek(self.path(node))

    def scores(self, node: int) -> Tensor:
        """Return the processed logits [1, V] after the node, computed once."""
        scores = self._scores.get(node)
        if scores is None:
            row = self.logits[node + 1 : node + 2]
            if self.transform is not None:
                row = self.transform.logits(node, row, self.index(node))
            context = self.context
            if len(context) > self._length:  # after the verdict, which committed more tokens
                self.context = context = context[: self._length]
            scores = self.distribution.process(row, context, [self.path(node)])
            self._scores[node] = scores
        return scores

    def _refuse(self, node: int) -> None:
        """Raise the error of scores without a token to take.

        NaN and infinity from the model's settings pass: transformers takes such a token.
        """
        place = f"at generated token {self.index(node) + 1}"
        if not isfinite(self.logits[node + 1].max()):
            raise ModelError(
                f"the model's logits are not finite numbers {place}; expected numbers. Its weights "
                "are damaged, or its dtype is too narrow: load it in float32."
            )
        if self.scores(node).max() == float("-inf"):
            raise SamplingError(
                f"processors, biases and penalties left no token {place}; expected one at least. "
                "Forbid fewer tokens."
            )

    def logprob(self, node: int, token: int, top: int) -> TokenLogprob:
        """Return the log-probability of `token` after the node, and the `top` best ones."""
        return logprob_of(self.scores(node)[0], token, top)

    def path(self, node: int) -> list[int]:
        """Return the draft tokens from below the root to the node."""
        path = self._paths.get(node)
        if path is None:
            path = [*self.path(int(self.tree.parents[node])), int(self.tree.tokens[node])]
            self._paths[node] = path
        return path
