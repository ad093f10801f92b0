"""How far the layers of a model look back, as its configuration says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Window:
    """What a kind of layer attends to, beside causality.

    size: the last so many tokens, the query among them; None for all. chunk: tokens of the query's
    own chunk of so many; None for all.
    """

    size: int | None = None
    chunk: int | None = None

    @property
    def plain(self) -> bool:
        """Whether all that came before is attended to."""
        return self.size is None and self.chunk is None

    def reaches(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether queries reach keys, both by their positions in the text (broadcast)."""
        reached = torch.ones_like(query - key, dtype=torch.bool)
        if self.size is not None:
            reached = reached & (query - key < self.size)
        if self.chunk is not None:
            reached = reached & (query // self.chunk == key // self.chunk)
        return reached


def layer_windows(config: Any) -> dict[str, Window]:
    """Return the window of each kind of layer that a configuration names.

    Those that name none have one, called "full_attention" whatever its window.
    """
    text = config.get_text_config()
    size = getattr(text, "sliding_window", None) or None
    if getattr(text, "use_sliding_window", True) is False:
        size = None
    chunk = getattr(text, "attention_chunk_size", None) or None
    known = {
        "full_attention": Window(),
        "sliding_attention": Window(size=size),
        "chunked_attention": Window(chunk=chunk),
    }
    kinds = dict.fromkeys(getattr(text, "layer_types", None) or ())
    if not kinds:
        return {"full_attention": Window(size=size)}
    return {kind: known.get(kind, Window()) for kind in kinds}
