"""What a loaded model can be turned into: with an adapter's weights, or in fewer bits."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragspec.errors import ModelError, ModelNotFoundError, UnknownNameError
from ragspec.registry import for_extra, unknown

QUANTIZED = ("int8",)
_CONFIG = "adapter_config.json"


def with_adapter(model: Any, folder: str | Path) -> Any:
    """Return the model with the weights of an adapter that peft saved, merged into its own.

    A merged model costs what it cost before, and drafts as any other. Raises ModelNotFoundError for
    a folder without an adapter, MissingExtraError without peft, ModelError where the adapter does
    not fit, or cannot be merged as it changes no weights.
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

    how: "int8", weight-only, by torchao: a quarter of the memory of float32. It is another model
    than before, of which everything holds as of any other. Raises UnknownNameError for another
    word, MissingExtraError without torchao, ModelError where it cannot be done.
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
