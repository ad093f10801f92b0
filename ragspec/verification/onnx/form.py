"""What a configuration says of its model's computation, beside sizes: windows, factors, bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragspec.models.supported import layer_windows
from ragspec.types import PreTrainedConfig

TABLES = "cosines", "sines"
FOLDED = "folded"  # the attention operator for few positions of one sequence
WINDOWED = frozenset({"mistral", "phi3"})  # all of whose layers have the window, if one has


@dataclass(frozen=True, slots=True)
class ModelForm:
    """The form of a Llama-like model; without arguments, of one layer.

    Attributes:
        windows: The most tokens that a token attends to, by layer; None for all.
        tables: What the names of the rotary tables end in, by layer.
        rotary: The kind of layers of each such end, "" if the model has one table.
        softcap: Bound of the scores (Gemma 2), 0 for none.
        residual: Factor of what a layer adds (Granite).
        embedding: Factor of the embeddings, beside that of their module (Granite).
        divisor: Of the logits (Granite).
        bound: Of the logits (Gemma 2), None for none.
    """

    activation: str = "silu"
    windows: tuple[int | None, ...] = (None,)
    tables: tuple[str, ...] = ("",)
    rotary: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    softcap: float = 0.0
    residual: float = 1.0
    embedding: float = 1.0
    divisor: float = 1.0
    bound: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelForm:
        """Return the form that a configuration asks for."""
        named = getattr(config, "layer_types", None)
        kinds = named or ["full_attention"] * config.num_hidden_layers
        known = named or config.model_type in WINDOWED
        windows = layer_windows(config) if known else {}
        present = sorted(dict.fromkeys(kinds))  # the first has the tables of plain names
        ends = {kind: f".{kind}" if n else "" for n, kind in enumerate(present)}
        rotary = getattr(config, "rope_parameters", None) or {}
        nested = any(isinstance(each, dict) for each in rotary.values())
        softcap = getattr(config, "attn_logit_softcapping", None) or 0.0
        return cls(
            getattr(config, "hidden_activation", None) or str(getattr(config, "hidden_act", "")),
            tuple(windows[kind].size if windows else None for kind in kinds),
            tuple(ends[kind] if nested else "" for kind in kinds),
            {end: kind for kind, end in ends.items()} if nested else {"": ""},
            softcap=float(softcap if config.model_type == "gemma2" else 0.0),
            residual=float(getattr(config, "residual_multiplier", 1.0)),
            embedding=float(getattr(config, "embedding_multiplier", 1.0)),
            divisor=float(getattr(config, "logits_scaling", 1.0)),
            bound=getattr(config, "final_logit_softcapping", None),
        )

    @property
    def window(self) -> int | None:
        """The window of layers that have one."""
        return next((each for each in self.windows if each is not None), None)

    def bounded(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given those of its head."""
        logits = logits * torch.tensor(1 / (self.divisor * (self.bound or 1.0)))
        return logits if self.bound is None else self.bound * torch.tanh(logits)
