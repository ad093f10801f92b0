"""Grid rotations against turning every pair by hand."""

import math

import pytest
import torch

from ragspec.visual.models.llamagen import SPARE, GridRotary, rotate


@pytest.mark.parametrize("length", [1, 3])
def test_pairs_turn_with_row_and_column(length: int) -> None:
    side, width = 4, 8
    rotary = GridRotary(length, side, width, theta=100.0)
    positions = torch.arange(length, length + side * side)[None]
    states = torch.randn(1, side * side, 2, width, dtype=torch.float64)
    turned = rotate(states, rotary.rotation(positions, torch.float64))
    for code in range(side * side):
        row, column = divmod(code, side)
        for pair in range(width // 2):
            place = row if pair < width // 4 else column
            angle = place * 100.0 ** -((pair % (width // 4)) / (width // 4))
            x, y = states[0, code, :, 2 * pair], states[0, code, :, 2 * pair + 1]
            expected = x * math.cos(angle) - y * math.sin(angle)
            torch.testing.assert_close(turned[0, code, :, 2 * pair], expected)
            expected = x * math.sin(angle) + y * math.cos(angle)
            torch.testing.assert_close(turned[0, code, :, 2 * pair + 1], expected)


def test_half_precision_is_turned_in_float32() -> None:
    rotary = GridRotary(0, 4, 8)
    positions = torch.arange(16)[None]
    states = torch.randn(1, 16, 2, 8).bfloat16()
    rotation = rotary.rotation(positions, torch.bfloat16)
    assert rotation.dtype == torch.complex64
    expected = rotate(states.float(), rotation).bfloat16()
    assert torch.equal(rotate(states, rotation), expected)


def test_positions_accept_prob_beyond_the_last_code_for_timing_only() -> None:
    rotary = GridRotary(1, 2, 4)
    length = 1 + 2 * 2
    rotary.rotation(torch.tensor([[length + SPARE - 1]]), torch.float32)
    with pytest.raises(IndexError):
        rotary.rotation(torch.tensor([[length + SPARE]]), torch.float32)
