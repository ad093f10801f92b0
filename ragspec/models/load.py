"""From a name to a model and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ragspec.errors import ModelError, UnsupportedModelError
from ragspec.models.device import pick_device, pick_dtype
from ragspec.models.resolve import resolve_model
from ragspec.models.supported import check_config

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
