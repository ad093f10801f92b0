"""Checks of models, adapters and devices by files and names, before torch and again at loading."""

import json
import os
import re
from collections.abc import Iterable
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ragspec.errors import (
    InputError,
    MissingExtraError,
    MissingModelError,
    ModelError,
    UnsupportedModelError,
)
from ragspec.models.resolve import PUBLISHED, ResolvedModel, missing_files, resolve_model
from ragspec.registry import expect_known

DTYPES = MappingProxyType(
    {name: name for name in ("float64", "float32", "bfloat16", "float16")}
    | {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
)
MODES = ("auto", "off", "eager", "graph", "compile")
RUNTIMES = ("auto", "torch", "onnx")
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # accelerate's
DEVICE = re.compile(
    r"auto|(cpu|cuda|hip|hpu|ipu|lazy|maia|meta|mps|mtia|privateuseone|ve|vulkan|xla|xpu)(:\d+)?"
)
CUDA = re.compile(r"cuda(:\d+)?")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLED = ("pytorch_model.bin", "model.pt", "medusa_lm_head.pt", "hydra_lm_head.pt")
HEADS = (WEIGHTS, INDEX, "medusa_lm_head.safetensors", *PICKLED)


def is_for_cpu() -> bool:
    """Return whether the installed torch was made for CPUs alone."""
    return version("torch").endswith("+cpu")


def check_device(device: str) -> None:
    """Raise InputError for a device that torch does not know, or was not made for."""
    if not DEVICE.fullmatch(device) and not (device and entry_points(group="torch.backends")):
        raise InputError(
            f"device {device!r} is unknown to torch; expected 'auto', 'cpu' or one like 'cuda:0'"
        )
    if CUDA.fullmatch(device) and is_for_cpu():
        raise InputError(
            f"device {device!r} cannot be used on this machine: its torch is for CPUs. Use 'cpu'."
        )


def check_place(device: object, device_map: object = None) -> None:
    """Raise InputError for an unknown device or device map by name, or for both together."""
    if device_map is not None and device != "auto":
        raise InputError(
            f"got a device ({device}) and a device map ({device_map}); expected one of them."
        )
    for name in (device, None if device_map in MAPS else device_map):
        if isinstance(name, str):  # a device is a valid map, too
            check_device(name)


def check_dtype(dtype: str, others: Iterable[str] = ()) -> None:
    """Raise InputError for an unknown dtype; `others` are names that the caller also takes."""
    choices = {*DTYPES, *others}
    if dtype not in {"auto", *choices}:
        raise InputError(
            f"dtype {dtype!r} is unknown; expected 'auto' or one of {', '.join(sorted(choices))}"
        )


def check_static(static: str, device: object) -> None:
    """Raise InputError for an unknown mode of steps of fixed shape, or graphs without CUDA."""
    if static not in MODES:
        raise InputError(f"got static={static!r}; expected one of {', '.join(map(repr, MODES))}.")
    place = "cpu" if device == "auto" and is_for_cpu() else str(device)
    if static == "graph" and place != "auto" and not CUDA.fullmatch(place):
        raise InputError(
            f"got static='graph' for a model on {place}; expected one on a CUDA device, which "
            "alone captures graphs. Use static='auto', or 'compile'."
        )


def check_runtime(runtime: str, device: object, dtype: object, static: str) -> None:
    """Raise an error if a runtime, or the mode of steps, is unknown or does not fit the rest."""
    if runtime not in RUNTIMES:
        names = ", ".join(map(repr, RUNTIMES))
        raise InputError(f"got runtime={runtime!r}; expected one of {names}.")
    check_static(static, device)
    reason = ""
    if static not in ("auto", "off"):
        reason = f"static={static!r} runs steps of fixed shape in torch"
    elif str(device) not in ("auto", "cpu"):
        reason = f"it runs on the CPU, not on {device}"
    elif DTYPES.get(str(dtype), "float32") != "float32":
        reason = f"its dtype is {dtype}, not float32, int8 or int4"
    if runtime == "onnx" and reason:
        raise UnsupportedModelError(
            f"ONNX Runtime cannot run the model: {reason}. Use runtime='auto'."
        )


def check_adapter(folder: Path) -> None:
    """Raise ModelError if a folder holds no adapter of peft, or a damaged one."""
    weights = [folder / name for name in ("adapter_model.safetensors", "adapter_model.bin")]
    if not ((folder / "adapter_config.json").is_file() and any(map(Path.is_file, weights))):
        raise MissingModelError(
            f"got no adapter in {folder}; expected a folder with adapter_config.json and "
            "adapter_model.safetensors, as peft's save_pretrained writes it."
        )
    read_config(folder / "adapter_config.json", "peft_type")
    check_tensors(weights[0])


def check_gguf(what: str | Path) -> None:
    """Raise MissingExtraError unless the package gguf is installed."""
    if find_spec("gguf") is None:
        raise MissingExtraError(
            f"{what} comes as GGUF and the package gguf is missing: pip install 'ragspec[gguf]'."
        )


def check_published(name: str) -> None:
    """Raise an error if a name is no published model's, or the package to convert it is missing."""
    expect_known("model to fetch", [name], PUBLISHED)
    check_gguf(name)


def check_language_model(source: ResolvedModel) -> None:
    """Raise ModelError if files are damaged, or show that they hold no causal language model."""
    if source.file is not None:
        check_gguf(source.folder / source.file)
        with (source.folder / source.file).open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(
                    f"{source.name} does not begin with GGUF; it may be damaged. Copy it again."
                )
        return
    if (source.folder / "modules.json").is_file() and not (source.folder / CONFIG).is_file():
        raise ModelError(
            f"{source.name} embeds text; expected a model that writes, such as starter."
        )
    if read_config(source.folder / CONFIG, "model_type").get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{source.name} is an encoder-decoder model; expected a decoder-only one. Use one that "
            "AutoModelForCausalLM loads and generates with."
        )
    if (settings := source.folder / "generation_config.json").is_file():
        read_config(settings)  # transformers would use defaults in its place
    if not any(source.folder.glob("pytorch_model*.bin")):  # transformers reads those safely
        check_weights(source.folder)


