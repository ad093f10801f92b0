"""Fingerprints of the tokenizer and the model that a store was made with, and their check.

Those of the models' folder are of files; these are of loaded objects, wherever they came from. A
store of one model's outputs drafts badly for another, and token ids mean nothing to another
tokenizer. Drafters over such stores have `fits(model, tokenizer)`, which is called before the first
request (`Drafter.fits`).
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ragspec.errors import InputError, StoreError
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine

SAMPLED = 64
# Fields of a configuration that change no logits, or only their rounding.
NEUTRAL = re.compile(r"(_|output_|return_).*|.*(dtype|version|token_id)|architectures|use_cache")


def tokenizer_fingerprint(tokenizer: "Tokenizer") -> str:
    """Return the SHA-256 of the part of a tokenizer that turns text into ids and back.

    Chat templates, padding and truncation do not count.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        content = json.loads(backend.to_str())
        for passing in ("padding", "truncation"):
            content.pop(passing, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def model_fingerprint(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's shapes and of 64 values of every weight and saved buffer.

    For `same_print` a checkpoint loaded in another dtype, or on another device, is the same model;
    a fine-tuned copy is not. Values are rounded to bfloat16, once directly and once through
    float16. If these differ, both hashes are returned, joined by "+". Only loads in float16 and in
    bfloat16 of one float32 checkpoint share neither, and count as two models.
    """
    direct, halved = hashlib.sha256(), hashlib.sha256()
    saved = model.state_dict().keys()  # quantized weights are buffers
    buffers = (pair for pair in model.named_buffers() if pair[0] in saved)
    for name, weight in sorted([*model.named_parameters(), *buffers], key=lambda pair: pair[0]):
        flat = weight.detach().reshape(-1)
        count = max(1, min(SAMPLED, flat.numel()))
        places = torch.arange(count)[: flat.numel()] * flat.numel() // count
        values = flat[places.to(flat.device)].cpu()
        for digest, read in ((direct, values), (halved, values.to(torch.float16))):
            rounded = read.to(torch.bfloat16).tolist()
            digest.update(f"{name} {tuple(weight.shape)} {rounded}".encode())
    for name, layer in model.named_modules():
        if hasattr(layer, "merged_adapters"):  # of peft, whose weights tell all adapters
            used = not layer.disable_adapters and sorted(layer.active_adapters)
            for digest in (direct, halved):
                digest.update(f"{name} {used} {sorted(layer.merged_adapters)}".encode())
    return "+".join(dict.fromkeys((direct.hexdigest(), halved.hexdigest())))


def same_print(one: str | None, other: str | None) -> bool:
    """Tell whether two fingerprints are of the same thing, which is to share one of their parts."""
    if one is None or other is None:
        return one is other
    return not {*one.split("+")}.isdisjoint(other.split("+"))


def prints_of(model: object, tokenizer: "Tokenizer | None") -> dict[str, str]:
    """Return the fingerprints of a model, or of an engine's, and of a tokenizer, without None."""
    prints = {}
    if isinstance(model, str):
        prints["model"] = model
    elif model is not None:
        loaded: Any = model if hasattr(model, "named_parameters") else getattr(model, "model", None)
        if loaded is None:
            raise InputError(f"got {model!r} as the model; expected a model, an Engine, or None.")
        prints["model"] = model_fingerprint(loaded)
    if tokenizer is not None:
        prints["tokenizer"] = tokenizer_fingerprint(tokenizer)
    return prints


def prints_of_engine(engine: "Engine") -> dict[str, str]:
    """Return the fingerprints on which states depend: also that of the model's configuration."""
    fields = json.loads(
        engine.model.config.to_json_string(use_diff=False),
        object_pairs_hook=lambda pairs: sorted(p for p in pairs if not NEUTRAL.fullmatch(p[0])),
    )
    config = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return prints_of(engine.model, engine.tokenizer) | {"config": config}


def check_prints(what: str, prints: Mapping[str, str | None], expected: Mapping[str, str]) -> None:
    """Raise StoreError if a store was made with another model or tokenizer than the expected one.

    A store without a fingerprint fits all, but one of states needs that of a configuration.
    """
    for name, value in expected.items():
        mark = prints.get(name) or ("none" if name == "config" else None)
        if mark and not same_print(mark, value):
            raise StoreError(
                f"{what} was made with another {name} (fingerprint {mark[:12]}, expected "
                f"{value[:12]}); make it again with this {name}, or leave it out."
            )
