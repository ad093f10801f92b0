"""Forwards of a draft head as steps of fixed shape: one launch on an accelerator.

The states before the tokens lie in a buffer of the arena. A head whose forwards differ so from its
usual ones, or of a form without such steps, runs kernel by kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragspec.drafters.heads.head import RecurrentHead
from ragspec.drafters.model.forward_step import ForwardShape, ForwardStep
from ragspec.models.supported import layer_windows
from ragspec.verification.causal import CausalTarget
from ragspec.verification.static.buffers import Arena, LayerShape
from ragspec.verification.static.runner import StepRunner
from ragspec.verification.static.step import Masks

if TYPE_CHECKING:
    from ragspec.drafters.heads.cache import HeadCache, HeadModel

TOLERANCE = 0.02  # of the largest logit: half precision rounds


class HeadStep(ForwardStep):
    """Reads tokens, and the states before them, into the first row of an arena."""

    def __init__(
        self, model: HeadModel, runner: StepRunner, arena: Arena, shape: ForwardShape
    ) -> None:
        super().__init__(model, runner, arena, shape)
        assert arena.states is not None and isinstance(model.head, RecurrentHead)
        # Not the model, which belongs to one session.
        self._head, self._target, self._rows = model.head, model.target, model.rows
        self._states = arena.states[:, : shape.tokens]

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Any) -> tuple[Tensor, ...]:
        """Return the logits [n, v], and the states [1, n, H] that the head reads next."""
        embedded = self._head.embed(self._target, tokens)
        read, fed = self._head(embedded, self._states, positions, mask=mask, keys=self._cache)
        read = read.to(self._target.dtype)
        if self._rows is None:
            logits = self._target.head_logits(read, positions)
        else:
            logits = self._rows(read)
        return logits[0], fed


class Weights(nn.ModuleList):
    """The modules whose weights a head's steps read, at addresses that must not change."""

    def __init__(self, head: RecurrentHead, target: CausalTarget) -> None:
        super().__init__([head, target.output_head, target.loaded.get_input_embeddings()])
        self.dtype = head.dtype


def open_steps(model: HeadModel, open_cache: type[HeadCache], mode: str) -> StepRunner | None:
    """Return what runs a head's forwards as steps of fixed shape, if the head has them.

    Args:
        mode: "eager" or "graph", see `static.runner`.
    """
    head, target = model.head, model.target
    if not (isinstance(head, RecurrentHead) and head.config.recurrent):
        return None
    if type(target) is not CausalTarget:  # guidance, or other positions
        return None

    def read() -> tuple[Tensor, HeadCache]:
        cache = open_cache(model, target.vocab_size, 8)
        size = len(head.config.taps) * head.config.target_size
        generator = torch.Generator().manual_seed(0)
        taps = torch.randn(1, 4, size, generator=generator).to(target.device, target.dtype)
        cache.notify(taps)
        with cache.lease():
            cache.read([1, 2, 3, 4])
            return cache.extend([5, 6], [-1, -1]), cache

    expected, cache = read()
    layers = [(LayerShape.of(k), LayerShape.of(v)) for k, v in cache.layers]
    windows = layer_windows(head.layers.config)
    runner = StepRunner(Weights(head, target), "eager", Masks(windows, len(windows) > 1), layers)
    model.fixed_steps = runner
    try:
        result, _ = read()
    except Exception:  # a layer of another library may raise anything
        return None
    finally:
        model.fixed_steps = None
    if not (result - expected).abs().max() <= TOLERANCE * expected.abs().max():
        return None
    runner.mode = mode
    return runner
