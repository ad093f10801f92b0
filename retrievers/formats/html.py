"""The visible text of HTML pages, with exponents, formulas, tables and preformatted text.

lxml parses; the writer here keeps what changes a meaning: `10<sup>6</sup>` is "10^6", a fraction
"a/b", a table has a line for each row and a tab for each column, and `pre` stands as it is.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import normalize

from ragspec.retrievers.formats.encodings import INVISIBLE, UNTITLED, Extract, clean, decode
from ragspec.retrievers.formats.numbering import formatted, whole

if TYPE_CHECKING:
    from lxml.etree import _Element

_HIDDEN = "script style template noscript svg head title nav iframe annotation annotation-xml"
HIDDEN = frozenset({"hidden-elements", *_HIDDEN.split()})
HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
_LOOSE = """address article aside blockquote body center details dialog div dl fieldset figcaption
figure footer form header hgroup hr html main p pre search section summary table"""
LOOSE = HEADINGS.union(_LOOSE.split())  # these stand between blank lines; the others begin a line
_LINES = "box br caption dd dt legend li listing ol option select tbody tfoot thead tr ul xmp"
BLOCKS = LOOSE | set(_LINES.split())
BOXES = BLOCKS - {"br"}
CELLS = frozenset({"td", "th"})
WIDGETS = ("button", "label", "object", "select", "textarea", "video")  # boxes beside text
STRUCK = frozenset({"del", "s", "strike"})
LAYOUT = (*HEADINGS, "dl", "ol", "pre", "table", "ul")  # a cell with one is no cell of a table
# Parts that screen readers leave out as well: menus in other elements, icons, second copies; the
# numbers of printed pages in books, and those cases of a switch that are not chosen.
UNSEEN = """/descendant::*[@role="navigation" or @role="search" or @aria-hidden="true"]
[not(self::svg)][ancestor::body]|//@*[.="doc-pagebreak" or name()="epub:type" and
contains(., "pagebreak")]/parent::*[string-length() < 20]|//@required-namespace[contains(.,
"MathML")]/../../*[not(@required-namespace)]|//@required-namespace[not(contains(., "MathML"))]/.."""
_SPACES = "1998/Math/MathML|1999/xhtml|2000/svg"
PREFIX = re.compile(rf"xmlns:([\w-]+)\s*=\s*[\"']http://www\.w3\.org/(?:{_SPACES})[\"']")
NOTE_MARKS = """//@*[.="doc-noteref" or name()="epub:type" and contains(., "noteref")]/parent::*
[not(.//sup or ancestor::sup)][string-length(normalize-space()) < 7]"""
_NO_HEADING = r"[^<]*(?:<(?!/?h[1-6]\b)[^<]*)*"
# Marks that libxml2 reads otherwise than browsers do.
REPAIRS = {
    re.compile(r"<(?:br\b[^<>]*></|/)br\s*/?>", re.I): "<br>",
    re.compile(rf"(<h([1-6])\b{_NO_HEADING}</h)[1-6]", re.I): r"\1\2",
    re.compile(r"(<script\b[^<>]*)/(?=>[^<]*(?:<(?!/?script)[^<]*)*</script)", re.I): r"\1",
}
UNSHOWN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.I)
BOX = re.compile(r"(?<![\w-])display\s*:\s*(block|flex|flow-root|grid|list-item|table)", re.I)
KEEPING = re.compile(r"(?<![\w-])white-space\s*:\s*(?:pre|break)", re.I)
_ROWS = "parent::table or parent::tbody or parent::tr"
# The nearest style that has a word on spaces counts.
_NEAREST = 'ancestor::*[contains(@style, "hite-space")][1][not(contains(@style, "normal"))]'
LINES = f'.//text()[contains(., "\n")][not({_ROWS} or ancestor::pre)][{_NEAREST}]'
FLEX = re.compile(r"(?<![\w-])display\s*:\s*(inline-)?(?:flex|grid)", re.I)
_NUMBERS = r"none|disc|circle|square|(decimal(-leading-zero)?|(?:low|upp)er-(?:alpha|latin|roman))"
NUMBER = re.compile(rf"(?<![\w-])list-style(?:-type)?\s*:[^;]{{0,99}}?\b(?:{_NUMBERS})\b", re.I)
WORD = re.compile(r"[^\W\d]{4}")
STYLE = re.compile(r"vertical-align\s*:\s*(su[pb])|text-decoration[\w-]*\s*:[^;]*line-thr", re.I)
NOTED = "(//svg[.//text]|//noscript|//hidden-elements)[ancestor::body][normalize-space()]"
RUBY_TEXT = ".//text()[ancestor::rt or ancestor::rtc][not(parent::rp)]"
MAX_STEPS = 200_000  # over cells of a page, to bring them in line
DESCRIPTION = 5  # fewest words of a picture's text that are more than its name
PILCROW = "¶"  # links to headings, as documentation tools write them
TAG = re.compile(r"<[^<>]*>")
SPACES = re.compile(r"[\t\n\r\f\v][ \t\n\r\f\v]*| [ \t\n\r\f\v]+")  # but one space, as it stays
ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # lxml takes none
BLOCK_END, BLOCK_EDGE = re.compile("\u2029+(?=[\n\u2028])"), re.compile("[\t\n]?[\u2028\u2029]+")
LINE_END = "\u2028"  # of text that a style lets stand as it is
EDGE = "\u2063"  # of a part of a formula; numbers on both sides of it do not run together
GAPS = re.compile("(?<=\\d)[\u2062-\u2064]+(?=[\\d₀-₉])|\u2061(?!\\()")  # and before an argument
FRACTION = re.compile(r"(?:(\d)|[^\w)\]])?\^(\d+)[/⁄]([₀-₉]+)")  # but no power of x or (x)
SIMPLE = re.compile(r"[+\-−]?(?:[^\W\d]\w*|\d+(?:[.,]\d+)*)|[∗*†‡′″°∘]+|\([^()]*\)")
ORDINAL = frozenset({"st", "nd", "rd", "th", "er", "re", "º", "ª", "tm", "sm", "®", "™"})
FORMS = {"a": "lower-alpha", "A": "upper-alpha", "i": "lower-roman", "I": "upper-roman"}
MUTE = r"\s*(button|checkbox|color|file|hidden|image|password|radio|range|reset|submit)\s*"
SUBSCRIPTS = str.maketrans("0123456789+-()", "₀₁₂₃₄₅₆₇₈₉₊₋₍₎")


