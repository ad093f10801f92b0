"""RAPID's steering: the term added to the target's logits (arXiv 2502.20330, equation 6).

It is added to the logits of every token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.settings import Sampling
from ragspec.sampling.transform import RowTransform, TextStart, Transform
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import depths

if TYPE_CHECKING:
    from ragspec.drafters.model.cache import DraftCache
    from ragspec.verification.causal import CausalTarget

ETA = 10.0
ALPHA = 0.1  # tokens move to which the model gives at least so many times its best probability
TOGETHER = 16  # nodes that are read with the root; others are read when the rule visits them


def shift(p: Tensor, q: Tensor, scale: float) -> Tensor:
    """Return the term to add to the target's logits: distributions p, q [.., V] -> [.., V]."""
    counts = q >= ALPHA * q.amax(-1, keepdim=True)
    return scale * (q - p) * counts


class Steering(Transform):
    """Moves the target's distribution towards that of another model over another prompt.

    Once the model's context is full, or a token is not in its vocabulary, the distribution is the
    target's from there on.

    Args:
        model: A transformers causal model of the target's vocabulary, or the target itself. It
            reads `draft_prompt` in place of the prompt.
        eta: Strength: logits move by at most eta times the temperature, those of greedy text by at
            most eta.

    Raises:
        InputError: `eta` is out of range.
        UnsupportedModelError: The model has no KV cache.
    """

    def __init__(self, model: Any, eta: float = ETA) -> None:
        from ragspec.drafters.model.drafter import draft_target

        if not (math.isfinite(eta) and eta >= 0.0):
            raise InputError(f"got eta {eta}; expected eta of 0 or more, such as 5 to 20.")
        self.model: CausalTarget = draft_target(model)
        self.eta = float(eta)
        self.name = f"RAPID, eta {self.eta:g}"

    def open(self, start: TextStart) -> SteeredText:
        """Return the steering of one text."""
        from ragspec.drafters.model.cache import DraftCache

        prompt = start.prompt if start.draft_prompt is None else start.draft_prompt
        cache = DraftCache(self.model, start.vocab_size, len(prompt) + 256)
        return SteeredText(start, prompt, cache, self)


class SteeredText(RowTransform):
    """The steering of one text; see `Steering`."""

    def __init__(
        self, start: TextStart, prompt: Sequence[int], cache: DraftCache, steering: Steering
    ) -> None:
        self._taken = start.distribution.without_lazy()
        self._compared = _at_temperature_one(self._taken)
        sampling = start.distribution.sampling
        self._scale = steering.eta * (1.0 if sampling.greedy else sampling.temperature)
        self._cache = cache
        self._prompt_length = len(start.prompt)
        self._text = list(prompt)
        self._generated = 0
        self._tree = DraftTree.empty()
        self._context: Sequence[int] = ()
        self._length = 0
        self._depths: list[int] = []
        self._slots: dict[int, int] = {}
        self._logits: dict[int, Tensor] = {}
        self._drifts: list[float] = []

    @property
    def drift(self) -> float:
        """Mean total variation from the target's distribution, over the visited nodes."""
        return sum(self._drifts) / max(1, len(self._drifts))

    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Read the new tokens of the text, and the likeliest nodes of the tree."""
        fresh = list(tokens[self._prompt_length + self._generated :])
        self._cache.commit(fresh)
        self._text += fresh
        self._generated += len(fresh)
        self._tree, self._context, self._length = tree, tokens, len(tokens)
        self._depths = depths(tree.parents).tolist()
        self._slots.clear()
        self._logits.clear()
        if self._cache.readable(self._text):
            with self._cache.lease():
                self._logits[ROOT] = self._cache.read(self._text)
                self._slots[ROOT] = ROOT
                self._read(range(min(len(tree), TOGETHER)))

    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the steered logits f64 [1, V] after a node, the target's if the model has none."""
        other = self._model_logits(node)
        if other is None or not self._scale:
            self._drifts.append(0.0)
            return logits
        path = self._path(node)
        p = self._probabilities(self._compared, logits, path)
        q = self._probabilities(self._compared, other.to(logits.device), path)
        steered = logits.double() + shift(p, q, self._scale)
        if self._compared is not self._taken:  # greedy text takes the best token alone
            p = self._probabilities(self._taken, logits, path)
        difference = (self._probabilities(self._taken, steered, path) - p).abs().sum()
        self._drifts.append(0.5 * float(difference))
        return steered

    def _probabilities(
        self, distribution: TokenDistribution, logits: Tensor, path: Sequence[int]
    ) -> Tensor:
        """Return the distribution after draft tokens: logits [1, V] -> f64 [1, V]."""
        return distribution.probabilities(
            distribution.process(logits, self._context[: self._length], [path])
        )

    def _model_logits(self, node: int) -> Tensor | None:
        """Return the model's logits [1, V] after a node, None if it cannot read the text."""
        if node not in self._logits and ROOT in self._logits:
            above = int(self._tree.parents[node])
            if self._model_logits(above) is not None:
                with self._cache.lease():
                    self._read([node])
        return self._logits.get(node)

    def _read(self, nodes: Sequence[int]) -> None:
        """Read those nodes that the model can read in one forward, parents first."""
        tokens, parents = self._tree.tokens, self._tree.parents
        room, size = self._cache.room(self._text), self._cache.model.input_size
        slot, taken = self._cache.drafted, list[int]()
        for node in nodes:
            attached = int(parents[node]) in self._slots
            if attached and self._depths[node] < room and int(tokens[node]) < size:
                self._slots[node] = slot + len(taken)
                taken.append(node)
        if taken:
            rows = self._cache.extend(
                [int(tokens[node]) for node in taken],
                [self._slots[int(parents[node])] for node in taken],
            )
            self._logits.update((node, rows[i : i + 1]) for i, node in enumerate(taken))

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(int(self._tree.tokens[node]))
            node = int(self._tree.parents[node])
        return path[::-1]


def _at_temperature_one(taken: TokenDistribution) -> TokenDistribution:
    """Return the distribution in which p and q are compared: at temperature 1 for greedy text."""
    if not taken.sampling.greedy:
        return taken
    hot = Sampling(temperature=1.0)
    return TokenDistribution(hot, taken.noise, taken.prompt_length, taken.processors)
