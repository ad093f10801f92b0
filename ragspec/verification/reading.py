"""How texts are read: chunks of prompts, rotary tables, and the hidden states of a forward.

Rotary tables may change with the length of the text (longrope): such a model rotates keys by one
table in texts of up to `original_max_position_embeddings` tokens and by another in longer ones.
transformers picks one table for a whole forward, by its largest position. So a session takes one
row per forward and verifies no draft across the border.

Dynamic scaling changes its table beyond `max_position_embeddings`; longer requests are refused.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from ragspec.errors import UnsupportedModelError
from ragspec.needs import LAST

Keywords = dict[str, object]
PIECE = 512  # tokens of a chunk on a CPU
LARGE_PIECE = 2048  # tokens of a chunk on an accelerator
LONG = 256  # tokens of a chain from which on its n x n table of ancestors costs too much
_lock = threading.Lock()  # torch may give two hooks that are registered at once one number

# Their `generate` reads the whole text again, by the long table, at the first token beyond the
# border. (That of Phi 4, and of Phi 3 in early releases, continues from the last token: a bug.)
READ_AGAIN = {"phi3", "phimoe", "phi4_multimodal"}


def piece_of(device: torch.device) -> int:
    """Return the chunk size of a device, in tokens."""
    return PIECE if device.type == "cpu" else LARGE_PIECE


def table_border(model: nn.Module) -> int | None:
    """Return the longest text, in tokens, of the short table; None for a model with one table."""
    for module in model.modules():
        if "longrope" in _kinds(module) and hasattr(module, "config"):
            config: Any = module.config
            parameters = config.rope_parameters
            every = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
            borders = [each.get("original_max_position_embeddings") for each in every]
            return next((int(border) for border in borders if border), None)
    return None


def asks_for_length(model: nn.Module, words: Sequence[str] = ("longrope", "dynamic")) -> bool:
    """Return whether a forward reads the length of its text to pick a table, of these kinds."""
    kinds = {kind for module in model.modules() for kind in _kinds(module)}
    return any(word in str(kind) for kind in kinds for word in words)


def continues_rotation(model: nn.Module) -> bool:
    """Return whether positions beyond the model's context are rotated like those within it."""
    rotates = any(kind for module in model.modules() for kind in _kinds(module))
    return rotates and not asks_for_length(model)


def _kinds(module: nn.Module) -> list[object]:
    kinds = getattr(module, "rope_type", None)
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


class Taps:
    """Records hidden states inside the block; reusable. Forwards of other threads are not recorded.

    Args:
        modules: The modules that read the states, by their numbers; they are not changed.

    Attributes:
        selected: Those of the last states whose logits are computed, i64 [k]; None for all.
        states: The states [R, n, H] of the last forward, by their numbers.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.modules = modules
        self.selected: Tensor | None = None
        self.states: dict[int, Tensor] = {}
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
        self.states, self._thread = {}, threading.get_ident()
        with _lock:
            for tap, module in self.modules.items():
                take = partial(self._take, tap)
                self._hooks.append(module.register_forward_pre_hook(take, with_kwargs=True))
        return self

    def __exit__(self, *raised: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def taken(self) -> dict[int, Tensor]:
        """Return the states of the last forward that were read, and forget them."""
        states, self.states = self.states, {}
        return states

    def _take(
        self, tap: int, _: nn.Module, arguments: tuple[object, ...], named: Keywords | None = None
    ) -> tuple[tuple[object, ...], Keywords] | None:
        # A compiler cannot trace the identity of a thread. torch omits `named` in the forward of
        # another thread while the hook comes or goes.
        compiles = torch.compiler.is_compiling()
        if named is None or (not compiles and threading.get_ident() != self._thread):
            return None
        states = arguments[0] if arguments else named["hidden_states"]
        assert isinstance(states, Tensor)
        self.states[tap] = states.detach()
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
