"""Text, title and headings of HTML and PDF files."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

from ragspec.errors import DocumentError, MissingExtraError

HIDDEN = frozenset(
    {"script", "style", "template", "noscript", "svg", "math", "head", "nav", "iframe"}
)
LOOSE = frozenset(
    {"address", "article", "aside", "blockquote", "body", "details", "div", "dl", "fieldset"}
    | {"figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header"}
    | {"hr", "html", "main", "p", "pre", "section", "summary", "table"}
)  # these stand between blank lines; the others begin a line
BLOCKS = LOOSE | {"dd", "dt", "li", "ol", "tbody", "td", "tfoot", "th", "thead", "tr", "ul"}
CELLS = frozenset({"td", "th"})
HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
PILCROW = "¶"  # links to headings, as documentation tools write them
SPACES = re.compile(r"[ \t\n\r\f\v]+")


class TextExtractor(HTMLParser):
    """Collects the visible text of a page, its title, and its headings with their offsets."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.length = 0
        self.title = ""
        self.headings: list[tuple[int, str]] = []
        self._hidden: list[str] = []
        self._in_title = False
        self._preformatted = 0
        self._heading_start: int | None = None
        self._gap = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a hidden part, a block, a heading or the title."""
        if tag == "title":
            self._in_title = not self.title and self._hidden in ([], ["head"])
        elif tag in HIDDEN:
            self._hidden.append(tag)
        elif tag == "br":
            self._ask_gap("\n")
        elif tag in BLOCKS:
            if self._hidden == ["head"]:  # its end tag may be left out
                self._hidden.clear()
            self._block(tag)
            self._preformatted += tag == "pre"
            if tag in HEADINGS:
                self._heading_start = -1

    def handle_endtag(self, tag: str) -> None:
        """Close the part that the tag opened; unmatched closing tags are ignored."""
        if tag == "title":
            self._in_title = False
        elif tag in HIDDEN:
            if tag in self._hidden:
                del self._hidden[self._hidden.index(tag) :]
        elif tag in BLOCKS:
            if tag in HEADINGS and self._heading_start is not None:
                self._close_heading()
            self._preformatted = max(0, self._preformatted - (tag == "pre"))
            self._block(tag)

    def handle_data(self, data: str) -> None:
        """Add visible text, white space collapsed outside `pre`."""
        if self._in_title:
            self.title += data
            return
        if self._hidden or data.strip() == PILCROW:
            return
        if self._preformatted:
            self._write(data) if data.strip() else self._ask_gap("\n" * ("\n" in data) or " ")
            return
        words = SPACES.sub(" ", data)
        if words.startswith(" "):
            self._ask_gap(" ")
        if words.strip():
            self._write(words.strip())
        if words.endswith(" "):
            self._ask_gap(" ")

    def _block(self, tag: str) -> None:
        self._ask_gap("\t" if tag in CELLS else "\n\n" if tag in LOOSE else "\n")

    def _ask_gap(self, gap: str) -> None:
        rank = ["", " ", "\t", "\n", "\n\n"]
        self._gap = max(self._gap, gap, key=rank.index)

    def _write(self, text: str) -> None:
        gap = self._gap if self.length else ""
        self._gap = ""
        if self._heading_start == -1:
            self._heading_start = self.length + len(gap)
        for part in (gap, text):
            self.parts.append(part)
            self.length += len(part)

    def _close_heading(self) -> None:
        start, self._heading_start = self._heading_start, None
        if start is not None and start >= 0:
            self.headings.append((start, "".join(self.parts)[start:].strip()))


def extract_html(source: str) -> tuple[str, str, list[tuple[int, str]]]:
    """Return (title, text, headings with their offsets in the text) of an HTML page.

    The title is that of the page, else its first heading. Broken markup is read as far as possible.
    """
    extractor = TextExtractor()
    extractor.feed(source)
    extractor.close()
    text = "".join(extractor.parts).rstrip()
    title = SPACES.sub(" ", extractor.title).strip()
    if not title and extractor.headings:
        title = extractor.headings[0][1]
    return title, text, extractor.headings


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
PDF_PILCROW = re.compile(r"[ \t]*¶(?=\s|$)")
CUT_WORD = re.compile(r"(\w*[a-z])-[ \t]*\n[ \t]*([a-z]\w*)")
DIGITS = re.compile(r"\d+")
WORD = re.compile(r"\w+")
EDGE = 2  # lines at the top and at the bottom of a page that may be running lines
RUNNING, FEWEST = 0.4, 3  # least share and number of its pages (left and right ones may differ)


def read_pdf(path: Path, data: bytes) -> tuple[str, list[str]]:
    """Return the title and the text of every page.

    Raises:
        DocumentError: The file is no PDF, broken or encrypted.
        MissingExtraError: pypdf is missing.
    """
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise MissingExtraError("Reading PDF files needs pypdf: pip install pypdf") from error
    if b"%PDF" not in data[:1024]:
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
    """Return the pages without running lines and ligatures, words rejoined across line breaks."""
    texts = [PDF_PILCROW.sub("", page.translate(LIGATURES)) for page in pages]
    texts = without_running_lines(texts)
    words = {word.lower() for page in texts for word in WORD.findall(page)}

    def joined(match: re.Match[str]) -> str:
        whole = match[1] + match[2]
        return whole if whole.lower() in words else match[0]

    return [CUT_WORD.sub(joined, page) for page in texts]


def without_running_lines(pages: Sequence[str]) -> list[str]:
    """Return the pages without edge lines that many pages share, numbers aside."""
    split = [page.split("\n") for page in pages]
    counts = Counter(key for lines in split for key in {key for key, _ in _edges(lines)})
    least = max(FEWEST, RUNNING * len(pages))
    texts = []
    for lines in split:
        running = {place for key, place in _edges(lines) if counts[key] >= least}
        texts.append("\n".join(line for place, line in enumerate(lines) if place not in running))
    return texts


def _edges(lines: Sequence[str]) -> Iterator[tuple[tuple[bool, str], int]]:
    """Yield ((is at the top, text), line number) of the lines at both edges of a page."""
    places = [place for place, line in enumerate(lines) if line.strip()]
    for top, some in ((True, places[:EDGE]), (False, places[-EDGE:])):
        for place in some:
            yield (top, DIGITS.sub("0", " ".join(lines[place].split()))), place
