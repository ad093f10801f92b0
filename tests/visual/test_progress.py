"""The progress of a run: codes counted, one call after each pass."""

from __future__ import annotations

from typing import Any

import torch

from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.models.raster import Raster
from ragspec.visual.progress import Progress


class Bar:
    done = 0

    def update(self, count: int) -> None:
        self.done += count


def step(*tokens: int) -> Step:
    return Step(DraftTree.empty(), (), tokens)


def test_a_pass_ends_when_an_image_comes_again_or_the_batch_is_another() -> None:
    bar, message = Bar(), []

    def callback(pipeline: Any, number: int, least: int, kwargs: dict[str, torch.Tensor]) -> None:
        message.append((pipeline, number, least, kwargs["codes"].tolist()))

    progress = Progress("pipe", bar, 3, Raster(1, 3), side_by_side=2, callback=callback)
    for row, tokens in ((0, (1,)), (1, (2, 3)), (0, (4, 5)), (1, (6,)), (2, (7, 8, 9))):
        progress.step(row, step(*tokens))
    progress.finish()
    assert bar.done == 9
    assert [each[1:3] for each in message] == [(0, 1), (1, 3), (2, 3)]
    assert message[0][3] == [[1, -1, -1], [2, 3, -1], [-1, -1, -1]]
    assert message[2][3] == [[1, 4, 5], [2, 3, 6], [7, 8, 9]]
    assert {each[0] for each in message} == {"pipe"}


def test_nothing_is_reported_for_a_run_without_steps_or_without_a_callback() -> None:
    message: list[Any] = []
    Progress(None, Bar(), 1, Raster(1, 3), callback=message.append).finish()
    assert message == []
    bar = Bar()
    silent = Progress(None, bar, 1, Raster(1, 3))
    silent.step(0, step(1, 2))
    silent.finish()
    assert bar.done == 2
