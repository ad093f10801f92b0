"""The text of every page of a PDF file, without running lines, words rejoined across line ends."""

import re
import unicodedata
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

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
MARGIN = 0.15  # of a page's height, in which they stand
RUNNING, FEWEST = 0.6, 3  # least share and number of the pages, or of the left or the right ones
# A line is numbered by pages if little else stands beside the number, or a separator between them.
NUMBERED = re.compile(
    r"\W*(?:(?:page|p|seite|s|página|pagina|strona|sida|side|страница|стр|с)\W+)?0"
    r"(?:\W*(?:of|von|de|di|sur|из|z|av|van)?\W*0)?\W*"
    r"|0\s*(?:[|–—·•]|\s{2})\s*.+|.+\s*(?:[|–—·•]|\s{2})\s*0|第?\s*0\s*[页頁ページ]+.*|- 0 -",
    re.I,
)
INNER_DIGITS = re.compile(r"(?<=\S)[-+−]?\d+")
SMALL, RAISED = 0.85, 0.15  # a raised digit's most height and least rise, of what precedes it
Key = tuple[bool, str]  # is at the top, text
Edge = tuple[Key, int, int]  # numbers of the line and of the outer one that must be running as well
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
                unread = Counter(kind for page in file for kind in _unread(page))
                if file.formenv:  # a form's values become text of the pages when these are reopened
                    for page in file:
                        page.flatten()
                pages = [*map(_page, file)]
        except pypdfium2.PdfiumError as error:
            if "assword" in str(error):
                raise DocumentError(f"{path} is encrypted; remove its password first.") from error
            raise DocumentError(f"{path} is a broken PDF ({error}).") from error
    title, raw = clean(title).strip(), [text for text, _ in pages]
    empty = [number for number, page in enumerate(raw, 1) if not page.strip()]
    if len(empty) == len(raw):
        raise DocumentError(
            f"{path} holds no text on {pluralize(len(raw), 'page')}. Run text recognition first "
            "on scans."
        )
    notes = [f"no text on pages {', '.join(map(str, empty))}"] if empty else []
    notes += [f"{count} {kind} left out" for kind, count in unread.items()]
    texts, removed = cleaned(raw, [margins for _, margins in pages])
    if removed:
        notes.append(
            f"{len(removed)} running lines of page edges were removed, each stands once: "
            + "; ".join({DIGITS.sub("0", line): line for line in removed}.values())
        )
    parts = [
        Extract(text, headings=((0, f"{title or clean(path.name)}, page {number}"),))
        for number, text in enumerate(texts, 1)
    ]
    return replace(joined(parts, title, "page"), notes=tuple(notes))


def _unread(page: Any) -> Iterator[str]:
    """Yield the kind of each annotation that is not read."""
    from pypdfium2 import raw

    kinds = {raw.FPDF_FORMFIELD_CHECKBOX: "check boxes", raw.FPDF_FORMFIELD_RADIOBUTTON: "buttons"}
    for number in range(raw.FPDFPage_GetAnnotCount(page)):
        each = raw.FPDFPage_GetAnnot(page, number)
        field = raw.FPDFAnnot_GetFormFieldType(page.formenv, each) if page.formenv else 0
        yield from [kinds[field]] if field in kinds else ()
        yield from ["sticky notes"] * (raw.FPDFAnnot_GetSubtype(each) == raw.FPDF_ANNOT_TEXT)
        raw.FPDFPage_CloseAnnot(each)


def _page(page: Any) -> tuple[str, str]:
    """Return the text of a page with "^" before raised digits, and that of its margins."""
    from pypdfium2 import raw

    def box(at: int) -> tuple[float, float]:
        """Return where a character's font begins, and its height."""
        rect, index = raw.FS_RECTF(), raw.FPDFText_GetCharIndexFromTextIndex(part, at)
        raw.FPDFText_GetLooseCharBox(part, index, rect)
        return rect.bottom, rect.top - rect.bottom

    def marked(match: re.Match[str]) -> str:
        (start, at), (base, height) = match.span(), box(match.start() - 1)
        for low, size in map(box, range(at - 1, start - 1, -1)):
            if not (0 < size < SMALL * height and low > base + RAISED * height):
                break
            at -= 1
        return f"{text[start:at]}{'^' * (at < match.end())}{text[at : match.end()]}"

    part, (_, bottom, _, top) = page.get_textpage(), page.get_bbox()
    margin, text = MARGIN * (top - bottom), part.get_text_range()
    edges = part.get_text_bounded(bottom=top - margin), part.get_text_bounded(top=bottom + margin)
    return INNER_DIGITS.sub(marked, text), text if page.get_rotation() else "\n".join(edges)


