"""The text of every page of a PDF file, without running lines, words rejoined across line ends."""

import logging
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import POINTER, c_double, c_ushort, cast, create_string_buffer
from dataclasses import replace
from functools import reduce
from itertools import accumulate, chain, groupby
from math import cos, inf, pi
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from ragspec.errors import DocumentError, pluralize
from ragspec.retrievers.formats.encodings import UNTITLED, Extract, clean, joined
from ragspec.retrievers.formats.readers import parsing

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument, PdfPage, PdfTextPage

LIGATURES = {number: unicodedata.normalize("NFKC", chr(number)) for number in range(0xFB00, 0xFB07)}
CHARACTERS = LIGATURES | {0x00AD: "", 0x00A0: " "}  # a soft hyphen, a space
PILCROW = re.compile(r"[ \t]*¶(?=\s|$)")
CUT_WORD = re.compile(r"\w+(?:\ufffe\w+)+")  # pdfium's mark of a hyphen at a line's end
HYPHEN = re.compile(r"(?<=\w)\u2010\n(?=\w)")  # which it does not mark
# As behind "pre-"; some of them also end words: "pock-et" and "pre- et post-op".
LINKING = re.compile("(?:and|und|oder|bzw|sowie|y|e|o|(?:et|or|ou)(?=\\s+\\w+[-\ufffe]))(?![\\w-])")
CODE = re.compile(r"(?:^|[\s(\"'])(?:--|\w+://|www\.|[.~]{0,2}/)\S*$")  # an option, address or path
DIGITS = re.compile(r"\d{1,9}")
WORD = re.compile(r"\w+(?:-\w+)*")
NEAR = 2  # pages before and behind one that it counts on from
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
YEAR = re.compile(r"(?:19|20)\d\d")
BREAK = re.compile(r"(?<=\S)\r\n(?=[^\r])")
FALSE_BREAK = "\r\r"  # in place of such a break that is none
INNER_DIGITS = re.compile(rf"(?<=\S)(?:{FALSE_BREAK})?[-+−]?\d+")
SMALL, LARGE, RAISED = 0.85, 1.3, 0.15  # a raised digit's most heights and least rise
TOUCH, NEAREST = 0.1, 0.75  # of a line's height: most gap of touching characters, least of lines
UNREAD, VALUED = {2: "check boxes", 3: "buttons"}, (4, 5, 6)  # types of form fields in pdfium
NOTES = {1: "sticky notes", 17: "attached files"}  # types of annotations
MARKUP = {*range(4, 16)} - {13}  # types that may have a comment: lines, highlights; no stamps
FREE_TEXT, XFA_FORM = 3, 2  # a type of annotations, and one of forms
SECRET = 1 << 13  # the flag of a password
QUARTER, LEVEL = pi / 2, 0.9  # of a turn, and the least cosine of the angle of text in a line
OBJECTS = re.compile(rb"/ObjStm\b.{,300}?\bstream\r?\n", re.S)  # pdfium does not show them
LAYERS_OFF = re.compile(rb"/OFF\s*\[\s*\d")
RIGHT_TO_LEFT = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]{2,}")
WRITTEN = re.compile(r"[^\r\n]*\S ?|\r\n(?=[^\r\n]*\S)")  # lines, without blank ones
FAR = 0.6  # of the height of digits: those of several numbers
SAMPLE = 199  # characters of a page that are asked for their turn
Box = tuple[float, float, float, float]  # left, bottom, right and top
Edge = tuple[str, int, int]  # text, number of the line, and of the outer one that must be running
Count = tuple[str, int, int]  # text, which of its numbers, by how much it exceeds that of the page
MAX_PACKED = 2**20  # bytes of a stream of objects
PDFIUM = Lock()  # pdfium must not run in two threads at once


