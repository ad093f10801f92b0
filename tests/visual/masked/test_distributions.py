"""Images of a masked model under rules have its distribution, by Kolmogorov-Smirnov tests."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ragspec.visual.latents.rules import Aligned, Horizon, Path
from ragspec.visual.masked.target import MaskedTarget
from tests.support.latent_distributions import differs
from tests.support.masked_distributions import OTHER_SEEDS, accepted, plain, sampled
from tests.visual.latents.rules.test_distributions import OTHER, SAME, Mirrored, SharedNoise

SAMPLES = 240


@pytest.fixture(scope="module")
def selection() -> torch.Tensor:
    return plain(6 * SAMPLES, OTHER_SEEDS - OTHER_SEEDS % 3).flatten(1)


@pytest.mark.parametrize(
    ("rule", "drafts", "inputs"),
    [
        (Aligned(), "jacobi", {}),
        (Aligned(), "model", {"spread": 1.5}),  # unequal deviations: rejections take tries
        (Horizon(2), "jacobi", {}),
        (Path(), "jacobi", {}),
        (Path(), "model", {"difference": 0.1}),
    ],
    ids=["aligned", "aligned-unequal", "horizon", "path", "path-model"],
)
def test_pictures_follow_the_targets_distribution(
    rule: Any, drafts: str, inputs: dict[str, Any], selection: torch.Tensor
) -> None:
    result, generations = sampled(rule, drafts, SAMPLES, **inputs)
    assert differs(result.flatten(1), selection) > SAME
    assert 0.1 < accepted(generations) < 0.99 and generations[0].label == "exact-for(distribution)"


class TwiceUsed(SharedNoise, MaskedTarget): ...


class Unmasked(MaskedTarget):
    """A mutant: all prefixes of a forward are as long as the longest."""

    def read(self, pictures: Sequence[int], known: Sequence[Sequence[int]]) -> torch.Tensor:
        longest = {picture: each for picture, each in zip(pictures, known, strict=True)}
        return super().read(pictures, [longest[picture] for picture in pictures])


@pytest.mark.parametrize(
    ("rule", "drafts", "inputs"),
    [
        (Mirrored(), "model", {"spread": 2.0}),  # more mutants of rules: those of latents in a row
        (Aligned(), None, {"built_by": TwiceUsed}),
        (Aligned(), "jacobi", {"built_by": Unmasked}),
    ],
    ids=["mirrored", "twice", "unmasked"],
)
def test_targets_and_rules_that_change_the_distribution_are_detected(
    rule: Any, drafts: str | None, inputs: dict[str, Any], selection: torch.Tensor
) -> None:
    result, _ = sampled(rule, drafts, SAMPLES, **inputs)
    assert differs(result.flatten(1), selection) < OTHER