def grouped(text: str) -> str:
    """Return a part of a formula, in brackets unless it is one number or name."""
    return text if SIMPLE.fullmatch(text) else f"({text})"


def powered(text: str) -> str:
    """Return an exponent of a formula, in which brackets are no mark of a footnote."""
    return text if text[:1] in ("", "^") else "^" + grouped(text)


def raised(text: str) -> str:
    """Return an exponent or a mark of a footnote, so that it joins no number before it."""
    return text if text.lower() in ORDINAL or text.startswith(("[", "(")) else powered(text)


def based(text: str) -> str:
    """Return the base of an exponent, in brackets if it is a fraction."""
    return grouped(text) if "/" in text else text


def lowered(text: str) -> str:
    """Return a subscript: digits as such, which a search takes for digits, the rest after "_"."""
    digits = text.translate(SUBSCRIPTS)
    return digits if not re.search(r"[^₀-₎]", digits) else "_" + grouped(text)


# The text of a formula by its parts; one function takes all parts, joined.
FORMULAS: dict[str, tuple[Callable[[str], str], ...]] = {
    "sup": (raised,),
    "sub": (lowered,),
    **dict.fromkeys(("msup", "mover"), (based, powered)),
    **dict.fromkeys(("msub", "munder"), (str, lowered)),
    **dict.fromkeys(("msubsup", "munderover"), (based, lowered, powered)),
    "mfrac": (grouped, lambda part: f"/{grouped(part)}"),
    "stack": (str, *["; {}".format] * 999),  # a fraction without a bar, as rows of a matrix
    "msqrt": (lambda part: f"√{grouped(part)}",),
    "mroot": (grouped, lambda part: f"^(1/{part})"),
    "rad": (lambda degree: degree and f"({degree})", lambda part: f"√{grouped(part)}"),  # of Office
    "func": (str, " {}".format),
    "nary": (str, lowered, powered, " {}".format),
    "sPre": (lowered, powered, str),
    "mtr": (lambda part: f"{part}; ",),
    "math": (str,),
}


