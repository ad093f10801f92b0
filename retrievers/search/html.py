"""The visible text of HTML pages, with exponents, formulas, tables and preformatted text.

lxml parses; the writer here keeps what changes a meaning: `10<sup>6</sup>` is "10^6", a fraction
"a/b", a table has a line for each row and a tab for each column, and `pre` stands as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ragspec.errors import MissingExtraError
from ragspec.retrievers.search.encodings import Extract, clean

HIDDEN = frozenset(
    {"script", "style", "template", "noscript", "svg", "head", "title", "nav", "iframe"}
)
LOOSE = frozenset(
    {"address", "article", "aside", "blockquote", "body", "details", "div", "dl", "fieldset"}
    | {"figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header"}
    | {"hr", "html", "main", "p", "pre", "section", "summary", "table"}
)  # these stand between blank lines; the others begin a line
BLOCKS = LOOSE | {"caption", "dd", "dt", "legend", "li", "ol", "optgroup", "option", "select"}
BLOCKS |= {"tbody", "tfoot", "thead", "tr", "ul"}
CELLS = frozenset({"td", "th"})
HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
LAYOUT = (*HEADINGS, "dl", "ol", "pre", "table", "ul")  # a cell with one is no cell of a table
PILCROW = "¶"  # links to headings, as documentation tools write them
TAG = re.compile(r"<[^<>]*>")
SPACES = re.compile(r"[ \t\n\r\f\v]+")
INVISIBLE = {0x00A0: " ", 0x00AD: None, 0x200B: None, 0x2060: None, 0xFEFF: None}
SIMPLE = re.compile(r"[+\-−]?(?:\w+|\d+(?:[.,]\d+)+)|[∗*†‡′″°∘]+")
ORDINAL = frozenset({"st", "nd", "rd", "th", "er", "re", "º", "ª", "tm", "sm", "®", "™"})
SUBSCRIPTS = str.maketrans("0123456789+-()", "₀₁₂₃₄₅₆₇₈₉₊₋₍₎")


def grouped(text: str) -> str:
    """Return a part of a formula, in brackets unless it is one number or name."""
    return text if SIMPLE.fullmatch(text) else f"({text})"


def raised(text: str) -> str:
    """Return an exponent or a mark of a footnote, so that it joins no number before it."""
    if not text or text.lower() in ORDINAL or text[0] in "[(^":
        return text
    return "^" + grouped(text)


def lowered(text: str) -> str:
    """Return a subscript: digits as such, which a search takes for digits, the rest after "_"."""
    digits = text.translate(SUBSCRIPTS)
    return digits if not re.search(r"[^₀-₎]", digits) else "_" + grouped(text)


Parts = Sequence[str]
FORMULAS: dict[str, Callable[[str, Parts], str]] = {
    "sup": lambda whole, parts: raised(whole.strip()),
    "sub": lambda whole, parts: lowered(whole.strip()),
    "msup": lambda whole, parts: parts[0] + raised(parts[1]),
    "mover": lambda whole, parts: parts[0] + raised(parts[1]),
    "msub": lambda whole, parts: parts[0] + lowered(parts[1]),
    "munder": lambda whole, parts: parts[0] + lowered(parts[1]),
    "msubsup": lambda whole, parts: parts[0] + lowered(parts[1]) + raised(parts[2]),
    "munderover": lambda whole, parts: parts[0] + lowered(parts[1]) + raised(parts[2]),
    "mfrac": lambda whole, parts: f"{grouped(parts[0])}/{grouped(parts[1])}",
    "msqrt": lambda whole, parts: "√" + grouped("".join(parts)),
    "mroot": lambda whole, parts: f"{grouped(parts[0])}^(1/{parts[1]})",
    "mtd": lambda whole, parts: "".join(parts) + " ",
    "mtr": lambda whole, parts: " ".join(parts) + "; ",
    "annotation": lambda whole, parts: "",
    "annotation-xml": lambda whole, parts: "",
    "math": lambda whole, parts: "".join(parts),
}


def read_html(source: str) -> Extract:
    """Return the text of an HTML page, its title, and its headings.

    The title is that of the page, else its first heading. Broken markup is read as far as possible.

    Raises:
        MissingExtraError: lxml is missing.
    """
    try:
        from lxml import etree
    except ImportError as error:
        raise MissingExtraError("Reading HTML files needs lxml: pip install lxml") from error
    if not source.strip():
        return Extract("")
    parser = etree.HTMLParser(
        encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True
    )
    root = etree.fromstring(clean(source).encode(), parser)
    if root is None or any(error.type_name == "ERR_RESOURCE_LIMIT" for error in parser.error_log):
        text = SPACES.sub(" ", TAG.sub(" ", source)).strip()
        return Extract(text, notes=("the markup is nested too deeply; its tags were removed",))
    flatten_formulas(root)
    titles = [each for each in root.iter("title") if each.getparent().tag != "svg"]
    title = SPACES.sub(" ", "".join(titles[0].itertext())).strip() if titles else ""
    writer = TextWriter()
    walker = etree.iterwalk(root, events=("start", "end"))
    for event, element in walker:
        if event == "end":
            writer.close(element)
        elif element.tag in HIDDEN or element.tag == "pre":
            walker.skip_subtree()
            if element.tag == "pre":
                writer.preformatted(element)
        else:
            writer.open(element)
    text = "".join(writer.parts).rstrip()
    if not title and writer.headings:
        title = writer.headings[0][1]
    return Extract(text, title, tuple(writer.headings))


def flatten_formulas(root: Any) -> None:
    """Replace formulas, exponents and subscripts of a tree by their text, the innermost first."""
    for element in reversed(list(root.iter(*FORMULAS))):
        if element.tag in ("sup", "sub"):
            parts = []
        else:
            parts = ["".join(map(str.strip, child.itertext())) for child in element]
            parts = parts or [(element.text or "").strip()]
            parts += [""] * (3 - len(parts))
        whole = FORMULAS[element.tag](SPACES.sub(" ", "".join(element.itertext())), parts)
        tail = element.tail
        element.clear()
        element.text, element.tail = whole, tail


class TextWriter:
    """Collects the visible text of a tree, and the headings with their offsets."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.length = 0
        self.headings: list[tuple[int, str]] = []
        self._heading: tuple[int, int] | None = None  # its offset and the number of its first part
        self._cells = 0
        self._gap = ""

    def open(self, element: Any) -> None:
        """Begin an element and write its text."""
        tag = element.tag
        if tag in CELLS:
            if element.getprevious() is not None:
                self._gap = self._gap.strip(" ") + "\t"
            self._cells += next(element.iter(*LAYOUT), None) is None
        elif tag in BLOCKS or tag == "br":
            self._break(tag)
        if tag in HEADINGS:
            self._heading = (-1, len(self.parts))
        self._write(element.text)

    def close(self, element: Any) -> None:
        """End an element and write the text behind it."""
        tag = element.tag
        if tag in HEADINGS and self._heading is not None:
            start, first = self._heading
            self._heading = None
            if start >= 0:
                self.headings.append((start, "".join(self.parts[first:]).strip()))
        if tag in CELLS:
            self._cells -= next(element.iter(*LAYOUT), None) is None
        elif tag in BLOCKS:
            self._break(tag)
        self._write(element.tail)

    def preformatted(self, element: Any) -> None:
        """Write the text of a `pre` as it stands."""
        self._break("pre")
        for line_break in element.iter("br"):
            line_break.text = "\n"
        text = "".join(element.itertext()).translate(INVISIBLE)
        text = text.removeprefix("\n").rstrip()
        if text:
            self._put(text)

    def _break(self, tag: str) -> None:
        if self._cells:
            self._gap = self._gap or " "
            return
        gap = "\n\n" if tag in LOOSE else "\n"
        self._gap = max(gap, self._gap.strip(" \t"), key=len)

    def _write(self, text: str | None) -> None:
        if not text:
            return
        text = SPACES.sub(" ", text.translate(INVISIBLE))
        words = text.strip(" ")
        if words == PILCROW:
            return
        if text.startswith(" "):
            self._gap = self._gap or " "
        if words:
            self._put(words)
            self._gap = " " if text.endswith(" ") else ""

    def _put(self, text: str) -> None:
        gap = self._gap if self.length else ""
        self._gap = ""
        if self._heading is not None and self._heading[0] < 0:
            self._heading = (self.length + len(gap), len(self.parts) + 1)
        self.parts += (gap, text)
        self.length += len(gap) + len(text)
