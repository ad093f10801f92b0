"""The text of every page of a PDF file, without running lines, words rejoined across line ends."""

import re
import unicodedata
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from ragspec.errors import DocumentError, pluralize
from ragspec.retrievers.formats.encodings import Extract, clean, joined
from ragspec.retrievers.formats.readers import parsing

LIGATURES = {number: unicodedata.normalize("NFKC", chr(number)) for number in range(0xFB00, 0xFB07)}
CHARACTERS = LIGATURES | {0x00AD: "", 0x00A0: " "}  # a soft hyphen, a space
PILCROW = re.compile(r"[ \t]*¶(?=\s|$)")
CUT_WORD = re.compile(r"(\w+)\ufffe(\w+)")  # pdfium's mark of a hyphen at a line's end
NEAR = -2, -1, 1, 2  # steps to pages whose numbers a page counts on from
DIGITS = re.compile(r"\d{1,9}")
WORD = re.compile(r"\w+(?:-\w+)*")
EDGE = 2  # lines at the top and at the bottom of a page that may be running lines
RUNNING, FEWEST = 0.6, 3  # least share and number of the pages, or of the left or the right ones
# A line is numbered by pages if little else stands beside the number, or a separator between them.
NUMBERED = re.compile(
    r"\W*(?:(?:page|p|seite|s|página|pagina|strona|sida|side|страница|стр|с)\W+)?0"
    r"(?:\W*(?:of|von|de|di|sur|из|z|av|van)?\W*0)?\W*"
    r"|0\s*(?:[|–—·•]|\s{2})\s*.+|.+\s*(?:[|–—·•]|\s{2})\s*0|第?\s*0\s*[页頁ページ]+.*|- 0 -",
    re.I,
)
# pdfium must not run in two threads at once.
PDFIUM = Lock()


def read_pdf(path: Path, data: bytes) -> Extract:
    """Return the text of a PDF file, with a heading at every page.

    Raises:
        DocumentError: The file is no PDF, broken, encrypted or without text.
        MissingExtraError: pypdfium2 is missing.
    """
    import pypdfium2

    if b"%PDF" not in data[:1024]:
        raise DocumentError(f"{path} is no PDF (it does not begin with %PDF).")
    with parsing(path):
        try:
            with PDFIUM, pypdfium2.PdfDocument(data) as file:
                title = file.get_metadata_value("Title")
                file.init_forms()
                if file.formenv:  # a form's values become text of the pages when these are reopened
                    for page in file:
                        page.flatten()
                raw = [page.get_textpage().get_text_range() for page in file]
        except pypdfium2.PdfiumError as error:
            if "assword" in str(error):
                raise DocumentError(f"{path} is encrypted; remove its password first.") from error
            raise DocumentError(f"{path} is a broken PDF ({error}).") from error
    title = clean(title).strip()
    empty = [number for number, page in enumerate(raw, 1) if not page.strip()]
    if len(empty) == len(raw):
        raise DocumentError(
            f"{path} holds no text on {pluralize(len(raw), 'page')}. Run text recognition first "
            "on scans."
        )
    notes = [f"no text on pages {', '.join(map(str, empty))}"] if empty else []
    texts, removed = cleaned([clean(page.replace("\r\n", "\n")) for page in raw])
    if removed:
        notes.append(f"{removed} running lines of page edges were removed, each stands once")
    parts = [
        Extract(text, headings=((0, f"{title or clean(path.name)}, page {number}"),))
        for number, text in enumerate(texts, 1)
    ]
    return replace(joined(parts, title, "page"), notes=tuple(notes))


def cleaned(pages: Sequence[str]) -> tuple[list[str], int]:
    """Return the pages without running lines and ligatures, and how many lines were removed.

    A word that is cut at a line's end is joined if the whole stands elsewhere, or if its second
    part is no word of its own there.
    """
    texts, removed = without_running_lines(
        [PILCROW.sub("", page.translate(CHARACTERS)) for page in pages]
    )
    words = {word.lower() for page in texts for word in WORD.findall(CUT_WORD.sub(" ", page))}

    def joined(match: re.Match[str]) -> str:
        whole, first, second = (each.lower() for each in (match[1] + match[2], *match.groups()))
        known = whole in words or second not in words or first not in words
        hyphen = f"{first}-{second}" in words or (not second[:1].islower() and whole not in words)
        return match[1] + match[2] if known and not hyphen else f"{match[1]}-{match[2]}"

    return [CUT_WORD.sub(joined, page).replace("\ufffe", "-") for page in texts], removed


def without_running_lines(pages: Sequence[str]) -> tuple[list[str], int]:
    """Return the pages with edge lines that most pages share once, and how many were removed.

    Page numbers may differ in them. A page keeps all its lines if it would lose more than half.
    """
    split = [page.split("\n") for page in pages]
    plain = [{_plain(line) for line in lines} for lines in split]
    edges = [
        _edges(lines, {step: plain[page + step] for step in NEAR if 0 <= page + step < len(plain)})
        for page, lines in enumerate(split)
    ]
    every, *sides = (_running(some) for some in (edges, edges[::2], edges[1::2]))
    removed, before = 0, set[tuple[bool, str]]()
    for number, (lines, edge) in enumerate(zip(split, edges, strict=True)):
        keys = (every | sides[number % 2]) & before
        running = {place for key, place in edge if key in keys}
        before.update(key for key, _ in edge)
        if 2 * len(running) <= sum(bool(line.strip()) for line in lines):
            removed += len(running)
            lines[:] = [line for place, line in enumerate(lines) if place not in running]
    return ["\n".join(lines) for lines in split], removed


Edge = tuple[tuple[bool, str], int]  # (is at the top, text), number of the line


def _running(pages: Sequence[Sequence[Edge]]) -> set[tuple[bool, str]]:
    """Return the keys of lines that most of some pages share."""
    counts = Counter(key for page in pages for key in {key for key, _ in page})
    return {key for key, n in counts.items() if n >= max(FEWEST, RUNNING * len(pages))}


def _plain(line: str) -> str:
    """Return a line with its numbers as Python writes them."""
    return DIGITS.sub(lambda match: str(int(match[0])), line.strip())


def _edges(lines: Sequence[str], near: Mapping[int, Container[str]]) -> list[Edge]:
    """Return the lines at both edges of a page; numbers are 0 if one counts on from a near page."""
    places = [place for place, line in enumerate(lines) if line.strip()]
    edges = []
    for number, place in enumerate(places[:EDGE] + places[-EDGE:]):
        line = lines[place].strip()
        text = DIGITS.sub("0", line)
        if not NUMBERED.fullmatch(text) or not any(
            _plain(f"{line[: match.start()]}{int(match[0]) + step}{line[match.end() :]}") in others
            for match in DIGITS.finditer(line)
            for step, others in near.items()
        ):
            text = " ".join(line.split())
        edges.append(((number < min(EDGE, len(places)), text), place))
    return edges
