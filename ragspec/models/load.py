"""Load models: by name, with an adapter, or quantized."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import (
    InputError,
    MissingExtraError,
    ModelError,
    ModelNotFoundError,
    UnknownNameError,
    UnsupportedModelError,
)
from ragspec.models.device import pick_device, pick_dtype
from ragspec.models.resolve import resolve_model
from ragspec.models.supported import check_config
from ragspec.registry import for_extra, unknown

QUANTIZED = ("int8",)
_CONFIG = "adapter_config.json"


def with_adapter(model: Any, folder: str | Path) -> Any:
    """Return the model with the weights of an adapter that peft saved, merged into its own.

    A merged model costs what it cost before, and drafts as any other.

    Raises:
        ModelNotFoundError: For a folder without an adapter.
        MissingExtraError: Without peft.
        ModelError: Where the adapter does not fit, or cannot be merged as it changes no weights.
    """
    if not (Path(folder) / _CONFIG).is_file():
        raise ModelNotFoundError(
            f"got no adapter in {folder}; expected a folder with {_CONFIG}, as peft's "
            "save_pretrained writes it."
        )
    _expect("peft")
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the adapter {folder} cannot be merged into {type(model).__name__}: {error}. Expected "
            "one that was trained on this model and changes its weights, such as LoRA."
        ) from error


def quantized(model: Any, how: str) -> Any:
    """Return the model with its linear weights in fewer bits, worked with in its own dtype.

    Args:
        how: "int8", weight-only, by torchao: a quarter of the memory of float32. It is another
            model than before, of which everything holds as of any other.

    Raises:
        UnknownNameError: For another word.
        MissingExtraError: Without torchao.
        ModelError: Where it cannot be done.
    """
    if how not in QUANTIZED:
        raise UnknownNameError(unknown("quantization", how, QUANTIZED))
    _expect("torchao")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.quantization import Int8WeightOnlyConfig, quantize_

            quantize_(model, Int8WeightOnlyConfig(version=2))
    except (NotImplementedError, ValueError, RuntimeError, AssertionError) as error:
        raise ModelError(
            f"{type(model).__name__} cannot be quantised ({error}); expected linear weights in a "
            "floating dtype. Leave --quantize out."
        ) from error
    return model


def _expect(package: str) -> None:
    if find_spec(package) is None:
        raise for_extra(ModuleNotFoundError(name=package))


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

    A GGUF file is dequantised: its weights take as much memory as those of any model of that dtype.
    The tokenizer is None where the folder holds none.

    Args:
        device_map: Spreads the layers, as accelerate does ("auto", "balanced", or by module); then
            there is no one device.
        adapter, quantize: See `with_adapter` and `quantized`.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ModelError, MissingExtraError: For a package that
            is not installed.
        InputError: For a device or dtype that cannot be had.
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
