"""From a name to a model, from a model to a target, from a target to its cost curve."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

from ragspec.budget import BudgetPolicy
from ragspec.cost import CostCurve, CostKey, cache_directory, context_lengths
from ragspec.device import pick_device, pick_dtype
from ragspec.errors import ModelError, UnsupportedModelError
from ragspec.models import resolve_model
from ragspec.probe import probe_target
from ragspec.scope import check_config, check_scope
from ragspec.target import CausalTarget

LONGEST_TIMED = 8192
_NO_COST = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_model(
    name: str | Path, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto"
) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a path or name, in eval mode on the device.

    The tokenizer is None where the folder holds none. Raises ModelNotFoundError,
    UnsupportedModelError, ModelError, and InputError for a device or dtype that cannot be had.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    found = resolve_model(name)
    place = pick_device(device)
    numbers = pick_dtype(dtype, place)
    try:
        check_config(AutoConfig.from_pretrained(found.folder, local_files_only=True))
        model, info = AutoModelForCausalLM.from_pretrained(
            found.folder,
            dtype=numbers,
            local_files_only=True,
            output_loading_info=True,
        )
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"{name} was found at {found.folder} but transformers cannot load it as a causal "
            f"language model: {error}. Expected a folder written by save_pretrained."
        ) from error
    if info["missing_keys"]:  # transformers would go on with random ones
        raise ModelError(
            f"{name} was found at {found.folder} but lacks the weights "
            f"{', '.join(sorted(info['missing_keys'])[:3])}; expected all of them. Copy it again."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(found.folder, local_files_only=True)
    except Exception as error:  # a damaged tokenizer.json raises the bare class
        if any((Path(found.folder) / file).exists() for file in _TOKENIZER_FILES):
            raise ModelError(
                f"{name} was found at {found.folder} but transformers cannot load its tokenizer: "
                f"{error}. Expected the files that save_pretrained writes; copy them again."
            ) from error
        tokenizer = None
    return model.to(place).eval(), tokenizer


def open_target(model: Any, cache: Path | None = None) -> CausalTarget:
    """Return the target over a model, after its architecture passed the load-time probe.

    Raises UnsupportedModelError with the reason for models outside the scope.
    """
    check_scope(model)
    target = CausalTarget(model)
    verdict = probe_target(target, cache or cache_directory())
    return verdict.target


def read_cost(
    target: CausalTarget, budget: BudgetPolicy, cache: Path | None = None
) -> CostCurve | None:
    """Return the cost curve of the target where the budget needs one; measured once, cached."""
    if not budget.needs_cost:
        return None
    key = CostKey(
        model=model_identity(target.model),
        device=_device_name(target.device),
        dtype=str(target.dtype),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )
    lengths = context_lengths(min(target.max_length or LONGEST_TIMED, LONGEST_TIMED))
    return CostCurve.cached(cache or cache_directory(), key, target.time_forward, lengths)


def model_identity(model: Any) -> str:
    """Return a short name for what a model costs: a hash of its configuration and sizes.

    Weights do not count: two checkpoints of one architecture cost the same. Nor does what saving
    or loading writes into a configuration.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NO_COST}
    sizes = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    known = json.dumps([config, sizes], sort_keys=True, default=str)
    return hashlib.sha256(known.encode()).hexdigest()[:24]


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu {platform.processor() or platform.machine()}"
    return str(torch.get_device_module(device).get_device_name(device))
