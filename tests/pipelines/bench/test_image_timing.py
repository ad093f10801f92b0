"""The measuring of ways: turns, seeds, batches, and what is counted."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.pipelines.bench.image_timing import Drawing, Timed, judge_ways, time_ways
from ragspec.pipelines.bench.image_ways import parse_way, parse_ways

DRAWING = Drawing([10, 11, 12], True, 2.0, 1.0, 0, 40)


class FakePipe:
    """Notes what it is asked for; its images are noise of their seeds."""

    def __init__(
        self, name: str, log: list[tuple[str, list[int], list[int]]], shift: int = 0
    ) -> None:
        self.name, self.log, self.shift = name, log, shift

    def __call__(self, class_labels: list[int], generator: list[Any], **more: Any) -> Any:
        seeds = [each.initial_seed() for each in generator]
        self.log.append((self.name, class_labels, seeds))
        pictures = np.stack([np.random.default_rng(s).random((8, 8, 3)) for s in seeds])
        report = SimpleNamespace(budget_sizes={4: 3, 8: 1})
        return SimpleNamespace(
            codes=torch.tensor(seeds) + self.shift,
            images=np.clip(pictures + 0.2 * self.shift, 0, 1),
            label="exact" if not self.shift else "approximate",
            stats=SimpleNamespace(
                seconds=1.0,
                forwards=9,
                codes_per_forward=2.0,
                tv_excess=0.5,
                reports=[report],
                surprises=np.full(2, 0.25),
            ),
        )


def pipes(log: list[tuple[str, list[int], list[int]]]) -> dict[Any, Any]:
    ways = parse_ways(["exact", "gsd", "draft-only"])
    return {way: FakePipe(way.name, log, shift=int(way.name == "gsd")) for way in ways}


def test_every_image_is_drawn_in_all_ways_and_in_turns() -> None:
    log: list[tuple[str, list[int], list[int]]] = []
    found = time_ways(pipes(log), DRAWING, 3, lambda line: None)
    timed = log[4 * 3 :]  # after warming up
    assert [entry[0] for entry in timed[:4]] == ["plain", "exact", "gsd", "draft-only"]
    assert timed[4][0] == "exact" and timed[8][0] == "gsd"
    for number in range(3):
        asked = timed[4 * number : 4 * number + 4]
        assert {(tuple(labels), tuple(seeds)) for _, labels, seeds in asked} == {
            ((10 + number,), (40 + number,))
        }
    by_name = {way.name: each for way, each in found.items()}
    assert by_name["exact"].equal == [True] * 3 and by_name["gsd"].equal == [False] * 3
    assert by_name["exact"].forwards == [9] * 3 and by_name["draft-only"].forwards == [0] * 3
    assert by_name["draft-only"].label == "approximate"
    assert by_name["draft-only"].excess == [None] * 3
    assert [each.tolist() for each in by_name["exact"].surprises] == [[0.25, 0.25]] * 3
    assert not by_name["draft-only"].surprises  # the target does nothing there
    assert by_name["exact"].usual_size == 5


def test_the_usual_size_is_a_mean_over_steps() -> None:
    assert Timed(sizes=Counter({0: 1, 6: 2})).usual_size == 4
    assert Timed().usual_size == 0


class FakeNet:
    def features(self, pictures: Any) -> Any:
        return pictures.reshape(len(pictures), -1)[:, :64].astype(np.float64)


def test_quality_batches_have_seeds_of_their_own_and_the_same_subjects() -> None:
    log: list[tuple[str, list[int], list[int]]] = []
    told: list[Any] = []

    def net(pictures: Any, labels: Any) -> Any:
        told.append((pictures.shape, pictures.dtype, labels))
        return FakeNet()

    quality = judge_ways(pipes(log), DRAWING, 60, 5, net, lambda line: None)
    assert [entry[0] for entry in log] == ["plain"] * 5 + ["exact", "gsd", "draft-only"]
    seeds = [set(entry[2]) for entry in log]
    for one in range(6):
        assert not any(seeds[one] & seeds[two] for two in range(one))
    assert seeds[5] == seeds[6] == seeds[7]  # ways are compared on the same images
    assert all(entry[1] == [10, 11, 12] * 20 for entry in log)
    shape, kind, labels = told[0]
    assert shape == (300, 8, 8, 3) and kind == np.uint8
    assert labels.tolist() == [0, 1, 2] * 100
    assert len(quality.batches) == 5 and quality.images == 60
    assert quality.distances["exact"].value < 2 * quality.null.high
    assert quality.distances["gsd"].value > quality.null.high
    assert quality.excess["exact"] == 0.5


def test_distances_are_told_without_the_chance_of_a_mixture_of_subjects() -> None:
    """One subject's images are bright: how many are drawn is no matter of chance."""

    class TwoKinds(FakePipe):
        def __call__(self, class_labels: list[int], generator: list[Any], **more: Any) -> Any:
            made = super().__call__(class_labels, generator, **more)
            bright = np.array(class_labels) == 10
            made.images = 0.1 * made.images + 0.8 * bright[:, None, None, None]
            return made

    ways = parse_ways(["exact"])
    two: Any = {way: TwoKinds(way.name, []) for way in ways}
    net: Any = FakeNet()
    quality = judge_ways(two, DRAWING, 60, 5, lambda *given: net, lambda line: None)
    found = quality.distances["exact"]
    assert max(quality.null.high, found.high - found.low) < 0.1


@pytest.mark.parametrize(("by_class", "name"), [(True, "class_labels"), (False, "prompt")])
def test_subjects_go_round(by_class: bool, name: str) -> None:
    drawing = Drawing(["a", "b"], by_class, 1.5, 0.9, 7, 3)
    found = drawing.arguments([0, 1, 2])
    assert found[name] == ["a", "b", "a"]
    assert [each.initial_seed() for each in found["generator"]] == [3, 4, 5]
    assert (found["guidance_scale"], found["temperature"], found["top_k"]) == (1.5, 0.9, 7)


def test_ways_are_found_by_name() -> None:
    assert parse_way("exact") in pipes([])
