"""Readable text from HTML, with the standard library's parser: blocks become lines."""

from __future__ import annotations

import re
from html.parser import HTMLParser

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
    """Collects the visible text of a page, its title, and where its headings stand."""

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
        """Close what the tag opened; closing tags that opened nothing are ignored."""
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

    The title is the page's own, else its first heading. Broken markup gives what can be read.
    """
    extractor = TextExtractor()
    extractor.feed(source)
    extractor.close()
    text = "".join(extractor.parts).rstrip()
    title = SPACES.sub(" ", extractor.title).strip()
    if not title and extractor.headings:
        title = extractor.headings[0][1]
    return title, text, extractor.headings
