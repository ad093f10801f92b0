"""CSpD's own criteria: what they keep, and how far from the target's law that is."""

from __future__ import annotations

import pytest

from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.latents.rules.cspd import Aligned, CspdPaper, log_factor
from tests.support.latent_distributions import Pair, differs, emitted, pair, plain, view_of

SAMPLES = 600


def sampled(inputs: Pair, indices: list[int], seed: int = 0) -> list[int]:
    """Return the numbers of drafts for these indices."""
    noise = inputs.target.noise(NoiseStream(seed), indices)
    return list(inputs.draft.add(inputs.q.expand(len(indices), -1), noise, indices))


def test_the_papers_factor_is_that_of_the_earlier_deviations() -> None:
    inputs = pair("linear", "model", spread=1.2)
    numbers, view = sampled(inputs, [0]), view_of(inputs.target, inputs.p, DraftTree.empty(), 0)
    factor = log_factor(inputs.target.table, numbers[0], view.token(-1))
    wide, narrow = inputs.draft.sampler.deviations[1:], inputs.target.sampler.deviations[1:]
    assert factor == pytest.approx(4 * float((wide / narrow).log().sum())) and factor > 0.0


def test_with_shared_deviations_the_paper_keeps_the_distribution_and_what_aligned_keeps() -> None:
    inputs = pair("linear", "model")
    result, accepted = emitted(CspdPaper(), inputs, SAMPLES)
    assert differs(result, plain(inputs.target, inputs.p, 4 * SAMPLES)) > 1e-4
    assert accepted == emitted(Aligned(), inputs, SAMPLES)[1]


def test_its_pictures_are_called_approximate() -> None:
    assert CspdPaper().label == "approximate"
