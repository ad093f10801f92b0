"""Word-processor files and presentations: the trees of Office Open XML, renamed to HTML.

python-docx and python-pptx open the files, and the writer of HTML pages writes the text, so that
exponents, formulas, tables and headings look as those of pages.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.retrievers.formats.encodings import Extract, joined
from ragspec.retrievers.formats.html import read_tree
from ragspec.retrievers.formats.readers import left_out, parsing

if TYPE_CHECKING:
    from lxml.etree import _Element

FORMULA_NAMES = {
    "f": "mfrac", "sSup": "msup", "sSub": "msub", "sSubSup": "msubsup", "rad": "rad",
    "nary": "nary", "func": "func", "sPre": "sPre", "limLow": "munder", "limUpp": "mover",
    "mr": "mtr",
}  # fmt: skip
HTML_NAMES = FORMULA_NAMES | {
    "p": "p", "tbl": "table", "tr": "tr", "tc": "td", "br": "br", "cr": "br", "oMath": "math",
}  # fmt: skip
MARKS = {"begChr": "(", "sepChr": "|", "endChr": ")", "chr": "∫"}  # of formulas, by default
UNREAD = ("sym", "acc", "bar", "groupChr", "eqArr")
TEXTS = {"tab": " ", "noBreakHyphen": "-", "sym": "\ufffd"}
TEXTS |= {"footnoteReference": "[{}]", "endnoteReference": "[endnote {}]"}
# Deletions and moves that are tracked, second copies, tab stops, and properties of formulas.
DROPPED = ("del", "moveFrom", "Fallback", "tabs", *(f"{name}Pr" for name in FORMULA_NAMES))
STRUCK = '*/*[contains(name(), "strike")][not(@*="0" or @*="false" or @*="off")]'
STRUCK += ' | */@strike[.!="noStrike"]'
RUNNING = ("dt", "ftr", "sldNum", "hdr")  # placeholders that every slide has
HEADINGS = {"title": "h1"} | {f"heading {level}": f"h{min(level, 6)}" for level in range(1, 10)}


def attribute(element: "_Element", path: str) -> str:
    """Return the first attribute at a path of local names, "" without it."""
    *steps, name = path.split("/")
    if steps:
        element = element.find("/".join(f"{{*}}{step}" for step in steps))
    items = [] if element is None else element.items()
    return next((value for key, value in items if key.rpartition("}")[2] == name), "")


def read_part(part: "_Element", counts: Counter[str], styles: Mapping[str, str]) -> Extract:
    """Return the text of a tree of Office Open XML.

    Args:
        counts: What is left out, and how often; it is added to.
        styles: The HTML name of each style of paragraphs that is a heading or a list.
    """
    from lxml import etree
    from lxml.builder import E

    parser = etree.XMLParser(recover=True, resolve_entities=False)  # an undefined entity stays one
    root = etree.fromstring(etree.tostring(part), parser)
    for row in list(root.iterfind(".//{*}tr/{*}trPr/{*}del/../..")):
        row.tag = "del"
    etree.strip_tags(root, "{*}sdt", "{*}sdtContent", "{*}customXml", "{*}smartTag", "{*}proofErr")
    changes = root.iter("{*}del", "{*}moveFrom")
    counts["tracked deletions"] += sum(bool(len(element)) for element in changes)
    for element in root.iter("{*}d", "{*}nary"):  # brackets and operators are properties
        properties = (each for first in element[:1] for each in first)
        marks = MARKS | {str(e.tag).rpartition("}")[2]: attribute(e, "val") for e in properties}
        if element.tag.endswith("nary"):
            element.insert(0, E.t(marks["chr"]))
            continue
        for number, each in enumerate(element.iterfind("{*}e")):
            each.insert(0, E.t(marks["sepChr" if number else "begChr"]))
        element.append(E.t(marks["endChr"]))
    etree.strip_elements(root, *(f"{{*}}{name}" for name in DROPPED), with_tail=False)
    for element in list(root.iter(etree.Element)):
        name = str(element.tag).rpartition("}")[2]
        element.tail = None
        if name != "t":
            element.text = TEXTS.get(name, "").format(attribute(element, "id"))
        element.tag = HTML_NAMES.get(name, "span")
        counts["symbols of fonts, accents and line breaks of formulas"] += name in UNREAD
        if name == "tc" and (span := attribute(element, "tcPr/gridSpan/val")):
            element.set("colspan", span)
        if name == "p":
            style = styles.get(attribute(element, "pPr/pStyle/val"), "p")
            numbered = style == "li" or element.find("{*}pPr/{*}numPr") is not None
            counts["automatic numbers and bullets"] += numbered
            element.tag = "li" if numbered and style == "p" else style
        elif name == "r":
            element.tag = shape_of(element)
    return read_tree(root)


def shape_of(run: "_Element") -> str:
    """Return "sup", "sub", "del" or "span" for a run of text; a run joins a like one before it."""
    shift = attribute(run, "rPr/vertAlign/val") or attribute(run, "rPr/baseline")
    high = shift == "superscript" or shift.rstrip("%").strip("0").isdigit()
    plain = "del" if run.xpath(STRUCK) else "span"
    name = "sup" if high else "sub" if shift == "subscript" or shift.startswith("-") else plain
    before = run.getprevious()
    if name != "span" and before is not None and before.tag == name:
        run[:0] = list(before)
    return name


def read_docx(path: Path, data: bytes) -> Extract:
    """Return the text of a word-processor file with its headings, and the notes at the foot."""
    import docx
    from lxml import etree

    notes = left_out(path, data)
    counts, styles, at_foot, running = Counter[str](), dict[str, str](), list[Any](), 0
    with parsing(path):
        file = docx.Document(BytesIO(data))
        body, title = file.element.body, (file.core_properties.title or "").strip()
        elements = {attribute(each, "styleId"): each for each in file.styles.element}
        for name, style in elements.items():
            numbered = style.find("{*}pPr/{*}numPr") is not None
            pair = style, elements.get(attribute(style, "basedOn/val"))
            names = [attribute(each, "name/val").lower() for each in pair if each is not None]
            tags = [HEADINGS[each] for each in names if each in HEADINGS] + ["li"] * numbered
            styles |= {name: tags[0]} if tags else {}
        for relation in file.part.rels.values():
            kind = relation.reltype.rpartition("/")[2]
            if kind in ("footnotes", "endnotes"):
                part = etree.fromstring(relation.target_part.blob)
                at_foot += [(f"{kind[:-1]}Reference", note) for note in part]
            elif kind in ("header", "footer") and any(relation.target_part.element.itertext()):
                running += 1
    parts = [read_part(body, counts, styles)]
    for name, note in at_foot:
        if not attribute(note, "type"):  # one of a type is a separator
            text = read_part(note, counts, {}).text
            parts.append(Extract(f"{TEXTS[name].format(attribute(note, 'id'))} {text}"))
    counts["headers and footers"] = running
    notes += [f"{count} {what} left out" for what, count in counts.items() if count]
    return replace(joined(parts, title or parts[0].title), notes=tuple(notes))


def read_pptx(path: Path, data: bytes) -> Extract:
    """Return the slides of a presentation, each with the speaker's notes."""
    import pptx

    notes, counts = left_out(path, data), Counter[str]()
    with parsing(path):
        file = pptx.Presentation(BytesIO(data))
        title, every = (file.core_properties.title or "").strip(), list(file.slides)
    slides = [Extract("")] * len(every)
    for number, slide in enumerate(every):
        if slide.element.get("show") == "0":
            notes.append(f"the hidden slide {number + 1} left out")
            continue
        for shape in list(slide.element.iter("{*}sp")):
            if attribute(shape, "nvSpPr/nvPr/ph/type") in RUNNING:
                counts["headers and footers"] += bool("".join(shape.itertext()).strip())
                shape.getparent().remove(shape)
        with parsing(path):
            frame = slide.notes_slide.notes_text_frame if slide.has_notes_slide else None
            spoken = "" if frame is None else frame.text.strip()
            named = getattr(slide.shapes.title, "text", "").split()  # one may be a picture
        texts = [read_part(slide.element, counts, {}).text, *[f"Notes: {spoken}"] * bool(spoken)]
        heading = " ".join(named) or f"{title or path.name}, slide {number + 1}"
        slides[number] = Extract("\n\n".join(texts), headings=((0, heading),))
    notes += [f"{count} {what} left out" for what, count in counts.items() if count]
    return replace(joined(slides, title, "slide"), notes=tuple(notes))