def joined_part(texts: Iterable[str]) -> str:
    """Return the texts of a formula's part as one; others than spaces between them stay."""
    text = "".join(each.strip(" \t\n\r\f\v") for each in texts)
    return INVISIBLE.sub("", GAPS.sub(" ", text)).strip()


def read_page(path: Path, data: bytes) -> Extract:
    """Return the text of an HTML file."""
    extract = decode(path, data)
    page = read_html(extract.text)
    return replace(page, notes=extract.notes + page.notes)


def read_html(source: str, *, is_mail: bool = False) -> Extract:
    """Return the text of an HTML page, its title, and its headings.

    The title is that of the page, else its first heading. Broken markup is read as far as possible.
    """
    from lxml import etree

    if not source.strip():
        return Extract("")
    if prefixes := "|".join({*PREFIX.findall(source)}):
        source = re.sub(rf"(</?)(?:{prefixes}):", r"\1", source)
    for pattern, repaired in REPAIRS.items():
        source = pattern.sub(repaired, source)
    parser = etree.HTMLParser(
        encoding="utf-8", huge_tree=True, remove_comments=True, remove_pis=True
    )
    root = etree.fromstring(clean(source).encode(), parser)
    if any(error.message == "Unexpected end tag : p" for error in parser.error_log):
        # libxml2 drops such an end, which is an empty paragraph.
        source = re.sub(r"</p(?=[\s/>])[^<>]*>", r"\g<0><br>", source, flags=re.I)
        root = etree.fromstring(clean(source).encode(), parser)
    if root is None or any(error.type_name == "ERR_RESOURCE_LIMIT" for error in parser.error_log):
        text = SPACES.sub(" ", TAG.sub(" ", source)).strip()
        return Extract(text, notes=("the markup is nested too deeply; its tags were removed",))
    root.extend([*root.itersiblings()])  # the text behind </html>
    title = SPACES.sub(" ", root.xpath("string(//title[not(parent::svg)])")).strip()
    return read_tree(root, UNTITLED.sub("", title), is_mail)


def read_tree(root: "_Element", title: str = "", is_mail: bool = False) -> Extract:
    """Return the text of a tree of HTML elements, which is changed."""
    from lxml import etree

    apply_styles(root, is_mail)
    for element in root.xpath(UNSEEN):
        is_text = element.get("aria-hidden") == "true" and any(map(WORD.search, element.itertext()))
        element.tag = "hidden-elements" if is_text else "nav"
    write_attributes(root)
    for each in root.iter(*WIDGETS):
        each.text, each.tail = f" {each.text or ''}", re.sub(r"^(?=\w|$)", " ", each.tail or "")
    notes = dict.fromkeys(f"text of {each.tag} left out" for each in root.xpath(NOTED))
    etree.strip_elements(root, *HIDDEN, with_tail=False)
    for ruby in reversed(list(root.iter("ruby"))):
        above = "".join(ruby.xpath(RUBY_TEXT)).strip()
        etree.strip_elements(ruby, "rt", "rtc", "rp", with_tail=False)
        ruby.append(ruby.makeelement("span"))
        ruby[-1].text = ILLEGAL.sub(" ", f"({above})" if above else "")
    for each in root.xpath(NOTE_MARKS):
        each.tag = "sup"
    align(root)
    number(root)
    flatten(root)
    writer = TextWriter()
    for event, element in etree.iterwalk(root, events=("start", "end")):
        (writer.open if event == "start" else writer.close)(element)
    title = title or next((heading for _, heading in writer.headings), "")
    return Extract("".join(writer.parts).rstrip(), title, tuple(writer.headings), notes=(*notes,))


