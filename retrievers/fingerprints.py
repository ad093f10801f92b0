"""Fingerprints of a tokenizer and of a model that are loaded: what a store was made with.

Those of `ragspec.models` are of files; these are of the objects, wherever they came from.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

SAMPLED = 64


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Return the SHA-256 of what turns text into ids and back.

    Chat templates and the padding or truncation that a call left behind do not count.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        known: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        known = json.loads(backend.to_str())
        for passing in ("padding", "truncation"):
            known.pop(passing, None)
    return _digest(known)


def model_fingerprint(model: Any) -> str:
    """Return what a model is told by: SHA-256 of its shapes and of 64 values of every weight.

    One checkpoint loaded in another dtype, or on another device, stays the same model for
    `same_print`; a fine-tuned copy of it does not. Values are rounded to bfloat16, once as they are
    and once by way of float16: where that differs both are given, joined by "+". Only loads in
    float16 and in bfloat16 of one float32 checkpoint share neither, and are two models.
    """
    direct, halved = hashlib.sha256(), hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        count = max(1, min(SAMPLED, flat.numel()))
        places = torch.arange(count)[: flat.numel()] * flat.numel() // count
        values = flat[places.to(flat.device)].cpu()
        for digest, read in ((direct, values), (halved, values.to(torch.float16))):
            known = read.to(torch.bfloat16).tolist()
            digest.update(f"{name} {tuple(weight.shape)} {known}".encode())
    return "+".join(dict.fromkeys((direct.hexdigest(), halved.hexdigest())))


def same_print(one: str | None, other: str | None) -> bool:
    """Say whether two fingerprints are of the same thing: whether they share one of their parts."""
    if one is None or other is None:
        return one is other
    return not {*one.split("+")}.isdisjoint(other.split("+"))


def _digest(known: Any) -> str:
    text = json.dumps(known, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
