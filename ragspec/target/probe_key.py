"""What a verdict of the load-time probe is valid for: one model as it is, on this machine.

Code, configuration, weights, dtype, device and versions make the key. A model that it does not
describe (with hooks, with functions put over its own, with weights that cannot be read) is probed
every time.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from ragspec.models.supported import unwrapped
from ragspec.target import cpu_weights, rotary_tables
from ragspec.target.causal import CausalTarget

FORMAT = 4  # of the verdict and of what it was found by
ENTRIES = 4096  # of each tensor, that its fingerprint is made of

_DONE = {"peft.": "adapter", "quant": "quantised"}  # by the packages that modules come from
_LENT = (cpu_weights.forward, rotary_tables.forward)  # ours, for the time of a session
# transformers leaves these on a model once hidden states were asked for; they only look.
_LOOKING = "transformers.utils.output_capturing"


def probe_key(target: CausalTarget) -> dict[str, str]:
    """Return what a verdict is valid for, if the model is all that it describes; see `described`.

    Adapters count through the classes of the modules, quantised weights through their own.
    """
    model = target.model
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(name, None)
    modules = sorted({_code(module) for module in model.modules()})
    text = json.dumps([config, modules], sort_keys=True, default=str)
    return {
        "format": str(FORMAT),
        "model": type(unwrapped(model)).__name__,
        "variant": variant(model),
        "architecture": hashlib.sha256(text.encode()).hexdigest()[:24],
        "weights": _fingerprint(model),
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "training": str(unwrapped(model).training),
        "dtype": str(target.dtype),
        "device": target.device.type,
        "ragspec": version("ragspec"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def described(model: nn.Module, key: dict[str, str]) -> bool:
    """Say whether the key holds all that a verdict depends on: no hooks, no forwards but a class's.

    The wrapper in which accelerate brings weights to their device counts by the hook's class.
    """
    changed = any(_is_hooked(module) or _is_replaced(module) for module in model.modules())
    return bool(key["weights"]) and not changed


def variant(model: Any) -> str:
    """Return in words what was done to a model after it was made: "" for nothing."""
    config = getattr(model.config, "quantization_config", None)
    given = config if isinstance(config, dict) else vars(config) if config is not None else {}
    method = given.get("quant_method", "")
    words = [str(getattr(method, "value", method))]
    modules = {type(module).__module__ for module in model.modules()}
    words += [word for part, word in _DONE.items() if any(part in name for name in modules)]
    weights = list(model.parameters())
    words += sorted({type(weight).__name__ for weight in weights} - {"Parameter"})
    words += ["offloaded"] * any(weight.device.type == "meta" for weight in weights)
    return ", ".join(dict.fromkeys(filter(None, words)))


def _is_hooked(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(getattr(hook, "__module__", None) != _LOOKING for hook in hooks)


def _is_replaced(module: nn.Module) -> bool:
    own = module.__dict__.get("forward")
    return (
        own is not None
        and getattr(own, "__func__", None) not in _LENT
        and not hasattr(module, "_hf_hook")
    )


def _code(module: nn.Module) -> str:
    """Return the names of a module's class, of its forward, and of accelerate's hook."""
    forward, hook = type(module).forward, type(getattr(module, "_hf_hook", None))
    named = (type(module), forward, hook)
    return " ".join(f"{thing.__module__}.{thing.__qualname__}" for thing in named)


def _fingerprint(model: nn.Module) -> str:
    """Return a hash of the tensors' names, shapes and some of their entries; "": unreadable."""
    known = hashlib.sha256()
    found: dict[torch.device, list[torch.Tensor]] = {}
    try:
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                known.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                flat = tensor.detach().reshape(-1)
                some = flat[:: len(flat) // ENTRIES | 1].to(torch.float64)
                found.setdefault(tensor.device, []).append(some)
            for several in found.values():
                known.update(torch.cat(several).cpu().numpy().tobytes())
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return ""  # not loaded (meta), or of a kind that knows no single entries
    return known.hexdigest()[:24]
