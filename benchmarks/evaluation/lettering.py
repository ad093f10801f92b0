"""Text on pictures in any script that a font of the machine covers, without empty boxes.

Pillow's font has little more than ASCII. Other characters use the first common font of the system
that has them. A character without a font loses its accents or becomes its number (`U+7EA2`). Files
beside a picture, such as JSON or a page, should hold the original text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

from PIL import ImageDraw, ImageFont, features

Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

INK: Colour = (34, 38, 46)
SOFT: Colour = (116, 122, 132)
SMALLEST = 10  # least size in pixels of letters that are scaled to fit
# Fonts that systems ship, those of many scripts first; Pillow knows their folders.
COMMON_FONTS = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "segoeui.ttf"),
    *("NotoSansCJK-Regular.ttc", "NotoSansCJKsc-Regular.otf", "wqy-zenhei.ttc", "unifont.ttf"),
    *("Arial Unicode.ttf", "arial.ttf", "PingFang.ttc", "Hiragino Sans GB.ttc", "msyh.ttc"),
    *("YuGothM.ttc", "AppleSDGothicNeo.ttc", "malgun.ttf", "NanumGothic.ttf", "seguisym.ttf"),
    *("NotoSansArabic-Regular.ttf", "NotoSansHebrew-Regular.ttf", "NotoSansThai-Regular.ttf"),
    *("NotoSansDevanagari-Regular.ttf", "Nirmala.ttf", "Symbola.ttf"),
)
_ABSENT = "\U0010ffff"  # a character without a glyph: fonts draw their box
_PROBE = 16  # size in pixels at which glyphs are compared with that box
_MARKS = ("Mn", "Me", "Cf")  # categories of marks and joiners, which need a letter before them


@lru_cache(maxsize=64)
def font(size: int) -> Font:
    """Return Pillow's font in a size in pixels."""
    return ImageFont.load_default(size)


def printable(text: str) -> str:
    """Return a text as one line of characters that some font has."""
    line = " ".join(unicodedata.normalize("NFC", text).split())
    chunks = (
        "".join(group) if has_font else _spell(group)
        for has_font, group in groupby(line, lambda char: _font_number(char) is not None)
    )
    return "".join(chunks)


def width_of(text: str, size: int) -> float:
    """Return the width in pixels of a line of `printable`."""
    return sum(letters.getlength(piece) for piece, letters in _runs(text, size))


def fitted(text: str, size: int, most: float) -> tuple[str, int]:
    """Return a line and its size, scaled and then cut to a width of `most` pixels."""
    line = printable(text)
    while width_of(line, size) > most and size > SMALLEST:
        size -= 1
    return _cut(line, size, most), size


def write(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    size: int,
    colour: Colour = INK,
    *,
    most: float = float("inf"),
) -> None:
    """Write a line of text, scaled or cut to a width of `most` pixels."""
    line, size = fitted(text, size, most)
    x, top = at
    default_font = font(size)
    # Without FreeType Pillow has letters of one size.
    if not isinstance(default_font, ImageFont.FreeTypeFont):
        draw.text(
            at, line.encode("ascii", "replace").decode("ascii"), fill=colour, font=default_font
        )
        return
    base = top + default_font.getmetrics()[0]
    for piece, letters in _runs(line, size):
        draw.text((x, base), piece, fill=colour, font=letters, anchor="ls")
        x += letters.getlength(piece)


def _cut(line: str, size: int, most: float) -> str:
    while len(line) > 1 and width_of(line, size) > most:
        line = line.removesuffix("…")[:-1].rstrip() + "…"
    return line


def _runs(line: str, size: int) -> Iterator[tuple[str, Font]]:
    """Yield pieces of a line with their fonts; one piece if a font covers the line."""
    whole = next(
        (n for n in range(len(_system_fonts()) + 1) if all(_has(n, c) for c in line)), None
    )
    numbers: list[int] = []
    for char in line if whole is None else "":
        same = numbers and _has(numbers[-1], char)
        numbers.append(numbers[-1] if same else _font_number(char) or 0)
    if whole is not None:
        numbers = [whole] * len(line)
    for number, places in groupby(range(len(line)), numbers.__getitem__):
        yield "".join(line[place] for place in places), _at_size(number, size)


@lru_cache(maxsize=4096)
def _font_number(char: str) -> int | None:
    """Return the first font that has a character: 0 is Pillow's, 1 the first common one."""
    return next((n for n in range(len(_system_fonts()) + 1) if _has(n, char)), None)


@lru_cache(maxsize=1)
def _system_fonts() -> tuple[str, ...]:
    """Return the common fonts that this machine has."""
    names = []
    for name in COMMON_FONTS:
        try:
            ImageFont.truetype(name, _PROBE)
        except (OSError, ImportError):
            continue
        names.append(name)
    return tuple(names)


@lru_cache(maxsize=64)
def _at_size(number: int, size: int) -> Font:
    return ImageFont.truetype(_system_fonts()[number - 1], size) if number else font(size)


@lru_cache(maxsize=4096)
def _has(number: int, char: str) -> bool:
    """Return whether a font has a glyph for a character."""
    if char == " ":
        return True
    if unicodedata.bidirectional(char) in ("R", "AL") and not features.check("raqm"):
        return False  # Pillow would write it in the wrong order
    letters = _at_size(number, _PROBE)
    return _glyph(letters, char) != _glyph(letters, _ABSENT)


def _glyph(letters: Font, char: str) -> tuple[tuple[int, int], bytes]:
    try:
        mask = letters.getmask(char)
    except (UnicodeError, OSError):
        return (0, 0), b""
    return mask.size, bytes(mask)


def _spell(chars: Iterator[str]) -> str:
    """Return the base letters of characters without a font, or their numbers."""
    spelled: list[str] = []
    for char in chars:
        if unicodedata.category(char) in _MARKS:
            continue
        split = unicodedata.normalize("NFKD", char)
        plain = "".join(each for each in split if unicodedata.category(each) not in _MARKS)
        if plain != char and plain and all(_font_number(each) is not None for each in plain):
            spelled.append(plain)
        else:
            spelled.append(f"{' ' if spelled else ''}U+{ord(char):04X}")
    return "".join(spelled)
