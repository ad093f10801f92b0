"""Word-processor files, presentations and books, as HTML; trees of Office Open XML are renamed.

python-docx and python-pptx open the files, and the writer of HTML pages writes the text, so that
exponents, formulas, tables and headings look as those of pages.
"""

import re
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from posixpath import dirname, join, normpath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote
from zipfile import ZipFile

from ragspec.errors import DocumentError
from ragspec.retrievers.formats.encodings import Extract, clean, joined
from ragspec.retrievers.formats.html import WORD, read_page, read_tree
from ragspec.retrievers.formats.numbering import OFF, Numbering, attribute, number_slide, whole
from ragspec.retrievers.formats.readers import left_out, parsing

if TYPE_CHECKING:
    from lxml.etree import _Element

FORMULA_NAMES = {
    "f": "mfrac", "sSup": "msup", "sSub": "msub", "sSubSup": "msubsup", "rad": "rad",
    "nary": "nary", "func": "func", "sPre": "sPre", "limLow": "munder", "limUpp": "mover",
    "mr": "mtr", "stack": "stack", "eqArr": "stack",
}  # fmt: skip
HTML_NAMES = FORMULA_NAMES | {
    "p": "p", "tbl": "table", "tr": "tr", "tc": "td", "br": "br", "cr": "br", "oMath": "math",
    "ruby": "ruby", "rt": "rt",
}  # fmt: skip
MARKS = {"begChr": "(", "sepChr": "|", "endChr": ")", "chr": "∫"}  # of formulas, by default
UNREAD = ("sym", "acc", "bar", "groupChr")
TEXTS = {"tab": " ", "ptab": " ", "noBreakHyphen": "-", "sym": "\ufffd"}
COMPUTED = re.compile(r"\s*(EQ|AUTONUM\w*|LISTNUM)\b", re.I)  # fields without a result
LABELS = {"footnoteReference": "[{}]", "endnoteReference": "[endnote {}]"}
# Deletions and moves that are tracked, codes of fields, tab stops, and properties of formulas.
DROPPED = ("del", "moveFrom", "instruction", "tabs", *(f"{name}Pr" for name in FORMULA_NAMES))
STRUCK = '*/*[contains(name(), "strike")][not(@*="0" or @*="false" or @*="off")]'
STRUCK += ' | */@strike[.!="noStrike"]'
TEXT_MARKS = ("vertAlign", "strike", "vanish")  # how the names of marks of text end
RUNNING = ("dt", "ftr", "sldNum", "hdr")  # placeholders that every slide has
HEADINGS = {"title": "h1"} | {f"heading {level}": f"h{min(level, 6)}" for level in range(1, 10)}
# Parts of an archive, what packages refuse in them, as Office does not, and what takes its place.
_DATE = rb"[^>]*>(?!\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ?<)[^<]*"
REPAIRS = (
    ("[[]Con.*", rb"(wordprocessingml)\.template", rb"\1.document"),
    ("[[]Con.*", rb"ms-word\.\w+\.\w+", b"openxmlformats-officedocument.wordprocessingml.document"),
    ("[[]Con.*", rb"(presentationml|powerpoint)\.(?:slideshow|template)", rb"\1.presentation"),
    ("docProps/core.*", rb"<(\w+:(?:created|modified|lastPrinted))\b%s</\1>" % _DATE, b""),
    ("xl/styles.*", rb"(?s)\A(?>(.*?</(\w+:|)fonts>)).*?(?=<\2cellXfs\b)", rb"\1"),
    ("xl/styles.*", rb"(?s)\A(?>(.*?</(\w+:|)cellXfs>)).*(?=</\2styleSheet>)", rb"\1"),
    ("xl/styles.*", rb'\s(?!version|encoding|xmlns|\w+Id=|formatCode|val=)[\w:]+="[^"]*"', b""),
    ("xl/styles.*", rb"<(\w+:)Choice\b[^<]*(?:<(?!/?\1Choice\b)[^<]*)*</\1Choice>", b""),
    ("xl/styles.*", rb"</?\w+:(?:AlternateContent|Fallback)\b[^<>]*>", b""),
    ("xl/sharedStrings.*", b"_x005F_", b"_x005f_"),  # which openpyxl would unescape by itself
)


class Style(NamedTuple):
    """A style: its HTML name, its list, level there, the style that states it, and marks."""

    tag: str = "p"
    number: str = ""
    level: str = ""
    origin: str = ""
    marks: Mapping[str, "_Element"] = MappingProxyType({})  # of its text, by their tags


