"""Text on pictures: in any script that a font of the machine covers, and never as empty boxes.

Pillow's own font has little more than ASCII. What it lacks is written in the first of the usual
fonts of the system that has it; what none has is written without its accents, or as its number
(`U+7EA2`). The text itself is for what is made beside a picture: JSON, a page.
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
SMALLEST = 10  # pixels of letters that are made smaller to fit
# Fonts that systems bring, those of many scripts first; Pillow looks for them where such lie.
USUAL = (
    *("DejaVuSans.ttf", "NotoSans-Regular.ttf", "LiberationSans-Regular.ttf", "segoeui.ttf"),
    *("NotoSansCJK-Regular.ttc", "NotoSansCJKsc-Regular.otf", "wqy-zenhei.ttc", "unifont.ttf"),
    *("Arial Unicode.ttf", "arial.ttf", "PingFang.ttc", "Hiragino Sans GB.ttc", "msyh.ttc"),
    *("YuGothM.ttc", "AppleSDGothicNeo.ttc", "malgun.ttf", "NanumGothic.ttf", "seguisym.ttf"),
    *("NotoSansArabic-Regular.ttf", "NotoSansHebrew-Regular.ttf", "NotoSansThai-Regular.ttf"),
    *("NotoSansDevanagari-Regular.ttf", "Nirmala.ttf", "Symbola.ttf"),
)
_ABSENT = "\U0010ffff"  # what no font has: drawn as its box
_PROBE = 16  # pixels at which glyphs are compared with that box
_UNSEEN = ("Mn", "Me", "Cf")  # marks and joiners say nothing without the letter before them


@lru_cache(maxsize=64)
def font(size: int) -> Font:
    """Return Pillow's own font in a size in pixels."""
    return ImageFont.load_default(size)


def text(text: str) -> str:
    """Return a line of text as it can be written here: one line, every character in some font."""
    line = " ".join(unicodedata.normalize("NFC", text).split())
    chunks = (
        "".join(group) if known else _spelled(group)
        for known, group in groupby(line, lambda char: _font_number(char) is not None)
    )
    return "".join(chunks)


def width_of(text: str, size: int) -> float:
    """Return the width in pixels of a line that `text` gave."""
    return sum(letters.getlength(piece) for piece, letters in _runs(text, size))


def fitted(text: str, size: int, most: float) -> tuple[str, int]:
    """Return a line and a size in which it is at most so wide: made smaller, then cut."""
    line = text(text)
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
    """Write a line of text, made smaller or cut where it is wider than `most` pixels."""
    line, size = fitted(text, size, most)
    x, top = at
    current = font(size)
    if not isinstance(
        current, ImageFont.FreeTypeFont
    ):  # Pillow without FreeType: letters of one size
        draw.text(at, line.encode("ascii", "replace").decode("ascii"), fill=colour, font=current)
        return
    base = top + current.getmetrics()[0]
    for piece, letters in _runs(line, size):
        draw.text((x, base), piece, fill=colour, font=letters, anchor="ls")
        x += letters.getlength(piece)


def wrapped(text: str, size: int, width: float, lines: int) -> list[str]:
    """Return a text in at most so many lines of a width, the last one cut where it is too long."""
    results: list[str] = []
    for word in text(text).split(" "):
        longer = f"{results[-1]} {word}" if results else word
        if results and (width_of(longer, size) <= width or len(results) == lines):
            results[-1] = longer
        else:
            results.append(word)
    return [_cut(line, size, width) for line in results]


def _cut(line: str, size: int, most: float) -> str:
    while len(line) > 1 and width_of(line, size) > most:
        line = line.removesuffix("…")[:-1].rstrip() + "…"
    return line


def _runs(line: str, size: int) -> Iterator[tuple[str, Font]]:
    """Give a line in pieces of one font each; the whole in one where one covers it."""
    whole = next((n for n in range(len(_usual()) + 1) if all(_has(n, c) for c in line)), None)
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
    """Return the first font that has a character: 0 is Pillow's own, 1 the first usual one."""
    return next((n for n in range(len(_usual()) + 1) if _has(n, char)), None)


@lru_cache(maxsize=1)
def _usual() -> tuple[str, ...]:
    """Return those of the usual fonts that this machine has."""
    results = []
    for name in USUAL:
        try:
            ImageFont.truetype(name, _PROBE)
        except (OSError, ImportError):
            continue
        results.append(name)
    return tuple(results)


@lru_cache(maxsize=64)
def _at_size(number: int, size: int) -> Font:
    return ImageFont.truetype(_usual()[number - 1], size) if number else font(size)


@lru_cache(maxsize=4096)
def _has(number: int, char: str) -> bool:
    """Tell whether a font draws a character rather than its box."""
    if char == " ":
        return True
    if unicodedata.bidirectional(char) in ("R", "AL") and not features.check("raqm"):
        return False  # written in the wrong order it could not be read
    letters = _at_size(number, _PROBE)
    return _samples(letters, char) != _samples(letters, _ABSENT)


def _samples(letters: Font, char: str) -> tuple[tuple[int, int], bytes]:
    try:
        mask = letters.getmask(char)
    except (UnicodeError, OSError):
        return (0, 0), b""
    return mask.size, bytes(mask)


def _spelled(chars: Iterator[str]) -> str:
    """Return characters that no font has by their plain letters, or by their numbers."""
    results: list[str] = []
    for char in chars:
        if unicodedata.category(char) in _UNSEEN:
            continue
        split = unicodedata.normalize("NFKD", char)
        plain = "".join(each for each in split if unicodedata.category(each) not in _UNSEEN)
        if plain != char and plain and all(_font_number(each) is not None for each in plain):
            results.append(plain)
        else:
            results.append(f"{' ' if results else ''}U+{ord(char):04X}")
    return "".join(results)
