"""What a store was made with: fingerprints of a tokenizer and a model, and their check.

Those of the models' folder are of files; these are of loaded objects, wherever they came from. A
table or pool of one model's outputs drafts badly for another, and token ids mean nothing to
another tokenizer. Drafters over such stores have `fits(model, tokenizer)`, which whoever knows both
calls before the first request (`ragspec.drafters.build.check_fits`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ragspec.errors import StoreError

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


def prints_of(model: Any = None, tokenizer: Any = None) -> dict[str, str]:
    """Return the fingerprints of what is given: a model (or its fingerprint) and a tokenizer."""
    prints = {}
    if model is not None:
        prints["model"] = model if isinstance(model, str) else model_fingerprint(model)
    if tokenizer is not None:
        prints["tokenizer"] = tokenizer_fingerprint(tokenizer)
    return prints


def check_prints(what: str, result: Mapping[str, str | None], expected: Mapping[str, str]) -> None:
    """Raise StoreError where a store names another model or tokenizer than the expected one.

    A store that names none, such as a corpus of nobody's outputs, fits all.
    """
    for name, value in expected.items():
        known = result.get(name)
        if known and not same_print(known, value):
            raise StoreError(
                f"{what} was made with another {name} (fingerprint {known[:12]}, expected "
                f"{value[:12]}); make it again with this {name}, or leave it out."
            )