def read_part(
    part: "_Element",
    counts: Counter[str],
    labels: dict[tuple[str, str], str],
    styles: Mapping[str, Style] = MappingProxyType({}),
    numbering: Numbering | None = None,
) -> Extract:
    """Return the text of a tree of Office Open XML.

    Args:
        counts: What notes report, and how often; it is added to.
        labels: The label of each note at the foot, by the name of its references and its id; it is
            added to.
        styles: The styles of paragraphs and characters by name.
    """
    from lxml import etree

    numbers = Counter[str]()  # of notes at the foot, by the name of their references
    parser = etree.XMLParser(recover=True, resolve_entities=False)  # an undefined entity stays one
    root = etree.fromstring(etree.tostring(part), parser)
    for each in reversed(list(root.iter("{*}AlternateContent"))):  # the first choice with text
        each[:] = [*max(each, key=lambda form: any(t.text for t in form.iter("{*}t")), default=())]
    etree.strip_tags(root, "{*}sdt", "{*}sdtContent", "{*}customXml", "{*}smartTag", "{*}proofErr")
    drop_instructions(root, counts)
    apply_styles(root, styles)
    hidden = (each for each in root.iter("{*}vanish") if attribute(each, "val") not in OFF)
    counts["embedded documents left out"] += len(root.findall(".//{*}altChunk"))
    counts["runs of hidden text read"] += sum(e.find("../../{*}t") is not None for e in hidden)
    write_marks(root)
    drop_deletions(root, counts)
    for element in list(root.iter(etree.Element)):
        name = str(element.tag).rpartition("}")[2]
        element.tail = None
        if name != "t":
            element.text = TEXTS.get(name, "")
        element.tag = HTML_NAMES.get(name, "span")
        counts["symbols of fonts, accents and line breaks of formulas left out"] += name in UNREAD
        if name == "tc" and (span := attribute(element, "tcPr/gridSpan/val")):
            element.set("colspan", span)
        elif name == "tr" and (span := attribute(element, "trPr/gridBefore/val")) not in ("", "0"):
            element.insert(0, element.makeelement("td", colspan=span))
        elif name == "p":
            style = attribute(element, "pPr/pStyle/val")
            tag, number, level, origin = styles.get(style, Style())[:4]
            number = attribute(element, "pPr/numPr/numId/val") or number
            level = attribute(element, "pPr/numPr/ilvl/val") or level
            element.tag = "li" if tag == "p" and number not in ("", "0") else tag
            if numbering and (label := numbering.label(number, level, origin or style)):
                element.text = f"{label} "
        elif name == "r":
            element.tag = shape_of(element)
        elif name in LABELS:
            key = name, attribute(element, "id")
            is_counted = attribute(element, "customMarkFollows") in ("", *OFF)
            numbers[name] += is_counted and key not in labels
            mark = LABELS[name].format(numbers[name]) if is_counted else ""
            element.text = labels.setdefault(key, mark)
    return read_tree(root)


def drop_instructions(root: "_Element", counts: Counter[str]) -> None:
    """Drop what stands in fields before their results, such as results of fields within."""
    fields, pending = list[str](), list["_Element"]()  # the latest mark of each open field
    for each in root.iterfind(".//{*}r/*"):
        if kind := attribute(each, "fldCharType"):
            fields[len(fields) - (kind != "begin") :] = [kind] * (kind != "end")
        elif "begin" in fields:
            pending.append(each)
            counts["fields without a result left out"] += bool(COMPUTED.match(each.text or ""))
        while pending and "begin" not in fields:  # a field that is never closed loses no text
            pending.pop().tag = "instruction"


def drop_deletions(root: "_Element", counts: Counter[str]) -> None:
    """Drop what is no text, and join paragraphs without an end or of a large letter to the next."""
    from lxml import etree

    for row in list(root.iterfind(".//{*}tr/{*}trPr/{*}del/../..")):
        row.tag = "del"
    changes = [each for each in root.iter("{*}del", "{*}moveFrom") if len(each)]
    counts["tracked deletions left out"] += len(changes)
    marks = list(root.iterfind(".//{*}p/{*}pPr/{*}rPr/*"))
    ends = [e.getparent().getparent() for e in marks if e.tag.endswith(("}del", "}moveFrom"))]
    ends += root.xpath('//*[local-name()="framePr"]/@*[local-name()="dropCap" and .!="none"]/../..')
    etree.strip_elements(root, *(f"{{*}}{name}" for name in DROPPED), with_tail=False)
    for properties in dict.fromkeys(ends):
        paragraph = properties.getparent()
        after = next(paragraph.itersiblings("{*}p", "{*}tbl"), paragraph)
        if after is not paragraph and after.tag == paragraph.tag:
            start = len(after.findall("{*}pPr"))
            after[start:start] = paragraph[1:]
        elif "".join(paragraph.itertext()).strip():
            continue
        paragraph.getparent().remove(paragraph)