def cleaned(pages: Sequence[str], margins: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return the pages without running lines and ligatures, and the lines that were removed.

    A word that is cut at a line's end is joined if the whole stands elsewhere, or if its second
    part is no word of its own there.
    """
    plain, edges = (
        [PILCROW.sub("", clean(page).replace("\r\n", "\n").translate(CHARACTERS)) for page in each]
        for each in (pages, margins or pages)
    )
    texts, removed = without_running_lines(plain, edges)
    words = {word.lower() for page in texts for word in WORD.findall(CUT_WORD.sub(" ", page))}

    def joined(match: re.Match[str]) -> str:
        whole, first, second = (each.lower() for each in (match[1] + match[2], *match.groups()))
        known = whole in words or second not in words or first not in words
        hyphen = f"{first}-{second}" in words or (not second[:1].islower() and whole not in words)
        return match[1] + match[2] if known and not hyphen else f"{match[1]}-{match[2]}"

    return [CUT_WORD.sub(joined, page).replace("\ufffe", "-") for page in texts], removed


def without_running_lines(
    pages: Sequence[str], margins: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the pages with edge lines that most pages share once, and the removed lines.

    Lines that count pages may differ in numbers. Others must stand in the margins, and an inner one
    goes only with the outer one. A page keeps all its lines if it would lose more than half.
    """
    split = [page.split("\n") for page in pages]
    plain = [{_plain(line) for line in lines} for lines in split]
    outer = [{*map(_plain, margin.split("\n"))} for margin in margins] or plain
    edges = [
        _edges(
            lines,
            {step: plain[page + step] for step in NEAR if 0 <= page + step < len(plain)},
            outer[page],
        )
        for page, lines in enumerate(split)
    ]
    every, *sides = (_running(some) for some in (edges, edges[::2], edges[1::2]))
    removed, before = list[str](), set[Key]()
    for number, (lines, edge) in enumerate(zip(split, edges, strict=True)):
        keys = (every | sides[number % 2]) & before
        places = {place for key, place, _ in edge if key in keys}
        running = {place for key, place, beside in edge if key in keys and beside in places}
        before.update(key for key, *_ in edge)
        if 2 * len(running) <= sum(bool(line.strip()) for line in lines):
            removed += [lines[place].strip() for place in sorted(running)]
            lines[:] = [line for place, line in enumerate(lines) if place not in running]
    return ["\n".join(lines) for lines in split], removed


def _running(pages: Sequence[Sequence[Edge]]) -> set[Key]:
    """Return the keys of lines that most of some pages share."""
    counts = Counter(key for page in pages for key in {key for key, *_ in page})
    return {key for key, n in counts.items() if n >= max(FEWEST, RUNNING * len(pages))}


def _plain(line: str) -> str:
    """Return a line with its numbers as Python writes them."""
    return DIGITS.sub(lambda match: str(int(match[0])), line.strip())


def _edges(
    lines: Sequence[str], near: Mapping[int, Container[str]], margins: Container[str]
) -> list[Edge]:
    """Return the lines at both edges of a page; numbers are 0 if one counts on from a near page."""
    places = [place for place, line in enumerate(lines) if line.strip()]
    edges = list[Edge]()
    for number, place in enumerate(places[:EDGE] + places[-EDGE:]):
        line, is_top = lines[place].strip(), number < min(EDGE, len(places))
        text, beside = DIGITS.sub("0", line), place
        if not NUMBERED.fullmatch(text) or not any(
            _plain(f"{line[: match.start()]}{int(match[0]) + step}{line[match.end() :]}") in others
            for match in DIGITS.finditer(line)
            for step, others in near.items()
        ):
            if _plain(line) not in margins:
                continue
            text, beside = " ".join(line.split()), places[0 if is_top else -1]
        edges.append(((is_top, text), place, beside))
    return edges
