"""The text of PDF files, page by page, cleaned so that a quotation can be searched for.

What stands on most pages in the same place (running titles, page numbers) is left out, ligatures
become letters, and a word that was cut at the end of a line is joined where the document has it
whole elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ragspec.errors import DocumentError, MissingExtraError

LIGATURES = {
    0xFB00: "ff",
    0xFB01: "fi",
    0xFB02: "fl",
    0xFB03: "ffi",
    0xFB04: "ffl",
    0xFB05: "st",
    0xFB06: "st",
    0x00AD: None,  # a soft hyphen
    0x00A0: " ",
}
PILCROW = re.compile(r"[ \t]*¶(?=\s|$)")
CUT_WORD = re.compile(r"(\w*[a-z])-[ \t]*\n[ \t]*([a-z]\w*)")
DIGITS = re.compile(r"\d+")
WORD = re.compile(r"\w+")
EDGE = 2  # lines at the top and at the bottom of a page that may be running ones
RUNNING, FEWEST = 0.4, 3  # share of the pages and their number (left and right ones may differ)


def read_pdf(path: Path, data: bytes) -> tuple[str, list[str]]:
    """Return the title and the text of every page; raises DocumentError where it is broken."""
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise MissingExtraError("Reading PDF files needs pypdf: pip install pypdf") from error
    import io
    import logging

    if not data.startswith(b"%PDF") and b"%PDF" not in data[:1024]:
        raise DocumentError(f"{path} is no PDF (it does not begin with %PDF).")
    logging.getLogger("pypdf").setLevel(logging.ERROR)
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{path} is encrypted; remove its password first.")
        pages = [page.extract_text() for page in reader.pages]
        title = str(reader.metadata.title or "").strip() if reader.metadata else ""
    except DocumentError:
        raise
    except Exception as error:  # pypdf raises many kinds, also built-in ones, on broken files
        raise DocumentError(f"{path} is a broken PDF ({type(error).__name__}: {error}).") from error
    return title, cleaned(pages)


def cleaned(pages: Sequence[str]) -> list[str]:
    """Return the pages without running lines, ligatures and words cut in two."""
    results = [PILCROW.sub("", page.translate(LIGATURES)) for page in pages]
    results = without_running_lines(results)
    known = {word.lower() for page in results for word in WORD.findall(page)}
    return [CUT_WORD.sub(lambda match: _joined(match, known), page) for page in results]


def _joined(match: re.Match[str], known: set[str]) -> str:
    whole = match[1] + match[2]
    return whole if whole.lower() in known else match[0]


def without_running_lines(pages: Sequence[str]) -> list[str]:
    """Leave out lines at the edges of a page that stand there on many, numbers aside."""
    split = [page.split("\n") for page in pages]
    counts = Counter(key for lines in split for key in {key for key, _ in _edges(lines)})
    least = max(FEWEST, RUNNING * len(pages))
    selected = []
    for lines in split:
        running = {place for key, place in _edges(lines) if counts[key] >= least}
        selected.append("\n".join(line for place, line in enumerate(lines) if place not in running))
    return selected


def _edges(lines: Sequence[str]) -> Iterator[tuple[tuple[bool, str], int]]:
    """Yield ((is at the top, what it says), place) of the lines at both edges of a page."""
    places = [place for place, line in enumerate(lines) if line.strip()]
    for top, some in ((True, places[:EDGE]), (False, places[-EDGE:])):
        for place in some:
            yield (top, DIGITS.sub("0", " ".join(lines[place].split()))), place
