"""How far layers look back, by configurations as models bring them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragspec.models.supported import Window, layer_windows
from tests.support import architectures

FULL = {"full_attention": Window()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", FULL),
        ("mistral", {"full_attention": Window(size=8)}),  # one kind, whatever its window
        ("gpt2", FULL),
        ("gemma3_text", {"sliding_attention": Window(size=8)} | FULL),
        ("llama4_text", {"chunked_attention": Window(chunk=8)} | FULL),
    ],
)
def test_configurations_of_models(name: str, expected: dict[str, Window]) -> None:
    assert layer_windows(architectures.build(name).config) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sliding_window": 8, "use_sliding_window": False}, FULL),
        ({"sliding_window": 8, "use_sliding_window": True}, {"full_attention": Window(size=8)}),
        ({"sliding_window": 0}, FULL),
        ({"sliding_window": None, "layer_types": None}, FULL),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, FULL),
        (
            {"layer_types": ["recurrent", "sliding_attention", "recurrent"], "sliding_window": 4},
            {"recurrent": Window(), "sliding_attention": Window(size=4)},
        ),
    ],
)
def test_windows_that_are_switched_off_or_of_other_layers(
    settings: dict[str, Any], expected: dict[str, Window]
) -> None:
    text = SimpleNamespace(**settings)
    assert layer_windows(SimpleNamespace(get_text_config=lambda: text)) == expected


def test_a_window_counts_the_query_itself() -> None:
    places = torch.arange(6)
    reached = Window(size=3).reaches(places[:, None], places[None])
    assert [int(row.nonzero().min()) for row in reached] == [0, 0, 0, 1, 2, 3]


def test_a_chunk_begins_again() -> None:
    places = torch.arange(6)
    reached = Window(chunk=4).reaches(places[:, None], places[None])
    assert reached[3].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert reached[4].nonzero().flatten().tolist() == [4, 5]


def test_window_and_chunk_hold_at_once_and_none_bounds_nothing() -> None:
    assert Window().plain and not Window(size=2).plain and not Window(chunk=2).plain
    both = Window(size=2, chunk=4).reaches(torch.tensor(5), torch.arange(8))
    assert both.nonzero().flatten().tolist() == [4, 5, 6, 7]  # causality is not its business
    assert bool(Window().reaches(torch.tensor(5), torch.arange(8)).all())