def write_attributes(root: "_Element") -> None:
    """Write the texts that a browser shows of attributes: of formulas, pictures and fields."""
    for element in root.iter("q"):
        element.text, element.tail = f"“{element.text or ''}", f"”{element.tail or ''}"
    for element in root.xpath('/descendant::script[starts-with(@type, "math/")]'):
        element.tag = "span"
    for element in root.xpath("/descendant::img[@alt]"):
        alt, kind = element.get("alt"), element.get("class", "")
        is_formula = "math" in kind or alt.startswith("$")
        if is_formula or len(alt.split()) >= DESCRIPTION:
            element.text = ILLEGAL.sub(" ", alt)
            element.tag = "img" if is_formula else "object"  # which no text joins
    for element in root.xpath("/descendant::input[@value]"):
        if not re.fullmatch(MUTE, element.get("type", ""), re.I):
            element.text = ILLEGAL.sub(" ", f" {element.get('value')} ")


def apply_styles(root: "_Element", is_mail: bool) -> None:
    """Wrap text that styles raise, lower or strike out; rename what mails hide, without scripts."""
    for element in root.xpath("/descendant::*[@style or @hidden][ancestor::body]"):
        style = element.get("style", "")
        if is_mail and ("hidden" in element.attrib or UNSHOWN.search(style)):
            element.tag = "hidden-elements"
        flex = FLEX.search(style)
        for each in [element] * bool(BOX.search(style)) + element[:] * bool(flex):
            if each.tag not in BLOCKS | CELLS:
                each.addprevious(box := each.makeelement("label" if flex and flex[1] else "box"))
                box.append(each)
                box.tail, each.tail = each.tail, None
        for text in element.xpath(LINES) if KEEPING.search(style) else ():
            place = "tail" if text.is_tail else "text"
            setattr(text.getparent(), place, text.replace("\n", LINE_END))
        tags, match = [each.tag for each in element], STYLE.search(style)
        if match and match[1] and WORD.search("".join(element.itertext())):
            continue  # a label that is aligned with an icon
        if match and (BOXES | CELLS).isdisjoint([*tags, match[1] and element.tag]):
            inner = element.makeelement((match[1] or "s").lower())
            inner.text, element.text, inner[:], element[:] = element.text, None, element[:], [inner]
        elif match and not match[1]:
            element.set("struck", "")  # for the writer


def align(root: "_Element") -> None:
    """Add empty cells beside and below those that span several, so that columns stay in line."""
    left = MAX_STEPS
    for group in root.xpath("//*[@colspan or @rowspan]/ancestor::*[not(self::tr)][1]"):
        ends = dict[int, int]()  # of a column: the first row below the cell that spans into it
        for number, row in enumerate(group.findall("tr") or [group]):
            column = 0
            for cell in [*row.iterchildren(*CELLS)]:
                while ends.get(column, 0) > number and left > 0:
                    cell.addprevious(cell.makeelement("td"))
                    column, left = column + 1, left - 1
                columns = max(min(whole(cell.get("colspan"), 1), 1000, left), 1)  # as in browsers
                end = number + (whole(cell.get("rowspan"), 1) or MAX_STEPS)  # 0 means all below
                for each in range(column, column + columns):
                    ends[each] = max(ends.get(each, 0), end)
                for _ in range(1, columns):
                    cell.addnext(cell.makeelement("td"))
                column, left = column + columns, left - columns + 1


