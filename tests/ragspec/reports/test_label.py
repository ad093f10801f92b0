"""What a label says of the numbers in which a text was decoded."""

from __future__ import annotations

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.reports.report import kind_of_label, label_of, rounds
from tests.support import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "rounded"),
    [
        (torch.float64, False),
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float16, True),
    ],
)
def test_numbers_below_float32_round(dtype: torch.dtype, rounded: bool) -> None:
    assert rounds(dtype, CPU) is rounded


def test_fast_float32_rounds_too() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert rounds(torch.float32, CPU)
        assert not rounds(torch.float64, CPU)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("rule", "label", "kind"),
    [
        ("exact", "exact up to rounding", "exact up to rounding"),
        (
            "exact-for(distribution)",
            "exact-for(distribution) up to rounding",
            "exact-for up to rounding",
        ),
        ("bounded(tv<=0.5)", "bounded(tv<=0.5)", "bounded"),
        ("approximate", "approximate", "approximate"),
    ],
)
def test_only_what_claims_exactness_is_weakened(rule: str, label: str, kind: str) -> None:
    assert label_of(rule, rounded=True) == label
    assert label_of(rule, rounded=False) == rule
    assert kind_of_label(label) == kind


@pytest.mark.parametrize("drafter", ["context", None])
def test_a_text_in_bfloat16_says_so_and_plain_decoding_is_what_it_is(
    drafter: str | None,
) -> None:
    engine = Engine(tiny.model("llama", dtype=torch.bfloat16), drafter=drafter, budget=4)
    result = engine.generate([5, 6, 7, 5, 6], max_new_tokens=8, ignore_eos=True)
    assert result.label == result.report.label
    assert result.label == ("exact" if drafter is None else "exact up to rounding")