def apply_styles(root: "_Element", styles: Mapping[str, Style]) -> None:
    """Add marks to the runs that do not state them: of positions, then of styles of characters."""
    from lxml.builder import E

    for run in root.findall(".//{*}r/{*}rPr/{*}position/../.."):  # as LibreOffice raises text
        size, before = whole(attribute(run, "rPr/sz/val")), run.getprevious()
        usual = 0 if before is None else whole(attribute(before, "rPr/sz/val"), 22)
        if 0 < size < 0.9 * usual and not WORD.search("".join(run.itertext())):
            run.append(E.rPr(E.vertAlign(val=attribute(run, "rPr/position/val"))))
    for name in (*root.iter("{*}rStyle"), *root.iter("{*}pStyle")):
        marks = styles.get(attribute(name, "val"), Style()).marks
        for run in name.getparent().getparent().iter("{*}r") if marks else ():
            missing = (mark for tag, mark in marks.items() if run.find(f"{{*}}rPr/{tag}") is None)
            run.append(E.rPr(*map(deepcopy, missing)))


def write_marks(root: "_Element") -> None:
    """Write values of form fields, and brackets and operators of formulas, which are properties."""
    from lxml.builder import E

    for field in root.iter("{*}ddList", "{*}checkBox"):
        values = {str(e.tag).rpartition("}")[2]: attribute(e, "val") for e in field}
        texts = [attribute(each, "val") for each in field.iterfind("{*}listEntry")]
        value = values.get("result", values.get("checked", values.get("default", "0")))
        number = whole(value, value not in OFF)
        field.append(E.t("".join((texts or ["☐", "☒"])[number : number + 1])))
    for element in root.xpath('//*[local-name()="fPr"][*/@*="noBar"]/..'):
        element.tag = "stack"
    for text in root.iterfind(".//{*}eqArr//{*}t"):
        text.text = (text.text or "").replace("&", "")  # it lines up the equations
    for element in root.iter("{*}d", "{*}nary"):
        properties = (each for first in element[:1] for each in first)
        marks = MARKS | {str(e.tag).rpartition("}")[2]: attribute(e, "val") for e in properties}
        if element.tag.endswith("nary"):
            element.insert(0, E.t(marks["chr"]))
            continue
        for number, each in enumerate(element.iterfind("{*}e")):
            each.insert(0, E.t(marks["sepChr" if number else "begChr"]))
        element.append(E.t(marks["endChr"]))


def shape_of(run: "_Element") -> str:
    """Return "sup", "sub", "del" or "span" for a run of text; it joins a like one before it."""
    shift = attribute(run, "rPr/vertAlign/val") or attribute(run, "rPr/baseline")
    high = shift == "superscript" or shift.rstrip("%").strip("0").isdigit()
    if any(str(each.tag).endswith("noteReference") for each in run):
        return "span"
    plain = "del" if run.xpath(STRUCK) else "span"
    name = "sup" if high else "sub" if shift == "subscript" or shift.startswith("-") else plain
    before = run.getprevious()
    if name != "span" and before is not None and before.tag == name:
        before.extend(run)
        run.getparent().remove(run)
    return name


def style_of(name: str, elements: Mapping[str, "_Element"]) -> Style:
    """Return a style; what it does not state is that of the style that it is based on."""
    style = Style()
    for _ in elements:  # at most, should styles be based on each other
        if (element := elements.get(name)) is None:
            break
        tag = HEADINGS.get(attribute(element, "name/val").lower(), "p")
        number = attribute(element, "pPr/numPr/numId/val")
        marks = {e.tag: e for e in element.iterfind("{*}rPr/*") if e.tag.endswith(TEXT_MARKS)}
        style = Style(
            tag if style.tag == "p" else style.tag,
            style.number or number,
            style.level or attribute(element, "pPr/numPr/ilvl/val"),
            style.origin or (number and name),
            {**marks, **style.marks},
        )
        name = attribute(element, "basedOn/val")
    return style


def repair(data: bytes) -> bytes:
    """Return an archive without what packages refuse, such as references to files that it lacks."""
    from lxml import etree

    file, parser = BytesIO(data), etree.XMLParser(resolve_entities=False)
    with ZipFile(file, "a") as archive:
        names = set(archive.namelist())
        for name in names:
            forms = [(old, new) for each, old, new in REPAIRS if re.fullmatch(each, name)]
            is_list = name.endswith(".rels") and name[:3] not in ("ppt", "xl/")  # of references
            part = changed = archive.read(name) if forms or is_list else b""
            for old, new in forms:
                changed = re.sub(old, new, changed)
            root = etree.fromstring(part, parser) if is_list else etree.Element("none")
            for each in root.findall("{*}Relationship"):
                target = normpath(join("/", dirname(dirname(name)), each.get("Target", "")))
                if each.get("TargetMode") != "External" and target[1:] not in names:
                    root.remove(each)
                    changed = etree.tostring(root)
            if changed != part:
                archive.writestr(name, changed)
    return file.getvalue()