def read_pdf(path: Path, data: bytes) -> Extract:
    """Return the text of a PDF file, with a heading at every page.

    Raises:
        DocumentError: The file is no PDF, broken, encrypted or without text.
        MissingExtraError: pypdfium2 is missing.
    """
    import pypdfium2

    unread = Counter[str]()
    if b"%PDF" not in data[:1024]:
        raise DocumentError(f"{path} is no PDF (it does not begin with %PDF).")
    with parsing(path):
        try:
            with PDFIUM, pypdfium2.PdfDocument(data) as file:
                title = file.get_metadata_value("Title")
                logging.getLogger("pypdfium2").setLevel(logging.ERROR)  # it warns of XFA
                file.init_forms()
                unread["attached files"] = file.count_attachments()
                unread["forms in XFA"] = int(file.get_formtype() == XFA_FORM)
                forms = [_annotations(page, unread) for page in file]
                # Reopened, with what has an appearance as text.
                pages = [_page(file, n) for n in range(len(file))]
        except pypdfium2.PdfiumError as error:
            if "assword" in str(error):
                raise DocumentError(f"{path} is encrypted; remove its password first.") from error
            raise DocumentError(f"{path} is a broken PDF ({error}).") from error
    title, raw = UNTITLED.sub("", clean(title).strip()), [text for text, _ in pages]
    empty = [n for n, page in enumerate(map(str.__add__, raw, forms), 1) if not page.strip()]
    if len(empty) == len(raw):
        count = pluralize(len(raw), "page")
        raise DocumentError(f"{path} holds no text on {count}; recognize the text of scans first.")
    notes = [f"no text on pages {', '.join(map(str, empty))}"] if empty else []
    notes += [f"{count} {kind} left out" for kind, count in (+unread).items()]
    notes += ["layers that are switched off were read"] if _hides_layers(data) else []
    texts, removed = cleaned(raw, [margins for _, margins in pages])
    if removed:
        lines = "; ".join({DIGITS.sub("0", line): line for line in removed}.values())
        note = f"{len(removed)} running lines of page edges were removed, each stands once"
        notes.append(f"{note}: {lines}")
    name, texts = title or clean(path.name), [*map(str.__add__, texts, forms)]
    parts = [Extract(text, headings=((0, f"{name}, page {n}"),)) for n, text in enumerate(texts, 1)]
    return replace(joined(parts, title, "page"), notes=tuple(notes))


def _hides_layers(data: bytes) -> bool:
    """Return whether a PDF file has layers that are switched off."""
    hides = bool(LAYERS_OFF.search(data))
    for match in OBJECTS.finditer(data):
        with suppress(zlib.error):
            packed = data[match.end() : match.end() + MAX_PACKED]
            objects = zlib.decompressobj().decompress(packed, 8 * MAX_PACKED)
            hides = hides or bool(LAYERS_OFF.search(objects))
    return hides


def _annotations(page: "PdfPage", unread: Counter[str]) -> str:
    """Return values of a form and texts typed onto a page as lines, and count what is not read.

    Annotations with an appearance become part of the page, except for the fields of these values.
    """
    from pypdfium2 import raw

    def string(call: Callable[..., int], *key: object) -> str:
        buffer = create_string_buffer(call(*key, None, 0))
        call(*key, cast(buffer, POINTER(c_ushort)), len(buffer))
        return clean("\n".join(buffer.raw.decode("utf-16-le", "replace").strip("\0").splitlines()))

    text, form = "", page.formenv
    for each in [raw.FPDFPage_GetAnnot(page, n) for n in range(raw.FPDFPage_GetAnnotCount(page))]:
        field = raw.FPDFAnnot_GetFormFieldType(form, each) if form else 0
        unread.update([UNREAD[field]] if field in UNREAD else ())
        kind = raw.FPDFAnnot_GetSubtype(each)
        comment = string(raw.FPDFAnnot_GetStringValue, each, b"Contents")
        hidden = raw.FPDFAnnot_GetFlags(each) & raw.FPDF_ANNOT_FLAG_HIDDEN
        unread.update([NOTES[kind]] if kind in NOTES else ())
        unread["comments"] += kind in MARKUP and bool(comment)
        if kind == FREE_TEXT and comment and not hidden and not raw.FPDFAnnot_HasKey(each, b"AP"):
            text += f"\n{comment}"
        secret = form and raw.FPDFAnnot_GetFormFieldFlags(form, each) & SECRET
        if field in VALUED and not hidden and not secret:
            options = range(raw.FPDFAnnot_GetOptionCount(form, each))
            chosen = [n for n in options if raw.FPDFAnnot_IsOptionSelected(form, each, n)]
            labels = ", ".join(string(raw.FPDFAnnot_GetOptionLabel, form, each, n) for n in chosen)
            if value := labels or string(raw.FPDFAnnot_GetFormFieldValue, form, each):
                name = string(raw.FPDFAnnot_GetFormFieldAlternateName, form, each)
                name = name or string(raw.FPDFAnnot_GetFormFieldName, form, each)
                text += f"\n{name}: {value}"
                raw.FPDFAnnot_SetFlags(each, raw.FPDF_ANNOT_FLAG_HIDDEN)
        raw.FPDFPage_CloseAnnot(each)
    raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY)
    return text


