"""What a configuration says of its model's computation, beside sizes: windows, factors, bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragspec.models.supported import layer_windows

TABLES = "cosines", "sines"


@dataclass(frozen=True, slots=True)
class ModelForm:
    """The form of a Llama-like model; without arguments, of one layer.

    Attributes:
        windows: The most tokens that a token attends to, by layer; None for all.
        tables: What the names of the rotary tables end in, by layer.
        residual: Factor of what a layer adds (Granite).
        embedding: Factor of the embeddings, beside that of their module (Granite).
        divisor: Of the logits (Granite).
        bound: Of the logits (Gemma 2), None for none.
    """

    activation: str = "silu"
    windows: tuple[int | None, ...] = (None,)
    tables: tuple[str, ...] = ("",)
    residual: float = 1.0
    embedding: float = 1.0
    divisor: float = 1.0
    bound: float | None = None

    @classmethod
    def of(cls, config: Any) -> ModelForm:
        """Return the form that a configuration asks for."""
        kinds = (
            getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        )
        windows, rotary = layer_windows(config), getattr(config, "rope_parameters", None) or {}
        separate = {kind for kind in kinds if isinstance(rotary.get(kind), dict)} - {
            "full_attention"
        }
        return cls(
            getattr(config, "hidden_activation", None) or str(getattr(config, "hidden_act", "")),
            tuple(windows[kind].size for kind in kinds),
            tuple(f".{kind}" if kind in separate else "" for kind in kinds),
            residual=float(getattr(config, "residual_multiplier", 1.0)),
            embedding=float(getattr(config, "embedding_multiplier", 1.0)),
            divisor=float(getattr(config, "logits_scaling", 1.0)),
            bound=getattr(config, "final_logit_softcapping", None),
        )

    @property
    def window(self) -> int | None:
        """The window of layers that have one."""
        return next((each for each in self.windows if each is not None), None)

    @property
    def kinds(self) -> list[str]:
        """What the names of rotary tables end in, each once."""
        return list(dict.fromkeys(("", *self.tables)))

    def bounded(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given those of its head."""
        logits = logits / self.divisor
        return logits if self.bound is None else self.bound * torch.tanh(logits / self.bound)