def read_docx(path: Path, data: bytes) -> Extract:
    """Return the text of a word-processor file with its headings, and the notes at the foot."""
    import docx
    from lxml import etree

    notes = left_out(path, data)
    counts, numbering, labels = Counter[str](), None, dict[tuple[str, str], str]()
    at_foot = dict[tuple[str, str], Any]()
    with parsing(path):
        file = docx.Document(BytesIO(repair(data)))
        body, title = file.element.body, (file.core_properties.title or "").strip()
        elements = {attribute(e, "styleId"): e for e in file.styles.element.iterfind("{*}style")}
        styles = {name: style_of(name, elements) for name in elements}
        for relation in file.part.rels.values():
            kind = relation.reltype.rpartition("/")[2]
            if kind == "numbering":
                linked = {name: style.number for name, style in styles.items()}
                numbering = Numbering(relation.target_part.element, linked, counts)
            elif kind in ("footnotes", "endnotes"):
                part = etree.fromstring(relation.target_part.blob)
                at_foot |= {(f"{kind[:-1]}Reference", attribute(n, "id")): n for n in part}
            elif kind in ("header", "footer") and any(relation.target_part.element.itertext()):
                counts["headers and footers left out"] += 1
    parts = [read_part(body, counts, labels, styles, numbering)]
    for key in sorted(filter(at_foot.__contains__, labels), key=lambda k: k[0], reverse=True):
        text = read_part(at_foot[key], counts, {}, styles, numbering).text
        parts.append(Extract(f"{labels[key]} {text}".lstrip()))
    notes += [f"{number} {what}" for what, number in counts.items() if number]
    return replace(joined(parts, title or parts[0].title), notes=tuple(notes))


def read_pptx(path: Path, data: bytes) -> Extract:
    """Return the slides of a presentation, each with the speaker's notes."""
    import pptx

    notes, counts = left_out(path, data), Counter[str]()
    with parsing(path):
        file = pptx.Presentation(BytesIO(repair(data)))
        title, every = (file.core_properties.title or "").strip(), list(file.slides)
    slides = [Extract("")] * len(every)
    for number, slide in enumerate(every):
        if slide.element.get("show") in OFF:
            notes.append(f"the hidden slide {number + 1} left out")
            continue
        with parsing(path):
            pages = [slide, slide.notes_slide] if slide.has_notes_slide else [slide]
            named = getattr(slide.shapes.title, "text", "").split()  # one may be a picture
        texts = list[str]()
        for element in (page.element for page in pages):
            for shape in list(element.iter("{*}sp")):
                fields = {each.getparent().get("type") for each in shape.iter("{*}t")}
                if fields == {"slidenum"} or attribute(shape, "nvSpPr/nvPr/ph/type") in RUNNING:
                    is_counted = not texts and any(map(str.strip, shape.itertext()))
                    counts["headers and footers left out"] += is_counted
                    shape.getparent().remove(shape)
            number_slide(element, counts)
            text = read_part(element, counts, {}).text
            texts += [f"Notes: {text}"] * bool(text) if texts else [text]
        heading = " ".join(named) or f"{title or path.name}, slide {number + 1}"
        slides[number] = Extract("\n\n".join(texts), headings=((0, heading),))
    notes += [f"{number} {what}" for what, number in counts.items() if number]
    return replace(joined(slides, title, "slide"), notes=tuple(notes))


def read_epub(path: Path, data: bytes) -> Extract:
    """Return the chapters of an electronic book; raise DocumentError if it is protected."""
    from lxml import etree

    notes, parser = left_out(path, data), etree.XMLParser(resolve_entities=False)
    with parsing(path), ZipFile(BytesIO(data)) as archive:
        names = set(archive.namelist())
        if names & {"META-INF/rights.xml", "META-INF/sinf.xml"}:
            raise DocumentError(f"{path} is protected by digital rights management.")
        container = etree.fromstring(archive.read("META-INF/container.xml"), parser)
        package = container.xpath("string(//@full-path)")
        root = etree.fromstring(archive.read(package), parser)
        hrefs = {e.get("id"): unquote(e.get("href")) for e in root.iterfind(".//{*}item[@href]")}
        spine = [each.get("idref", "") for each in root.iterfind(".//{*}itemref")]
        places = [normpath(join(dirname(package), hrefs.get(each, each))) for each in spine]
        chapters = [(place, archive.read(place)) for place in places if place in names]
        title = " ".join((root.findtext(".//{*}title") or "").split())
    notes += [f"the chapter {clean(place)} is missing" for place in places if place not in names]
    parts = [read_page(path / place, chapter) for place, chapter in chapters]
    notes = [*dict.fromkeys(note for part in parts for note in part.notes), *notes]
    title = title or next((part.title for part in parts), "")
    return replace(joined([part for part in parts if part.text], title), notes=tuple(notes))
