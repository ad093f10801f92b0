"""Load models: by name, with an adapter, or quantized."""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType

import torch

from ragspec.errors import ModelError, UnsupportedModelError
from ragspec.models import checks
from ragspec.models.device import out_of_memory, pick_device, pick_dtype
from ragspec.models.gguf import converted_folder, discard, keep_converted
from ragspec.models.gguf_metadata import JOIN, complete_config, complete_model, complete_tokenizer
from ragspec.models.quantized import SMALL, quantized
from ragspec.models.resolve import ModelOrigin, ResolvedModel, resolve_model
from ragspec.models.supported import check_config
from ragspec.registry import optional_packages
from ragspec.types import PreTrainedModel, Tokenizer

DeviceMap = str | Mapping[str, int | str | torch.device] | None


def with_adapter(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """Return the model with a saved peft adapter merged into its weights.

    Raises:
        MissingModelError: The folder has no adapter.
        MissingExtraError: peft is not installed.
        ModelError: The adapter does not fit the model, or changes no weights.
    """
    checks.check_adapter(Path(folder))
    with optional_packages():
        from peft import PeftConfig, get_peft_model

    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # on tied embeddings
            adapted = get_peft_model(model, PeftConfig.from_pretrained(str(folder)))
            result = adapted.load_adapter(str(folder), "default")
            if keys := [*result.missing_keys, *result.unexpected_keys]:
                count = f"{len(keys)} weights, such as {keys[0]}"
                raise ValueError(f"model and adapter differ in {count}")
            _untie(model)
            return adapted.merge_and_unload()
    except Exception as error:  # damaged files may raise any
        if out_of_memory(error):
            raise
        raise ModelError(
            f"the adapter {folder} cannot be merged into {type(model).__name__}: {error}. Expected "
            "one that was trained on this model and changes its weights, such as LoRA."
        ) from error


def _untie(model: PreTrainedModel) -> None:
    """Copy the output head of a wrapped model if an adapter changes it or a tied embedding."""
    from peft.tuners.tuners_utils import BaseTunerLayer as Tuned
    from peft.utils.other import TrainableTokensWrapper as Tokens

    ends = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(model.config, "tie_word_embeddings", False)
    together = isinstance(ends[1], Tokens) and ends[1].token_adapter.tied_adapter
    if tied and not together and any(isinstance(each, Tokens) for each in ends):
        raise ValueError("it trains tokens of a tied embedding in more than one way")
    if any(isinstance(each, Tuned) for each in ends):
        first, head = (each.get_base_layer() if isinstance(each, Tuned) else each for each in ends)
        if head is not None and head.weight is first.weight:
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
            model.config.tie_word_embeddings = False


LOCAL: Mapping[str, object] = MappingProxyType(
    {"local_files_only": True, "trust_remote_code": False}  # None would ask on stdin
)
# Meanings of errors of transformers, by a word in them; their advice does not apply here.
_MEANINGS = MappingProxyType(
    {
        "trust_remote_code": "it needs Python code from its folder, which ragspec never runs",
        "weights_only": "its pickled weights are damaged, or hold more than tensors",
        "ignore_mismatched_sizes": "its weights have other sizes than its configuration says",
        "general.architecture": f"it names no architecture, as parts but the first do not. {JOIN}",
    }
)


def load_model(
    name: str | Path,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    *,
    device_map: DeviceMap = None,
    adapter: str | Path | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Return (model, tokenizer) of a path or name, in eval mode on the device.

    GGUF weights are dequantised and take as much memory as any weights of that dtype. They are
    saved so in the cache, where the next call finds them; `ragspec models` lists and removes them.
    The tokenizer is None if the folder has none.

    Args:
        device_map: Distributes the layers, as in accelerate: "auto", "balanced" or by module.
        dtype: "auto", a floating dtype, "int8" or "int4"; see `pick_dtype` and `quantized`.
        adapter: See `with_adapter`.

    Raises:
        MissingModelError: No place has the model or the adapter.
        UnsupportedModelError: The architecture is outside the scope.
        ModelError: The files are damaged or incomplete, or do not fit.
        MissingExtraError: An optional package is not installed.
        InputError: The device or dtype is unknown or unavailable.
    """
    source = resolve_model(name)
    checks.check_place(device, device_map)
    checks.check_language_model(source)
    if isinstance(device_map, str) and device_map not in checks.MAPS:
        pick_device(device_map)  # raises for a device that is not there
    place = pick_device(device)
    kind = pick_dtype("auto" if dtype in SMALL else dtype, place, SMALL)
    weights = {"dtype": kind, "device_map": device_map}
    if source.file is None:
        model, tokenizer = _read(f"{name} was found at", source.folder, LOCAL, weights)
    else:
        model, tokenizer = _read_converted(source.folder / source.file, kind, weights)
    model = model.eval() if device_map is not None else model.to(place).eval()
    if adapter is not None:
        model = with_adapter(model, adapter)
    if dtype in SMALL:
        model = quantized(model, str(dtype))
    return model, tokenizer


def _read_converted(
    file: Path, dtype: torch.dtype | str, weights: Mapping[str, object]
) -> tuple[PreTrainedModel, Tokenizer]:
    """Return what a GGUF file was converted to; convert it if that is not there, or damaged."""
    folder, damage = converted_folder(file, dtype), None
    if folder.is_dir():
        try:
            checks.check_tokenizer(ResolvedModel(str(file), folder, ModelOrigin.CACHE))
            return _read(f"{file} was converted to", folder, LOCAL, weights)
        except ModelError as error:
            damage = error
    model, tokenizer = read_gguf(file, weights)
    if damage is not None:  # the file itself can be read with these arguments
        discard(folder, damage)
    keep_converted(file, folder, model, tokenizer)
    return model, tokenizer


def read_gguf(file: Path, weights: Mapping[str, object]) -> tuple[PreTrainedModel, Tokenizer]:
    """Return model and tokenizer of a GGUF file, by arguments of transformers for the weights.

    Raises:
        ModelError: The file is damaged, or of an unknown architecture.
        UnsupportedModelError: Its positions are scaled in a way that is not read.
    """
    from transformers import GgufConfig

    weights = {**weights, "quantization_config": GgufConfig(dequantize=True)}
    files = {**LOCAL, "gguf_file": file.name}
    return _read(f"{file.name} is there in", file.parent, files, weights)


def _read(
    story: str, folder: Path, files: Mapping[str, object], weights: Mapping[str, object]
) -> tuple[PreTrainedModel, Tokenizer]:
    """Return model and tokenizer of a folder, by arguments of transformers for files and weights.

    Args:
        story: Stands before the folder in the messages of errors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    where = f"{story} {folder}"
    try:
        with ExitStack() as stack:
            if logging.is_progress_bar_enabled():  # it only takes a second or two
                logging.disable_progress_bar()
                stack.callback(logging.enable_progress_bar)
            check_config(config := AutoConfig.from_pretrained(folder, **files))
            if "gguf_file" in files:
                config = complete_config(config, folder / str(files["gguf_file"]))
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, output_loading_info=True, **files, **weights
            )
    except Exception as error:  # damaged files may raise any
        if isinstance(error, UnsupportedModelError) or out_of_memory(error):
            raise
        kind = "GGUF" if "gguf_file" in files else "a causal language model"
        raise ModelError(
            f"{where} but transformers cannot load it as {kind} ({_reason(error)}). Expected what "
            "save_pretrained writes, or a whole GGUF file, of an architecture that transformers "
            "has. Copy it again, or name another model."
        ) from error
    tokenizer = read_tokenizer(where, folder, files)
    if "gguf_file" in files:
        complete_model(model, tokenizer, folder / str(files["gguf_file"]))
    if missing := ", ".join(sorted(info["missing_keys"])[:3]):  # they would be random ones
        raise ModelError(f"{where} but lacks the weights {missing}. Copy it again.")
    return model, tokenizer


def read_tokenizer(where: str, folder: Path, files: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer of a folder, None if it has none; see `_read`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **files)
        if "gguf_file" in files:
            complete_tokenizer(tokenizer, folder / str(files["gguf_file"]))
        return tokenizer
    except UnsupportedModelError:
        raise
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        if any((folder / file).exists() for file in checks.TOKENIZERS) or "gguf_file" in files:
            raise ModelError(
                f"{where} but transformers cannot load its tokenizer ({_reason(error)}). Expected "
                "the files that save_pretrained writes; copy them again."
            ) from error
        return None


def _reason(error: Exception) -> str:
    """Return why transformers cannot load a model, in words that are true here."""
    text = f"{type(error).__name__}: {error}"
    return next((meaning for word, meaning in _MEANINGS.items() if word in text), text)