def form_of(element: "_Element", form: str) -> str:
    """Return the form of the numbers of a list or an item, "" for bullets and none."""
    match = NUMBER.search(element.get("style", ""))
    return (match[1] or "").lower() if match else FORMS.get(element.get("type", ""), form)


def number(root: "_Element") -> None:
    """Write the numbers of ordered lists before their items."""
    for each in root.iter("ol", "ul"):
        items, step = each.findall("li"), -1 if "reversed" in each.attrib else 1
        count = whole(each.get("start"), len(items) if step < 0 else 1)
        form = form_of(each, "decimal" if each.tag == "ol" else "")
        for item in items:
            count = whole(item.get("value"), count)
            kind, place = form_of(item, form), item
            label = f"{formatted(count, kind)}. " * bool(kind)
            while kind and len(place) and not (place.text or "").strip() and place[0].tag in BOXES:
                place = place[0]
            place.text = ILLEGAL.sub(" ", f"{label}{(place.text or '').lstrip()}")
            count += step


def write_marks(root: "_Element") -> None:
    """Write the marks of formulas that are attributes or places of an element."""
    from lxml.builder import E

    for element in root.iter("mfenced"):  # whose marks are attributes
        marks = "".join(element.get("separators", ",").split())
        for number, child in enumerate(element[1:], 1):
            child.addprevious(E.mo(marks[:number][-1:]))  # the last one repeats
        element.insert(0, E.mo(element.get("open", "(")))
        element.append(E.mo(element.get("close", ")")))
    for element in root.xpath("/descendant::mfrac[@linethickness]"):
        element.tag = "mfrac" if element.get("linethickness").strip("0. ptxemc") else "stack"
    for element in root.xpath("/descendant::mmultiscripts[*]"):
        before = element.xpath("mprescripts[1]/following-sibling::*")
        base, *after = element[: len(element) - len(before)]
        for number, each in (*enumerate(before), *enumerate(after)):
            each.getparent().replace(each, script := E("msup" if number % 2 else "msub", E.none()))
            script.append(each)
        element[:] = [*element[len(after) + 1 :], base, *element[1 : len(after) + 1]]


def flatten(root: "_Element") -> None:
    """Replace formulas and preformatted parts of a tree by their text, the innermost first."""
    write_marks(root)
    for element in root.iter("br", "mspace"):
        line = "\n" if next(element.iterancestors("math"), None) is None else "; "
        element.text = line if element.tag == "br" else "\xa0"
    for element in root.iterfind(".//math"):
        if (before := element.getprevious()) is not None and before.tag == "math":
            before.tail = before.tail or " "
    for element in reversed(list(root.iter("pre", *STRUCK, *FORMULAS))):
        text, tail = "".join(element.itertext()), element.tail
        if element.tag in STRUCK:
            if any(each.tag in BOXES for each in element.iter()):
                element.set("struck", "")
                continue
            text = re.sub(r"(?s)\S(.*\S)?", r"~~\g<0>~~ ", text.replace("~~", ""), count=1)
        elif element.tag == "pre":
            text = INVISIBLE.sub("", preformatted(element)).replace("\xa0", " ")
            text = text.removeprefix("\n").rstrip()
        else:
            parts, shapes = [SPACES.sub(" ", text).strip()], FORMULAS[element.tag]
            if element.tag not in ("sup", "sub") and len(element):
                is_whole = len(shapes) == 1 and element.tag != "mtr"
                parts = [joined_part(e.itertext()) for e in ([element] if is_whole else element)]
            if len(shapes) == 1:
                parts = [" ".join(parts)]
            text = "".join(shape(part) for shape, part in zip(shapes, parts, strict=False))
            text = text if element.tag in ("sup", "sub", "mtr", "math") else f"{EDGE}{text}{EDGE}"
        element.clear()
        element.text, element.tail = (ILLEGAL.sub(" ", each or "") for each in (text, tail))


