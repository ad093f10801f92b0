"""Automatic numbers of word-processor files and presentations."""

from pathlib import Path

import docx
import pptx
from lxml import etree

from ragspec.retrievers.formats.numbering import formatted
from ragspec.retrievers.search.documents import load_document

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"

NOTE = "1 automatic numbers in other letters or words are read as digits"


def level(number: int, start: int, form: str, text: str, more: str = "") -> str:
    values = f'<w:start w:val="{start}"/><w:numFmt w:val="{form}"/><w:lvlText w:val="{text}"/>'
    return f'<w:lvl w:ilvl="{number}">{values}{more}</w:lvl>'


# The definition of headings, that of clauses, and one that names the style of list 2.
DEFINITIONS = [
    level(0, 1, "upperRoman", "Part %1", '<w:pStyle w:val="Heading1"/>')
    + level(1, 1, "decimal", "%1.%2", '<w:isLgl/><w:pStyle w:val="Heading2"/>'),
    level(0, 3, "decimalZero", "%1.", '<w:pStyle w:val="ListNumber"/>')
    + level(1, 1, "lowerLetter", "(%2)")
    + level(2, 1, "lowerRoman", "%3)", '<w:lvlRestart w:val="1"/>')
    + level(3, 1, "bullet", "*")
    + level(4, 1, "ordinal", "%5"),
    '<w:numStyleLink w:val="ListNumber"/>',
]
ANEW = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride>'
LISTS = {1: (0, ""), 2: (1, ""), 3: (1, ANEW), 4: (2, ""), 9: (99, "")}
# The style of a paragraph, its list and level ("" for those of the style), and its label.
PARAGRAPHS = [
    ("Heading 1", "", "", "Part I"),
    ("Heading 2", "", "", "1.1"),
    ("Heading 2", "", "", "1.2"),
    ("Mine", "", "", "1.3"),  # based on it
    ("Normal", "2", "0", "03."),
    ("Normal", "2", "1", "(a)"),
    ("Normal", "2", "2", "i)"),
    ("Normal", "2", "1", "(b)"),
    ("Normal", "2", "2", "ii)"),  # level 2 begins again after level 0 alone
    ("Normal", "2", "3", ""),  # a bullet
    ("Normal", "", "", ""),
    ("Normal", "4", "0", "04."),  # a list of the same definition, by its style
    ("Normal", "2", "2", "i)"),
    ("Heading 1", "", "", "Part II"),
    ("Heading 2", "", "", "2.1"),
    ("Normal", "3", "0", "07."),  # a list that begins anew
    ("Normal", "3", "0", "08."),
    ("Normal", "2", "1", "(a)"),
    ("List Number", "", "", "09."),
    ("Normal", "2", "", "10."),
    ("List Number", "0", "", ""),  # no list
    ("Normal", "9", "0", ""),  # a list without a definition
    ("Normal", "5", "x", ""),  # none
    ("Normal", "2", "4", "1"),
]


# Level, kind and start of the numbers of each paragraph of a slide, and its label.
SLIDE = [
    (0, "arabicPeriod", "", "1."),
    (0, "arabicPeriod", "", "2."),
    (1, "alphaLcParenR", "", "a)"),
    (1, "alphaLcParenR", "", "b)"),
    (0, "arabicPeriod", "", "3."),
    (1, "alphaLcParenR", "", "a)"),
    (1, None, "", ""),  # an empty paragraph, which ends nothing
    (1, "alphaLcParenR", "", "b)"),
    (0, "", "", ""),
    (0, "arabicPeriod", "7", "7."),
    (0, "arabicPeriod", "7", "8."),
    (0, "arabicPeriod", "20", "20."),
    (0, "romanUcParenBoth", "", "(I)"),
    (0, "unknown", "", ""),
    (0, "circleNumDbPlain", "20", "⑳"),
    (0, "hebrew2Minus", "", "1-"),
    (2, "", "", "一."),  # by the style of the text
]


def test_paragraphs_of_slides_have_their_automatic_numbers(tmp_path: Path) -> None:
    file = pptx.Presentation()
    slide = file.slides.add_slide(file.slide_layouts[1])
    slide.shapes.title.text = "Steps"
    frame = slide.placeholders[1].text_frame
    lines = ["" if kind is None else f"text {at}" for at, (_, kind, *_) in enumerate(SLIDE)]
    frame.text = "\n".join(lines)
    bullet = f'<a:lvl3pPr xmlns:a="{DRAWING}"><a:buAutoNum type="ea1ChsPeriod"/></a:lvl3pPr>'
    frame._txBody.find("{*}lstStyle").append(etree.fromstring(bullet))
    for paragraph, (at, kind, start, _) in zip(frame.paragraphs, SLIDE, strict=True):
        paragraph.level = at
        if kind:
            numbers = etree.SubElement(paragraph._p.get_or_add_pPr(), f"{{{DRAWING}}}buAutoNum")
            numbers.attrib.update({"type": kind} | ({"startAt": start} if start else {}))
    file.save(str(tmp_path / "a.pptx"))
    document = load_document(tmp_path / "a.pptx")
    expected = [f"{each[-1]} {line}".strip() for each, line in zip(SLIDE, lines, strict=True)]
    lines = [line for line in document.text.splitlines() if line]
    assert lines[1:] == [line for line in expected if line]
    assert document.notes == (NOTE,)


def test_paragraphs_of_word_files_have_their_automatic_numbers(tmp_path: Path) -> None:
    def set_list(element: etree._Element, number: str, level: str) -> None:
        for old in element.findall("{*}numPr"):
            element.remove(old)
        properties = etree.SubElement(element, f"{{{WORD}}}numPr")
        for name, value in (("numId", number), ("ilvl", level)):
            if value:
                etree.SubElement(properties, f"{{{WORD}}}{name}", {f"{{{WORD}}}val": value})

    file = docx.Document()
    texts = [
        f'<w:abstractNum w:abstractNumId="{at}">{text}</w:abstractNum>'
        for at, text in enumerate(DEFINITIONS)
    ]
    texts += [
        f'<w:num w:numId="{at}"><w:abstractNumId w:val="{definition}"/>{more}</w:num>'
        for at, (definition, more) in LISTS.items()
    ]
    root = etree.fromstring(f'<w:numbering xmlns:w="{WORD}">{"".join(texts)}</w:numbering>')
    file.part.numbering_part.element[:] = list(root)
    file.styles.add_style("Mine", 1).base_style = file.styles["Heading 2"]
    for style, number in (("Heading 1", "1"), ("Heading 2", "1"), ("List Number", "2")):
        set_list(file.styles[style].element.get_or_add_pPr(), number, "")
    for at, (style, number, level, _) in enumerate(PARAGRAPHS):
        paragraph = file.add_paragraph(f"text {at}", style=style)
        if number:
            set_list(paragraph._p.get_or_add_pPr(), number, level)
    file.save(str(tmp_path / "a.docx"))
    document = load_document(tmp_path / "a.docx")
    lines = [line for line in document.text.splitlines() if line]
    expected = [f"{label} text {at}".strip() for at, (*_, label) in enumerate(PARAGRAPHS)]
    assert lines == expected
    assert document.headings[1][1] == "1.1 text 1"
    assert document.notes == (NOTE,)
    forms = {"russianUpper": "Я", "ganada": "29", "chineseCountingThousand": "二十九"}
    assert {form: formatted(29, form) for form in forms} == forms
