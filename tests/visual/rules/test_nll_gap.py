"""The NLL gap is 0 on average under the target's distribution, and positive under relaxed rules."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.rules.walk import Walk
from ragspec.visual import ImagePipeline
from ragspec.visual.rules.tv_budget import Surprising, nll_gap_of
from tests.support import tiny_images


def test_the_mean_gap_of_a_distribution_is_0() -> None:
    sample = torch.Generator().manual_seed(0)
    for size in (1, 2, 30):
        distribution = torch.randn(size, generator=sample, dtype=torch.float64).mul(2.0).softmax(0)
        result = nll_gap_of(distribution.expand(size, -1), list(range(size)))
        mean = float(distribution @ torch.tensor(result, dtype=torch.float64))
        assert mean == pytest.approx(0.0, abs=1e-12)
        entropy = -float((distribution * distribution.log()).sum())
        for code, value in enumerate(result):
            assert value == pytest.approx(-float(distribution[code].log()) - entropy)


def test_unlikely_codes_in_place_of_likely_ones_raise_the_gap() -> None:
    distribution = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    relaxed = torch.tensor([0.0, 0.2, 0.8], dtype=torch.float64)  # code 2 stands for code 0
    values = torch.tensor(nll_gap_of(distribution.expand(3, -1), [0, 1, 2]), dtype=torch.float64)
    assert float(relaxed @ values) > 1.0
    excluded = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    assert 0.0 < nll_gap_of(excluded, [1])[0] < 30.0  # finite for an excluded code
    assert nll_gap_of(excluded, [0]) == (0.0,)


def test_the_measuring_rule_has_the_name_and_label_of_the_rule() -> None:
    rule = Surprising(Walk())
    assert (rule.name, rule.label, rule.accepts) == ("walk", "exact", Walk.accepts)


def stats(folder: Path, drafter: Any, rule: str, images: int, **settings: Any) -> Any:
    pipe = ImagePipeline.from_pretrained(folder, drafter, rule, budget=4, **settings)
    return pipe(class_labels=[1], num_images_per_prompt=images, seed=1).stats


@pytest.mark.parametrize(
    ("drafter", "rule", "images"), [(None, "exact", 300), ("model", "rejection", 150)]
)
def test_exact_rules_have_no_gap(folder: Path, drafter: Any, rule: str, images: int) -> None:
    result = stats(folder, drafter, rule, images)
    assert len(result.nll_gaps) == images * tiny_images.SIDE**2
    assert abs(result.nll_gap) < 3.0 * result.nll_gap_error < 0.15


@pytest.mark.parametrize("drafter", ["model", "jacobi"])
def test_drafts_change_no_gap(folder: Path, drafter: str) -> None:
    plain, drafted = (stats(folder, each, "exact", 20).nll_gaps for each in (None, drafter))
    assert drafted == pytest.approx(plain, abs=1e-4)


def test_relaxed_rules_have_a_gap_in_the_summary(folder: Path) -> None:
    result = stats(folder, "model", "lantern", 60, neighbours=23, delta=0.9)
    assert result.nll_gap > 4.0 * result.nll_gap_error
    assert f"NLL gap {result.nll_gap:+.3f}" in result.summary()
