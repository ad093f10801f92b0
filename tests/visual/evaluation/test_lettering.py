"""Text on pictures: every script is written or spelled, never as boxes; lines fit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, ImageDraw

from ragspec.visual.evaluation import lettering

CACHED = (lettering._has, lettering._font_number, lettering._at_size)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without any font but Pillow's own."""
    monkeypatch.setattr(lettering, "_usual", lambda: ())
    for each in CACHED:
        each.cache_clear()
    yield
    for each in CACHED:
        each.cache_clear()


def inked(text: str) -> np.ndarray:
    canvas = Image.new("RGB", (300, 30), "white")
    lettering.write(ImageDraw.Draw(canvas), (4, 4), text, 16, (0, 0, 0))
    return np.asarray(canvas.convert("L"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("red heart, ± 0.1 · 3", "red heart, ± 0.1 · 3"),
        ("caf\u00e9 e\u0301", "cafe e"),
        ("Ж", "U+0416"),
        ("红心 red", "U+7EA2 U+5FC3 red"),
        ("two\n lines\ttogether", "two lines together"),
        ("a\x07b", "aU+0007b"),
        ("", ""),
    ],
)
@pytest.mark.usefixtures("bare")
def test_what_no_font_has_is_spelled(text: str, shown: str) -> None:
    assert lettering.shown(text) == shown


@pytest.mark.parametrize("text", ["Ж", "红", "א", "é", "🙂", "U+1F642"])
def test_nothing_is_written_as_the_box_of_an_absent_letter(text: str) -> None:
    box = inked_raw("\U0010ffff")
    assert (inked(text) < 128).any()
    assert not np.array_equal(inked(text), box)


def inked_raw(text: str) -> np.ndarray:
    canvas = Image.new("RGB", (300, 30), "white")
    letters = lettering.font(16)
    base = 4 + letters.getmetrics()[0]  # type: ignore[union-attr]
    ImageDraw.Draw(canvas).text((4, base), text, fill="black", font=letters, anchor="ls")
    return np.asarray(canvas.convert("L"))


def test_a_letter_that_another_font_has_is_written_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if not lettering._usual():
        pytest.skip("this machine has none of the usual fonts")
    assert lettering.shown("café") == "café"
    assert len({font for _, font in lettering._runs("café", 16)}) == 1  # one look for one word


def test_lines_fit_and_the_last_one_is_cut() -> None:
    text = "a long caption that has many more words than there is room for"
    lines = lettering.wrapped(text, 14, 100, 3)
    assert len(lines) == 3 and lines[-1].endswith("…")
    assert all(lettering.width_of(line, 14) <= 100 for line in lines)
    assert lettering.wrapped("short", 14, 100, 3) == ["short"]
    line, size = lettering.fitted(text, 20, 300)
    assert size == lettering.SMALLEST and lettering.width_of(line, size) <= 300
    assert lettering.fitted("short", 20, 300) == ("short", 20)
