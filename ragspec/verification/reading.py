"""The size of the chunks in which prompts are read, and the hidden states of a forward."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from ragspec.errors import UnsupportedModelError
from ragspec.needs import LAST

PIECE = 512  # tokens of a chunk on a CPU
LARGE_PIECE = 2048  # tokens of a chunk on an accelerator
LONG = 256  # tokens of a chain from which on its n x n table of ancestors costs too much


def piece_of(device: torch.device) -> int:
    """Return the chunk size of a device, in tokens."""
    return PIECE if device.type == "cpu" else LARGE_PIECE


class Taps:
    """Records hidden states inside the block; reusable. Forwards of other threads are not recorded.

    Args:
        modules: The modules that read the states, by their numbers; they are not changed.

    Attributes:
        selected: Positions whose logits the output head computes, i64 [k]; None for all.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.modules = modules
        self.selected: Tensor | None = None
        self._states: dict[int, Tensor] = {}
        self._thread: int | None = None
        self._hooks: list[Any] = []

    @classmethod
    def of(cls, model: nn.Module, head: nn.Module, taps: Iterable[int]) -> Self:
        """Return the taps of a model with these numbers; see `Needs.hidden_states`.

        Raises:
            UnsupportedModelError: The model has no such layer.
        """
        layers = [] if set(taps) == {LAST} else decoder_layers(model)
        for tap in taps:
            if tap != LAST and not 0 <= tap < len(layers):
                raise UnsupportedModelError(
                    f"the drafter reads the input of layer {tap}; got {type(model).__name__} with "
                    f"{len(layers)} layers. Use a head that was trained for this model."
                )
        return cls({tap: head if tap == LAST else layers[tap] for tap in taps})

    def __enter__(self) -> Self:
        self._states, self._thread = {}, threading.get_ident()
        for tap, module in self.modules.items():

            def take(
                module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], tap: int = tap
            ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
                return self._take(tap, arguments, named)

            self._hooks.append(module.register_forward_pre_hook(take, with_kwargs=True))
        return self

    def __exit__(self, *raised: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def taken(self) -> dict[int, Tensor]:
        """Return the states [R, n, H] of the last block, by their numbers; those that were read."""
        states, self._states = self._states, {}
        return states

    def _take(
        self, tap: int, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # A compiler cannot trace the identity of a thread.
        if not torch.compiler.is_compiling() and threading.get_ident() != self._thread:
            return None
        states = arguments[0] if arguments else named["hidden_states"]
        self._states[tap] = states.detach()
        if self.selected is None or tap != LAST:
            return None
        return (states[:, self.selected], *arguments[1:]), named


def usual_taps(layers: int) -> tuple[int, int, int]:
    """Return EAGLE-3's taps: the inputs of layers 2, n // 2 and n - 3, of n layers."""
    return min(2, layers - 1), layers // 2, max(layers - 3, 0)


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the layers of a model's decoder, () if they are not in one list."""
    decoder: Any = getattr(model, "get_decoder", lambda: model)()
    count = decoder.config.get_text_config().num_hidden_layers
    lists = (each for each in decoder.modules() if isinstance(each, nn.ModuleList))
    return next((tuple(each) for each in lists if len(each) == count), ())
