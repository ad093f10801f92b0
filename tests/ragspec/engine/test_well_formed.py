from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.engine.prompts import well_formed

units = st.one_of(st.integers(0, 0xFF), st.integers(0xD7F0, 0x10010))


@given(st.lists(units))
def test_what_comes_out_can_be_written_and_half_pairs_are_all_that_changes(
    codes: list[int],
) -> None:
    text = "".join(map(chr, codes))
    result = well_formed(text)
    result.encode()
    selected = [c for c in text if not 0xD800 <= ord(c) < 0xE000]
    pairs = len([c for c in result if ord(c) > 0xFFFF]) - len([c for c in text if ord(c) > 0xFFFF])
    assert len(result) == len(text) - pairs
    if len(selected) == len(text):
        assert result == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a \ud83d b", "a \ufffd b"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ufeff\ud800", "\ufeff\ufffd"),
    ],
)
def test_lone_surrogates_are_replaced_and_pairs_joined(text: str, expected: str) -> None:
    assert well_formed(text) == expected
