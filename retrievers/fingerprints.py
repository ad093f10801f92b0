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
    """Return a SHA-256 of a model's shapes and of 64 values of every weight.

    Values are rounded to bfloat16, so that one checkpoint loaded in another dtype, or on another
    device, stays the same model; a fine-tuned copy of it does not.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        count = max(1, min(SAMPLED, flat.numel()))
        places = torch.arange(count)[: flat.numel()] * flat.numel() // count
        values = flat[places.to(flat.device)].to(torch.bfloat16).float().cpu()
        digest.update(f"{name} {tuple(weight.shape)} {values.tolist()}".encode())
    return digest.hexdigest()


def _digest(known: Any) -> str:
    text = json.dumps(known, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