def preformatted(element: "_Element") -> str:
    """Return preformatted text, in which blocks stand on lines and tabs between cells."""
    for each in element.iterdescendants(*BOXES):
        each.text, each.tail = f"\u2028{each.text or ''}", f"\u2029{each.tail or ''}"
    for each in element.iterdescendants(*CELLS):
        if next(each.itersiblings(*CELLS, preceding=True), None) is not None:
            each.text = f"\t{each.text or ''}"
    text = BLOCK_END.sub("", "".join(element.itertext()))
    return BLOCK_EDGE.sub(lambda match: "\n" if match.start() else "", text)


class TextWriter:
    """Collects the visible text of a tree, and the headings with their offsets."""

    def __init__(self) -> None:
        self.parts: list[str] = []  # the gap before a text, and the text
        self.length = 0
        self.headings: list[tuple[int, str]] = []
        self._heading: int | None = None  # the number of its first part
        self._cells: list[bool] = []  # whether each open one is a cell of a table
        self._gap = ""
        self._struck, self._run = 0, -1  # open elements with the mark; parts up to their text

    def open(self, element: "_Element") -> None:
        """Begin an element and write its text."""
        tag = element.tag
        self._struck += element.get("struck") is not None
        if tag in CELLS:
            if next(element.itersiblings(*CELLS, preceding=True), None) is not None:
                self._gap = self._gap.strip(" ") + "\t"
            self._cells.append(next(element.iter(*LAYOUT), None) is None)
        self._break(tag)
        if tag in HEADINGS:
            self._heading = len(self.parts)
        if tag == "pre" and element.text:
            self._put(element.text)
        elif tag not in ("pre", "br"):
            self._write(element.text)

    def close(self, element: "_Element") -> None:
        """End an element and write the text behind it."""
        tag = element.tag
        if tag in HEADINGS and self._heading is not None:
            if heading := "".join(self.parts[self._heading + 1 :]):
                self.headings.append((self.length - len(heading), heading.strip()))
            self._heading = None
        if tag in CELLS:
            self._cells.pop()
        if tag != "br":
            self._break(tag)
        if element.get("struck") is not None:
            self._struck, self._gap = self._struck - 1, self._gap or " "
        self._write(element.tail)

    def _break(self, tag: str) -> None:
        if tag in BLOCKS and True in self._cells:
            self._gap = self._gap or " "
        elif tag in BLOCKS:
            self._gap = max("\n\n" if tag in LOOSE else "\n", self._gap.strip(" \t"), key=len)

    def _write(self, text: str | None) -> None:
        for number, line in enumerate(text.split(LINE_END) if text else ()):
            if number:
                self._break("br")
            line = SPACES.sub(" ", INVISIBLE.sub("", line).replace("\xa0", " "))
            words = line.strip(" ")
            if line.startswith(" "):
                self._gap = self._gap or " "
            if words and words != PILCROW:
                self._put(words)
                self._gap = " " if line.endswith(" ") else ""

    def _put(self, text: str) -> None:
        gap = self._gap if self.length else self._gap.strip("\n ")
        self._gap = ""
        before = "".join(self.parts[-5:-3])[-1:] if "₀" <= text[-1] <= "₉" else "x"
        if fraction := FRACTION.fullmatch("".join((before, *self.parts[-3:], gap, text))):
            text = f"{fraction[2]}/{normalize('NFKC', fraction[3])}"
            gap = self.parts[-4] or " " * bool(fraction[1])
            self.length -= sum(map(len, self.parts[-4:]))
            del self.parts[-4:]
        if self._struck and text.strip("~"):
            text = re.sub(r"(?s)\S.*", r"~~\g<0>~~", text.replace("~~", ""), count=1)
            if self._run == len(self.parts) and gap in ("", " "):
                self.parts[-1], text = self.parts[-1][:-2], text.replace("~~", "", 1)
                self.length -= 2
            self._run = len(self.parts) + 2
        self.parts += (gap, text)
        self.length += len(gap) + len(text)
