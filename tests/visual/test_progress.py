"""The progress of a run: codes counted, one call after each pass."""

from types import SimpleNamespace
from typing import Any

import torch

from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.call import ImageCall
from ragspec.visual.models.raster import Raster
from ragspec.visual.run import CallState, Progress


class Bar:
    done = 0

    def update(self, count: int) -> None:
        self.done += count


def run(bar: Bar, images: int, callback: Any = None) -> Progress:
    family = SimpleNamespace(step_tensor=lambda target: ("codes", torch.clone))
    pipe, call = (
        SimpleNamespace(family=family, batch_size=2),
        ImageCall(callback_on_step_end=callback),
    )
    return Progress(CallState(pipe, call, None, Raster(1, 3), bar), range(images))


def step(*tokens: int) -> Step:
    return Step(DraftTree.empty(), (), tokens)


def test_a_pass_ends_when_an_image_comes_again_or_the_batch_is_another() -> None:
    bar, message = Bar(), []

    def callback(pipeline: Any, number: int, least: int, kwargs: dict[str, torch.Tensor]) -> None:
        message.append((pipeline.batch_size, number, least, kwargs["codes"].tolist()))

    progress = run(bar, 3, callback)
    for row, tokens in ((0, (1,)), (1, (2, 3)), (0, (4, 5)), (1, (6,)), (2, (7, 8, 9))):
        progress.step(row, step(*tokens))
    progress.finish()
    assert bar.done == 9
    assert [each[1:3] for each in message] == [(0, 1), (1, 3), (2, 3)]
    assert message[0][3] == [[1, -1, -1], [2, 3, -1], [-1, -1, -1]]
    assert message[2][3] == [[1, 4, 5], [2, 3, 6], [7, 8, 9]]
    assert {each[0] for each in message} == {2}


def test_nothing_is_reported_for_a_run_without_steps_or_without_a_callback() -> None:
    message: list[Any] = []
    run(Bar(), 1, message.append).finish()
    assert message == []
    bar = Bar()
    silent = run(bar, 1)
    silent.step(0, step(1, 2))
    silent.finish()
    assert bar.done == 2
