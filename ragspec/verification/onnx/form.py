"""Settings of a model beside its sizes (windows, factors, bounds), and those no graph has."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ragspec.models.block_linear import BlockLinear
from ragspec.models.onnx_session import missing_package
from ragspec.models.supported import layer_windows
from ragspec.types import PreTrainedConfig, PreTrainedModel
from ragspec.verification.causal import CausalTarget
from ragspec.verification.prefix_cache import hooks_of
from ragspec.verification.reading import asks_for_length

TABLES = "cosines", "sines"
FOLDED = "folded"  # what the names of attention operators for few positions begin with
FAMILIES = {"llama", "mistral", "qwen2", "qwen3", "granite", "phi3", "gemma2", "gemma3_text"}
LEAST_WEIGHTS = 1 << 20  # of a smaller model a session costs more than it saves
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
    def of(cls, config: PreTrainedConfig) -> "ModelForm":
        """Return the form that a configuration asks for."""
        named = getattr(config, "layer_types", None)
        kinds = named or ["full_attention"] * config.num_hidden_layers
        windows = layer_windows(config) if named or config.model_type in WINDOWED else {}
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


def hindrance(target: CausalTarget) -> str:
    """Return why a model does not run on ONNX Runtime, "" if it does."""
    model = target.model
    if reason := foreign(model):
        return reason
    if type(target) is not CausalTarget:
        return "its forwards depend on more than tokens and positions"
    if missing := missing_package():
        return f"{missing} is not installed (pip install 'ragspec[onnx]')"
    kinds = {(p.device.type, p.dtype) for p in model.parameters()}
    if kinds - {("cpu", torch.float32), ("cpu", torch.uint8)}:
        return "its weights are not all in float32 on the CPU"
    if sum(p.numel() for p in model.parameters()) < LEAST_WEIGHTS:
        return f"it has fewer than {LEAST_WEIGHTS:,} weights"
    for name, module in model.named_modules():  # one that computes in another way than its class
        plain = all(type(each.data) is Tensor for each in module.parameters(recurse=False))
        replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
        other = name.endswith(("_proj", "lm_head")) and type(module) not in (nn.Linear, BlockLinear)
        if hooks_of(module) or replaced or other or not plain:
            return f"its {name or 'model'} was changed"
    return ""


def foreign(model: PreTrainedModel) -> str:
    """Return what a model of its configuration has that no graph has, "" for nothing."""
    config = model.config
    if config.model_type not in FAMILIES or not hasattr(model, "model"):
        return f"no graph is known for {type(model).__name__}"
    if asks_for_length(model):
        return "its forwards depend on more than tokens and positions"
    if others := {*layer_windows(config)} - {"full_attention", "sliding_attention"}:
        return f"it has layers of {', '.join(sorted(others))}"
    if getattr(config, "use_bidirectional_attention", False):
        return "its tokens attend to later ones"
    if (activation := ModelForm.of(config).activation) not in ("silu", "gelu_pytorch_tanh"):
        return f"its activation is {activation}"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tables = (each for name, each in model.named_buffers() if name.endswith("inv_freq"))
    odd = [each for each in (width, *(2 * len(table) for table in tables)) if each % 16]
    return f"its heads or their rotated parts are {odd[0]} wide, no multiple of 16" if odd else ""
