"""A seed fixes a picture under every rule, whatever is drawn beside it and was drawn before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.visual import ImagePipeline

RELAXED = {"neighbours": 20, "delta": 0.6}
SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "least gain": ("model", {"rule": "lantern", "least_gain": 0.4, **RELAXED}),
    "variation": ("model", {"rule": "lantern", "tv_budget": 1.0, **RELAXED}),
    "mixed": (["jacobi", "model"], {"rule": "lantern", **RELAXED}),
    "mixed, least gain": (["jacobi", "model"], {"rule": "lantern", "least_gain": 0.4, **RELAXED}),
    "gsd": ("jacobi", {"rule": "gsd"}),
    "rejection": ("model", {"rule": "rejection"}),
}


def opened(folder: Path, drafter: Any, **settings: Any) -> Any:
    return ImagePipeline.from_pretrained(folder, drafter, dtype=torch.float64, **settings)


def sampled(pipe: Any, seeds: list[int], label: int = 1) -> list[list[int]]:
    codes: torch.Tensor = pipe(class_labels=[label] * len(seeds), seed=seeds).codes
    return codes.flatten(1).tolist()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_seed_fixes_a_picture(folder: Path, name: str) -> None:
    drafter, settings = SETTINGS[name]
    pipe = opened(folder, drafter, **{"budget": 3, **settings})
    seeds = list(range(6))
    first = sampled(pipe, seeds)
    assert sampled(pipe, seeds) == first  # after all of it was used
    assert sampled(pipe, seeds[::-1]) == first[::-1]
    for seed in seeds[:2]:  # alone, in a pipeline that has drawn nothing yet
        assert sampled(opened(folder, drafter, **{"budget": 3, **settings}), [seed]) == [
            first[seed]
        ]
    plain = opened(folder, None)
    assert (sampled(plain, seeds) != first) or name == "gsd"  # the rule does relax


def test_a_budget_that_goes_by_the_clock_says_so(folder: Path) -> None:
    for budget, rule, repeats in (
        (3, "lantern", True),
        ("auto", "lantern", False),
        ("auto", "exact", True),
    ):
        settings = RELAXED if rule == "lantern" else {}
        pipe = opened(folder, "model", rule=rule, budget=budget, **settings)
        stats = pipe(class_labels=[1], seed=1).stats
        assert stats.repeatable is repeats
        assert ("not repeatable" in stats.summary()) is not repeats
