"""Tiny image models with random weights, and plain decoding of codes without any cache."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.visual.models.target import ConditionTable, ImageTarget
from tests.support import tiny_images

BOOK, SIDE, CLASSES, LENGTH, FEATURES = 24, 4, 3, 3, 6


@cache
def model(condition: str = "class", seed: int = 0, layers: int = 2, book: int = BOOK) -> Any:
    """Return a float64 model of 4 x 4 codes, 16 wide; the same object for equal calls.

    Tests share the object: change a `copy.deepcopy` of it.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 32, "grid_size": SIDE}
    inputs = {"condition_length": 1 if condition == "class" else LENGTH, "caption_dim": FEATURES}
    more = sizes | inputs | {"num_classes": CLASSES, "id2label": None, "initializer_range": 0.4}
    return tiny_images.model(condition, layers=layers, codes=book, seed=seed, **more).double()


def condition_inputs(instance: Any) -> torch.Tensor:
    """Return three conditions: the class labels, or three captions' features."""
    if instance.config.condition == "class":
        return torch.arange(CLASSES)
    generator = torch.Generator().manual_seed(5)
    return torch.randn(CLASSES, LENGTH, FEATURES, generator=generator, dtype=torch.float64)


def table(instance: Any, padding: Sequence[int] = ()) -> ConditionTable:
    """Return the embedded conditions, and that of none; padding: see `ConditionTable`."""
    with torch.no_grad():
        message = instance.condition(condition_inputs(instance)), instance.unconditional(1)[0]
        return ConditionTable(*message, padding, padding)


def target(
    instance: Any, scale: float = 3.0, padding: Sequence[int] = (), **settings: Any
) -> ImageTarget:
    """Return the model as a target with its three conditions."""
    return ImageTarget(instance, table(instance, padding), scale, **settings)


def masked(size: int, padding: int) -> torch.Tensor:
    """Return LlamaGen's mask of a prompt padded on the left: bool [1, 1, size, size]."""
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    visible[:, :padding] = False
    return (visible | torch.eye(size, dtype=torch.bool))[None, None]


def guided(
    instance: Any, row: int, codes: Sequence[int], scale: float = 3.0, padding: int = 0
) -> torch.Tensor:
    """Return the guided logits after these codes, by two forwards over everything: [n + 1, V].

    padding: as many first places of the condition are masked, in both.
    """
    ids = torch.tensor([list(codes)], dtype=torch.int64)
    size = instance.config.condition_length + len(codes)
    mask = masked(size, padding) if padding else None
    with torch.no_grad():
        current = instance.condition(condition_inputs(instance)[row : row + 1])
        pair = [
            instance(ids, condition_embeds=each, attention_mask=mask).logits[
                0, current.shape[1] - 1 :
            ]
            for each in (current, instance.unconditional(1))
        ]
    combined: torch.Tensor = pair[1] + scale * (pair[0] - pair[1])
    return combined


@torch.no_grad()
def decode(
    logits: Callable[[list[int]], torch.Tensor],
    sampling: Sampling,
    seed: int = 0,
    *,
    sample: int = 0,
    count: int = SIDE * SIDE,
) -> list[int]:
    """Return the codes that plain decoding draws from the logits [1, V] after those before."""
    distribution = TokenDistribution(sampling, NoiseStream(seed, sample), 0)
    codes: list[int] = []
    for index in range(count):
        scores = distribution.process(logits(codes), codes, [[]])
        codes.append(int(distribution.select(scores, [index])))
    return codes


def plain(
    instance: Any, row: int, *draws: Any, scale: float = 3.0, padding: int = 0, **more: Any
) -> list[int]:
    """Return the codes of a row by forwards without a cache; draws and more: see `decode`."""
    return decode(lambda codes: guided(instance, row, codes, scale, padding)[-1:], *draws, **more)
