"""A forward of a draft model as a step of fixed shape: one launch on an accelerator.

input i64 [1, 2 n + 66]: tokens, pads last; the speculative slots that each attends to, as the
    bits of one word; the positions of these slots; the number of committed slots, and the last
    speculative slot before the n new ones
output [n, V]: the logits after each token
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ragspec.models.supported import AttentionWindow
from ragspec.trees.draft_tree import Ints
from ragspec.trees.operations import Bools
from ragspec.verification.causal import CausalTarget
from ragspec.verification.static.buffers import Arena
from ragspec.verification.static.layout import Counters
from ragspec.verification.static.step import FixedStep, Mask, Masks, StepLogits

MOST_DRAFTED = 64  # speculative slots, the bits of a word


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """The shape of one forward: n tokens, pads included, and S slots of the cache."""

    tokens: int
    slots: int

    @property
    def width(self) -> int:
        """The columns of the inputs."""
        return 2 * self.tokens + MOST_DRAFTED + 2

    def packet(
        self, tokens: Sequence[int], positions: Sequence[int], visible: Bools, committed: int
    ) -> Ints:
        """Return the inputs for at most the tokens of the shape.

        Args:
            positions: Positions of all m speculative slots, the new ones last.
            visible: Slots that each token attends to, bool [n, m].
        """
        n, m = visible.shape
        before = m - n
        inputs = np.zeros((1, self.width), dtype=np.int64)
        words, places = inputs[0, self.tokens : 2 * self.tokens], inputs[0, 2 * self.tokens :]
        inputs[0, :n] = tokens
        words[:] = np.int64(1) << np.arange(before, before + self.tokens)  # a pad: itself
        words[:n] = np.bitwise_or.reduce(np.where(visible, np.int64(1) << np.arange(m), 0), axis=1)
        places[:m] = positions
        places[MOST_DRAFTED:] = committed, before - 1
        return inputs


class ForwardStep(FixedStep[tuple[Tensor, ...]]):
    """Reads tokens into the first row of an arena; see the module."""

    def __init__(
        self, target: CausalTarget, masks: Masks, arena: Arena, shape: ForwardShape
    ) -> None:
        from ragspec.verification.model_cache import step_cache  # imports transformers

        device, n = arena.device, shape.tokens
        super().__init__(1, shape.width, device, f"forward_{n}_of_{shape.slots}")
        self._logits, self._masks, self._tokens = StepLogits(target.model), masks, n
        self._counters = Counters.of(n, shape.slots, target.model.dtype, device)
        self._columns = torch.zeros(1, n, dtype=torch.int64, device=device)
        self._cache = step_cache(arena, 1, shape.slots, self._columns)

    def run(self) -> tuple[Tensor, ...]:
        """Return the outputs for the packet; the tokens stay in the cache."""
        n, counters = self._tokens, self._counters
        tokens, words, drafted, counts = torch.split(self.packet, [n, n, MOST_DRAFTED, 2], dim=1)
        committed, offsets = counts[:, 0], counts[:, 1:] + counters.steps
        torch.add(committed, offsets, out=self._columns)
        beyond = counters.slots - committed  # the speculative slot, below 0 for a committed one
        at = beyond.clamp(0, MOST_DRAFTED - 1)
        related = (words[0, :, None] >> at & 1).bool() & (beyond < MOST_DRAFTED)
        positions = drafted.gather(1, offsets.clamp_max(MOST_DRAFTED - 1))
        places = torch.where(beyond < 0, counters.slots, drafted[0, at])

        def make_mask(window: AttentionWindow) -> Tensor:
            allowed = related | (beyond < 0)
            if not window.plain:
                allowed = allowed & window.reaches(positions[0, :, None], places)
            return torch.where(allowed, counters.zero, counters.never)[None, None]

        return self._forward(tokens, positions, self._masks.of(make_mask))

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Mask) -> tuple[Tensor, ...]:
        """Return the logits [n, V] after tokens i64 [1, n], and any other outputs."""
        return (self._logits(tokens, positions, mask, self._cache)[0],)
