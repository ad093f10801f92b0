"""Statistics of images: forwards, excess, acceptance maps, codes, labels."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ragspec.reports.generation import Generation, report_of
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.models.raster import Raster
from ragspec.visual.output import ImageStats, codes_of, samples_of, weakest

GRID = Raster(3, 3)


def stats_of(generations: list[Generation], seconds: float) -> ImageStats:
    seeds = tuple(each.report.seed or 0 for each in generations)
    return replace(ImageStats.of(samples_of(generations, GRID)), seconds=seconds, seeds=seeds)


def generation(*lengths: int, label: str = "exact", excess: Any = None) -> Generation:
    """Return an image of one code by the prefill and of so many codes by each step."""
    steps, token = [Step(DraftTree.empty(), (), (0,), {"prefill": 1.0})], 0
    for length in lengths:
        codes = tuple(range(token + 1, token + 1 + length))
        token += length
        tree = DraftTree.chain(list(codes), "model")
        inputs = () if excess is None else (excess,) * length
        steps.append(Step(tree, tuple(range(length - 1)), codes, excess=inputs))
    tokens = [code for step in steps for code in step.tokens]
    report = report_of(steps, tokens, 1.0, "length", label=label, seed=5)
    return Generation("", tokens, "length", label, report, [9], steps=steps)


def test_forwards_and_codes_a_forward() -> None:
    stats = stats_of([generation(3, 5), generation(4, 4)], 0.5)
    assert stats.forwards == 2 * 3 and stats.seeds == (5, 5)
    assert stats.codes_per_forward == 4.0
    assert stats.tv_excess == 0.0 and stats.excess.shape == (2, 3, 3)
    assert stats.summary() == "2 images, 6 forward passes, 4.00 codes a pass, 0.50 s"


def test_excess_is_a_mean_over_all_positions_or_unknown() -> None:
    one = generation(4, 4, label="approximate", excess=0.25)
    one.steps[0] = Step(one.steps[0].tree, (), (0,), excess=(0.0,))
    stats = stats_of([one], 0.5)
    assert stats.tv_excess == pytest.approx(8 * 0.25 / 9)
    assert "tv_excess 0.2222" in stats.summary()
    unknown = stats_of([generation(4, 4, label="approximate")], 0.5)
    assert unknown.tv_excess is None and math.isnan(unknown.excess[0, 0, 0])


def test_the_acceptance_map_has_the_codes_of_each_forward() -> None:
    (sample,) = samples_of([generation(3, 5)], Raster(3, 2, ends=1))
    assert sample.map.tolist() == [[1, 3], [3, 5], [5, 5]]


def test_an_unfinished_image_repeats_its_last_code() -> None:
    result = [codes_of(each.tokens, GRID) for each in (generation(3, 5), generation(2))]
    assert result[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert result[1].tolist() == [[0, 1, 2], [2, 2, 2], [2, 2, 2]]


def test_the_weakest_label_holds_for_all() -> None:
    assert weakest(["exact", "exact"]) == "exact"
    assert weakest(["exact", "bounded(tv<=0.1)", "exact-for(distribution)"]) == "bounded(tv<=0.1)"
    assert weakest(["approximate", "bounded(tv<=0.1)"]) == "approximate"