def _page(file: "PdfDocument", number: int) -> tuple[str, str]:
    """Return the text of a page with "^" before raised digits, and that of its margins."""
    part, page = _text_page(file, number)
    left, bottom, right, top = page.get_bbox()
    text, indices = _characters(part, (left, bottom, right, top))
    margin = MARGIN * (top - bottom)
    bands = (left, top - margin, right, top), (left, bottom, right, bottom + margin)
    if RIGHT_TO_LEFT.search(text):
        edges = [_characters(part, each)[0] for each in bands]
    else:
        edges = [part.get_text_bounded(*each) for each in bands]
    return _with_raised(part, text, indices), text if page.get_rotation() else "\n".join(edges)


def _text_page(file: "PdfDocument", number: int) -> "tuple[PdfTextPage, PdfPage]":
    """Return the text of a page that is turned until most of its characters stand upright.

    pdfium skips text without a width, as single characters of a missing font. Outlines widen it.
    """
    from pypdfium2 import PdfMatrix, raw

    page = file[number]
    part = page.get_textpage()
    some = range(0, part.count_chars(), 1 + part.count_chars() // SAMPLE)
    written = [n for n in some if raw.FPDFText_GetUnicode(part, n) > ord(" ")]
    turns = Counter[int]()
    for n in written:
        raw.FPDFText_GetMatrix(part, n, m := raw.FS_MATRIX())
        side = -1 if m.a * m.d < m.b * m.c else 1  # of a mirrored character
        turns[side * round(raw.FPDFText_GetCharAngle(part, n) / QUARTER) % 4] += 1
    rotation = 90 * (-max(turns, key=turns.__getitem__) % 4) if turns else page.get_rotation()
    if rotation != page.get_rotation():
        page.set_rotation(rotation)
        page = file[number]
        part = page.get_textpage()
    widened = False
    for each in page.get_objects(filter=[raw.FPDF_PAGEOBJ_TEXT]):
        left, _, right, _ = each.get_bounds()
        if right <= left and not raw.FPDFFont_GetIsEmbedded(raw.FPDFTextObj_GetFont(each)):
            raw.FPDFTextObj_SetTextRenderMode(each, raw.FPDF_TEXTRENDERMODE_STROKE)
            each.transform(PdfMatrix())
            widened = True
    parts = (part, page.get_textpage()) if widened else (part,)  # the first if blanks alone were
    return max(parts, key=lambda each: len("".join(each.get_text_range().split()))), page


def _characters(part: "PdfTextPage", page: Box) -> tuple[str, list[int]]:
    """Return the text inside of a page, in order, and the index of each character in pdfium.

    The letters of one glyph, which pdfium reverses in lines from right to left, are put in order.
    """
    from pypdfium2 import raw

    def is_outside(each: Box) -> bool:
        left, bottom, right, top = each
        return right <= page[0] or left >= page[2] or top <= page[1] or bottom >= page[3]

    text = part.get_text_range()
    units = accumulate((1 + (each > "\uffff") for each in text), initial=0)  # of UTF-16
    get = raw.FPDFText_GetCharIndexFromTextIndex
    pairs = [(each, get(part, unit)) for each, unit in zip(text, units, strict=False)]
    if any(is_outside(part.get_rect(n)) for n in range(part.count_rects())):
        pairs = [pair for pair in pairs if pair[0].isspace() or not is_outside(_box(part, pair[1]))]
        texts = "".join(pair[0] for pair in pairs)
        spans = [m.span() for m in WRITTEN.finditer(texts)]
        pairs = [pair for start, end in spans for pair in pairs[start:end]]
    text = "".join(each for each, _ in pairs)
    for match in RIGHT_TO_LEFT.finditer(text):
        run = pairs[match.start() : match.end()]
        glyphs = [list(some)[::-1] for _, some in groupby(run, lambda pair: _box(part, pair[1]))]
        pairs[match.start() : match.end()] = chain(*glyphs)
    pairs = [*_respaced(part, pairs)]
    return "".join(each for each, _ in pairs), [index for _, index in pairs]


def _box(part: "PdfTextPage", index: int) -> Box:
    from pypdfium2 import raw

    raw.FPDFText_GetLooseCharBox(part, index, rect := raw.FS_RECTF())
    return rect.left, rect.bottom, rect.right, rect.top


def _respaced(part: "PdfTextPage", pairs: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield characters and indices with blanks between digits of several numbers.

    Tables may have the digits of several cells as one text with wide spaces.
    """
    last, place = "", 0
    for each, index in pairs:
        if each.isdigit() and last.isdigit():
            (_, low, right, _), (left, bottom, _, top) = _box(part, place), _box(part, index)
            height = top - bottom
            if left - right > FAR * height and abs(low - bottom) < height / 5:
                yield " ", index
        yield each, index
        last, place = each, index


def _with_raised(part: "PdfTextPage", text: str, indices: Sequence[int]) -> str:
    """Return the text of a page with "^" before digits that stand higher than what precedes.

    A line break between characters that touch, as pdfium sets at such digits, is removed.
    """
    from pypdfium2 import raw

    def box(at: int, quarters: int) -> tuple[float, float, float, float]:
        """Return a character's baseline, height, left and right in lines that are turned.

        The height is 0 if the character is turned to these lines.
        """
        index = indices[at]
        is_level = cos(raw.FPDFText_GetCharAngle(part, index) - quarters * QUARTER) > LEVEL
        raw.FPDFText_GetLooseCharBox(part, index, rect := raw.FS_RECTF())
        raw.FPDFText_GetCharOrigin(part, index, x := c_double(), y := c_double())
        points = (x.value, y.value), (rect.left, rect.bottom), (rect.right, rect.top)
        origin, low, high = (complex(*point) * 1j**quarters for point in points)
        left, right = sorted((low.real, high.real))
        return origin.imag, is_level * abs(high.imag - low.imag), left, right

    def turn(*ends: int) -> int:
        """Return the quarters of a turn, clockwise, of a line that has these characters."""
        angles: list[float] = [raw.FPDFText_GetCharAngle(part, indices[at]) for at in ends]
        return min(round(angle / QUARTER) % 4 for angle in angles)

    def rejoined(match: re.Match[str]) -> str:
        first, last = match.start() - 1, match.end()
        quarters = turn(first, last)
        base, height, _, right = box(first, quarters)
        baseline, size, left, _ = box(last, quarters)
        most = max(height, size)
        touches = abs(left - right) < TOUCH * most and abs(baseline - base) < NEAREST * most
        return FALSE_BREAK if touches else match[0]

    def marked(match: re.Match[str]) -> str:
        digits, at, first, last = match[0], len(match[0]), match.start() - 1, match.end() - 1
        quarters = turn(first, last)
        base, height, *_ = box(first, quarters)
        is_joined = digits.startswith(FALSE_BREAK) and box(last, quarters)[1] < LARGE * height
        most = inf if is_joined else SMALL * height  # fonts differ in height, but less
        for baseline, size, *_ in (box(n, quarters) for n in range(last, first, -1)):
            if baseline <= base + RAISED * height or not 0 < size < most:
                break
            at -= 1
        return f"{digits[:at]}{'^' * (at < len(digits))}{digits[at:]}"

    return INNER_DIGITS.sub(marked, BREAK.sub(rejoined, text)).replace(FALSE_BREAK, "")


def cleaned(pages: Sequence[str], margins: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return the pages without running lines and ligatures, and the lines that were removed.

    A word that is cut at a line's end is joined if the whole stands elsewhere, or if its second
    part is no word of its own there. Options, addresses, paths and names in capitals stay as cut.
    """

    def plain(page: str) -> str:
        text = clean(page).replace("\r\n", "\n").translate(CHARACTERS)
        return PILCROW.sub("", HYPHEN.sub("\ufffe", text))

    edges = [*map(plain, margins or pages)]
    texts, removed = without_running_lines([*map(plain, pages)], edges)
    words = {word.lower() for page in texts for word in WORD.findall(CUT_WORD.sub(" ", page))}

    def joined(left: str, right: str) -> str:
        whole, first, second = (each.lower() for each in (left + right, left, right))
        known = whole in words or second not in words or first not in words
        is_capital = (left + right).isupper() and min(len(left), len(right)) > 1
        is_name = not (second if is_capital else right)[:1].islower()
        hyphen = f"{first}-{second}" in words or (is_name and whole not in words)
        return left + right if known and not hyphen else f"{left}-{right}"

    def rejoined(word: re.Match[str]) -> str:
        parts, text = word[0].split("\ufffe"), word.string
        *_, left, right = parts
        is_new = (left + right).lower() not in words
        if is_new and CODE.search(text[max(0, word.start() - 99) : word.start()]):
            return word[0]
        if is_new and LINKING.match(text, word.end() - len(right)):
            return f"{reduce(joined, parts[:-1])}- {right}"
        return reduce(joined, parts)

    return [CUT_WORD.sub(rejoined, page).replace("\ufffe", "-") for page in texts], removed


def without_running_lines(
    pages: Sequence[str], margins: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the pages with edge lines that most pages share once, and the removed lines.

    Lines that count on from pages nearby may differ in numbers. Others must stand in the margins,
    and an inner one goes only with the outer one. A page stays whole if it would lose over half.
    """
    split = [page.split("\n") for page in pages]
    edges = _edges(split, margins or pages)
    every, *sides = (_running(some) for some in (edges, edges[::2], edges[1::2]))
    removed, before = list[str](), set[str]()
    for number, (lines, edge) in enumerate(zip(split, edges, strict=True)):
        texts = (every | sides[number % 2]) & before
        places = {place for text, place, _ in edge if text in texts}
        running = {place for text, place, beside in edge if text in texts and beside in places}
        before.update(text for text, *_ in edge)
        if 2 * len(running) <= sum(bool(line.strip()) for line in lines):
            removed += [lines[place].strip() for place in sorted(running)]
            lines[:] = [line for place, line in enumerate(lines) if place not in running]
    return ["\n".join(lines) for lines in split], removed


def _running(pages: Sequence[Sequence[Edge]]) -> set[str]:
    """Return the texts of lines that most of some pages share."""
    counts = Counter(text for page in pages for text in {text for text, *_ in page})
    return {text for text, n in counts.items() if n >= max(FEWEST, RUNNING * len(pages))}


def _edges(pages: Sequence[Sequence[str]], margins: Sequence[str]) -> list[list[Edge]]:
    """Return the lines at both edges of each page that may be running; numbers that count are 0."""
    edges, counts = list[list[Edge]](), list[set[Count]]()
    for page, lines in enumerate(pages):
        places = [place for place, line in enumerate(lines) if line.strip()]
        edges.append([(lines[place].strip(), place, places[0]) for place in places[:EDGE]])
        edges[page] += [(lines[place].strip(), place, places[-1]) for place in places[-EDGE:]]
        counts.append({each for line, *_ in edges[page] for each in _counts(line, page)})
    for page, margin in enumerate(margins):
        outer = {" ".join(line.split()) for line in margin.split("\n")}
        near = Counter(chain(*counts[max(0, page - NEAR) : page + NEAR + 1]))
        running = list[Edge]()
        for line, place, outermost in edges[page]:
            squeezed = " ".join(line.split())
            if any(near[each] > 1 for each in _counts(line, page)):
                running.append((DIGITS.sub("0", line), place, place))
            elif squeezed in outer:
                running.append((squeezed, place, outermost))
        edges[page] = running
    return edges


def _counts(line: str, page: int) -> set[Count]:
    """Return each number of a line that looks like one of pages and no year, less the page's."""
    text = DIGITS.sub("0", line)
    is_numbered = NUMBERED.fullmatch(text) and not YEAR.fullmatch(line)
    numbers = enumerate(DIGITS.findall(line)) if is_numbered else ()
    return {(text, at, int(number) - page) for at, number in numbers}