def check_head_vocabulary(size: int, most: int) -> None:
    """Raise InputError for a draft head's vocabulary that is empty or larger than the model's."""
    if not 1 <= size <= most:
        raise InputError(
            f"got a head's vocabulary of {size} tokens; expected 1 to {most}, the model's."
        )


def read_vocab_size(source: ResolvedModel) -> int | None:
    """Return the size of a model's vocabulary by its configuration; None if it has none."""
    config = read_config(source.folder / CONFIG, "model_type") if source.file is None else {}
    return (config | (config.get("text_config") or {})).get("vocab_size")


def check_tokenizer(source: ResolvedModel) -> None:
    """Raise ModelError if a folder of weights has no tokenizer beside them."""
    if source.file is None and not any((source.folder / each).exists() for each in TOKENIZERS):
        raise ModelError(
            f"{source.name} holds no tokenizer; expected tokenizer.json. Use its save_pretrained."
        )


def check_embedder(name: str | Path) -> ResolvedModel:
    """Return where an embedder is; raise ModelError if its files are damaged, or of no embedder.

    sentence-transformers would average the states of a causal model, of little use in a search.
    """
    source = resolve_model(name)
    if not (source.folder / "modules.json").is_file():
        kinds = read_config(source.folder / CONFIG, "model_type").get("architectures") or []
        if any(str(kind).endswith("ForCausalLM") for kind in kinds):
            raise ModelError(
                f"{name} is a causal language model ({kinds[0]}), expected a model that embeds "
                "text, with a modules.json beside its weights. Leave embedder out."
            )
    check_weights(source.folder)
    return source


def check_reranker(name: str | Path) -> ResolvedModel:
    """Return where a cross-encoder is; raise ModelError if its files are damaged, or of none.

    sentence-transformers would give another model a head of random weights.
    """
    source = resolve_model(name)
    kinds = read_config(source.folder / CONFIG, "model_type").get("architectures") or []
    heads = (str(kind).endswith("ForSequenceClassification") for kind in kinds)
    if not (source.folder / "modules.json").is_file() and not any(heads):
        raise ModelError(
            f"{name} is {', '.join(map(str, kinds)) or 'of an unknown kind'}; expected a "
            "cross-encoder, such as cross-encoder/ms-marco-MiniLM-L6-v2."
        )
    check_weights(source.folder)
    return source


def check_head_files(folder: Path) -> Path:
    """Return the file of a draft head's weights; raise ModelError without one, or a damaged one."""
    weights = next((folder / name for name in HEADS if (folder / name).is_file()), None)
    if not (folder / CONFIG).is_file() or weights is None:
        names = ", ".join(sorted(path.name for path in folder.glob("*.*"))[:4])
        raise MissingModelError(
            f"{folder} holds no draft head; expected {CONFIG} and one of {', '.join(HEADS)}, got "
            f"{names or 'no files'}. Use train-head; with a training.pt it can --resume."
        )
    check_tensors(weights)
    return weights


def check_weights(folder: Path) -> None:
    """Raise ModelError if a file of weights in safetensors is missing or damaged."""
    if missing := missing_files(folder):
        raise MissingModelError(
            f"{folder} lacks {', '.join(missing[:3])}; expected the folder of a model with all its "
            "weights, as save_pretrained writes it. Copy it again."
        )
    for path in folder.glob("*.safetensors"):
        check_tensors(path)


def check_tensors(path: Path) -> None:
    """Raise ModelError unless a file of safetensors is whole; others are not read."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".safetensors" and path.is_file():
            safe_open(path, "np")
    except (OSError, SafetensorError) as error:  # an unreadable one is "No such file" there
        reason, remedy = f"is damaged ({error})", "Copy it again"
        if not os.access(path, os.R_OK):
            reason, remedy = "cannot be read (Permission denied)", "Change its permissions"
        raise ModelError(f"{path} {reason}; expected a file of safetensors. {remedy}.") from error


def read_config(path: Path, name: str = "") -> dict[str, Any]:
    """Return the object in a JSON file; raise ModelError if it is damaged or lacks a value."""
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        there = isinstance(config, dict) and (not name or config.get(name))
        reason = "" if there else f"no {name or 'object'} in it"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error)
    if reason:
        raise ModelError(
            f"{path} cannot be used ({reason}); expected an object in JSON{name and ' with '}{name}"
            ", as save_pretrained writes it. Copy it again, or name another model."
        )
    return config
