"""From a name to a model and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import InputError, MissingExtraError, ModelError, UnsupportedModelError
from ragspec.models.device import pick_device, pick_dtype
from ragspec.models.resolve import resolve_model
from ragspec.models.supported import check_config
from ragspec.models.variants import quantized, with_adapter

MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def load_model(
    name: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    device_map: str | Mapping[str, Any] | None = None,
    adapter: str | Path | None = None,
    quantize: str | None = None,
) -> tuple[Any, Any]:
    """Return (model, tokenizer) of a path or name, in eval mode on the device.

    A GGUF file is dequantised: its weights take as much memory as those of any model of that
    dtype. The tokenizer is None where the folder holds none. device_map: spreads the layers, as
    accelerate does ("auto", "balanced", or by module); then there is no one device. adapter,
    quantize: see `with_adapter` and `quantized`. Raises ModelNotFoundError, UnsupportedModelError,
    ModelError, MissingExtraError for a package that is not installed, and InputError for a device
    or dtype that cannot be had.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    result = resolve_model(name)
    if device_map is not None and device != "auto":
        raise InputError(
            f"got a device ({device}) and a device map ({device_map}); expected one of them."
        )
    if isinstance(device_map, str) and device_map not in MAPS:
        pick_device(device_map)  # a device is a map too; raises for another word
    place = pick_device(device)
    numbers = pick_dtype(dtype, place)
    source: dict[str, Any] = {"local_files_only": True}
    if result.file is not None:
        check_gguf(name)
        source["gguf_file"] = result.file
    spread = {} if device_map is None else {"device_map": device_map}
    try:
        with _without_bars():
            check_config(AutoConfig.from_pretrained(result.folder, **source))
            model, info = AutoModelForCausalLM.from_pretrained(
                result.folder,
                dtype=numbers,
                output_loading_info=True,
                **source,
                **spread,
                **(_dequantised() if result.file is not None else {}),
            )
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"{name} was found at {result.folder} but transformers cannot load it as a causal "
            f"language model: {error}. Expected a folder written by save_pretrained, or a GGUF "
            "file of an architecture that transformers reads."
        ) from error
    if info["missing_keys"]:  # transformers would go on with random ones
        raise ModelError(
            f"{name} was found at {result.folder} but lacks the weights "
            f"{', '.join(sorted(info['missing_keys'])[:3])}; expected all of them. Copy it again."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(result.folder, **source)
    except Exception as error:  # a damaged tokenizer.json raises the bare class
        held = any((Path(result.folder) / file).exists() for file in _TOKENIZER_FILES)
        if held or result.file is not None:
            raise ModelError(
                f"{name} was found at {result.folder} but transformers cannot load its tokenizer: "
                f"{error}. Expected the files that save_pretrained writes; copy them again."
            ) from error
        tokenizer = None
    model = model.eval() if spread else model.to(place).eval()
    if adapter is not None:
        model = with_adapter(model, adapter)
    return model if quantize is None else quantized(model, quantize), tokenizer


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' loading bars off the caller's terminal; loading takes a second or two."""
    from transformers.utils import logging

    text = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if text:
            logging.enable_progress_bar()


def _dequantised() -> dict[str, Any]:
    """Return what makes transformers load GGUF weights as ordinary ones, as it once always did."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def check_gguf(what: str | Path) -> None:
    """Raise MissingExtraError where the package that reads GGUF is not installed."""
    if find_spec("gguf") is None:
        raise MissingExtraError(
            f"{what} comes as GGUF, which the package gguf reads; it is not installed. Install it: "
            "pip install 'ragspec[gguf]'."
        )
