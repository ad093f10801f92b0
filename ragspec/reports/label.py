"""What a text is worth beside the one that plain decoding gives: the label, worked out from parts.

A rule says `exact` of the law and the noise. Numbers below float32 add what arithmetic does: a
forward over several positions rounds otherwise than one over a single position, so two choices that
are nearly equal may change places (measured on a model of 135 M in bfloat16: 7 of 16 texts part, at
margins of 0 to 0.125 logits; none in float32).
"""

from __future__ import annotations

import torch

ROUNDED = " up to rounding"


def rounds(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether forwards of several widths round visibly: below float32, or its fast forms."""
    if torch.finfo(dtype).bits < 32:
        return True
    fast = torch.get_float32_matmul_precision() != "highest"  # TensorFloat-32 and bfloat16 passes
    return dtype is torch.float32 and (fast or _fast_on(device))


def _fast_on(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta") and bool(torch.backends.cuda.matmul.allow_tf32)


def label_of(rule: str, rounded: bool) -> str:
    """Return a rule's label as it holds in these numbers: "exact", or "exact up to rounding"."""
    return rule + ROUNDED if rounded and rule.startswith("exact") else rule


def label_under(rule: str, distribution: str | None) -> str:
    """Return a rule's label over the law of that name, None for the target's own."""
    return f"exact-for({distribution})" if distribution is not None and rule == "exact" else rule


def kind_of_label(label: str) -> str:
    """Return the label without its law or bound: "exact", "exact up to rounding", "bounded", .."""
    return label.partition("(")[0] + (ROUNDED if "(" in label and label.endswith(ROUNDED) else "")
