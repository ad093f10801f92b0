"""Rotary tables that change with the length of the text (longrope): every token by its own.

Such a model turns keys by one table in texts of up to `original_max_position_embeddings` tokens
and by another in longer ones, and transformers picks one of them for a whole forward, by its
largest position. The rows of a batch and the nodes of a draft would so choose each other's. Here
every query gets the table that plain decoding of its row alone would give it: a token of the
prompt that of the whole prompt, a later one that of the text which it ends.

Dynamic scaling changes its table beyond `max_position_embeddings`, where no request is let.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

# Their `generate` reads the text anew, by the long table, with the first token beyond the border
# (that of Phi 4, and of Phi 3 in early releases, goes on from the last token alone: a mistake).
_READ_AGAIN = {"phi3", "phimoe", "phi4_multimodal"}


class _Service(NamedTuple):
    """Whose tables the forward in progress shall get: see `RotaryTables.serve`."""

    twins: dict[int, nn.Module]
    lengths: torch.Tensor
    longest: int


_service: ContextVar[_Service | None] = ContextVar("ragspec_rotary_service", default=None)
_lent: dict[int, tuple[int, Any]] = {}
_lock = threading.RLock()


class RotaryTables:
    """The rotary modules of a model that have a table for short texts and one for long ones.

    reread: the length up to which a text is read by the short table, where the model's own
    `generate` reads all of it again beyond; None for other models.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if _changes(module)]
        self._twins = {id(module): _twin(module) for module in self._modules}
        config: Any = model.config
        again = bool(self._modules) and config.model_type in _READ_AGAIN
        self.reread: int | None = config.original_max_position_embeddings if again else None

    def __bool__(self) -> bool:
        return bool(self._modules)

    @contextmanager
    def serve(self, lengths: torch.Tensor, longest: int) -> Iterator[None]:
        """Turn the queries of the forwards inside the block by the tables of these texts.

        lengths i64 [B, n]: of the text that decides for each query. longest: at least the largest
        of them, known without asking the device. Other forwards over the model, in other threads,
        find it as it was; so do the modules' own tables.
        """
        token = _service.set(_Service(self._twins, lengths, longest))
        for module in self._modules:
            _lend(module)
        try:
            yield
        finally:
            for module in self._modules:
                _take_back(module)
            _service.reset(token)


def asks_for_length(model: nn.Module) -> bool:
    """Return whether a forward looks how long its text is before it turns keys, on the host."""
    kinds = {kind for module in model.modules() for kind in _kinds(module)}
    return any(word in str(kind) for kind in kinds for word in ("longrope", "dynamic"))


def _changes(module: nn.Module) -> bool:
    return "longrope" in _kinds(module) and hasattr(module, "config")


def _kinds(module: nn.Module) -> list[Any]:
    kinds = getattr(module, "rope_type", None)
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def _twin(module: nn.Module) -> nn.Module:
    """Return a copy with buffers of its own: the tables are chosen by writing into them."""
    twin = copy.copy(module)
    twin._buffers = {k: v if v is None else v.clone() for k, v in module._buffers.items()}
    return twin


def _lend(module: nn.Module) -> None:
    with _lock:
        count, before = _lent.get(id(module), (0, module.__dict__.get("forward")))
        _lent[id(module)] = (count + 1, before)
        module.__dict__["forward"] = MethodType(forward, module)


def _take_back(module: nn.Module) -> None:
    with _lock:
        count, before = _lent[id(module)]
        if count > 1:
            _lent[id(module)] = (count - 1, before)
            return
        del _lent[id(module)]
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def forward(
    module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> Any:
    """Return what the module's own forward would, each position by the table of its own text."""
    kind = () if layer_type is None else (layer_type,)
    service = _service.get()
    if service is None:
        before = _lent.get(id(module), (0, None))[1]
        return (before or MethodType(type(module).forward, module))(x, position_ids, *kind)
    twin, border = service.twins[id(module)], _border(module, *kind)
    with _lock:  # the twin chooses its table in its buffers and then reads them
        if border is None or service.longest <= border:
            return type(twin).forward(twin, x, position_ids, *kind)
        beyond = service.lengths > border
        short = _by_table(border, twin, x, position_ids.masked_fill(beyond, 0), *kind)
        long = _by_table(border + 1, twin, x, position_ids.masked_fill(~beyond, 0), *kind)
    chosen = [torch.where(beyond[..., None], b, a) for a, b in zip(short, long, strict=True)]
    return tuple(chosen) if len(chosen) > 1 else chosen[0]


def _by_table(
    length: int, twin: nn.Module, x: torch.Tensor, positions: torch.Tensor, *kind: Any
) -> list[torch.Tensor]:
    """Return the turns of these positions by the table of a text of `length` tokens."""
    last = positions.new_full((*positions.shape[:-1], 1), length - 1)
    turns = type(twin).forward(twin, x, torch.cat([positions, last], dim=-1), *kind)
    return [turn[..., :-1, :] for turn in (turns if isinstance(turns, tuple) else [turns])]


def _border(module: Any, layer_type: str | None = None) -> int | None:
    """Return the largest length of a text that is turned by the short table; None: of all."""
    given = module.config.rope_parameters
    given = given if layer_type is None else given[layer_type]
    kind, border = given.get("rope_type"), given.get("original_max_position_embeddings")
    return int(border) if kind == "longrope" and border else None
