"""Office files and a book with what readers must know of their formats."""

import zipfile
from copy import deepcopy
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Any

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"
PICTURE_TITLE = """<p:pic xmlns:p="http://schemas.openxmlformats.org/presentationml/2006/main">
<p:nvPicPr><p:cNvPr id="9" name="t"/><p:cNvPicPr/><p:nvPr><p:ph type="title"/></p:nvPr></p:nvPicPr>
<p:blipFill/><p:spPr/></p:pic>"""
FORMS = f"<w:AlternateContent><w:Choice/>{2 * '<w:{0}><w:t>{1}</w:t></w:{0}>'}</w:AlternateContent>"
TRACKED = f"""<w:p xmlns:w="{WORD}" xmlns:m="{MATH}"><w:pPr><w:rPr><w:del/></w:rPr></w:pPr>
<w:r><w:t>It is</w:t><w:ptab/></w:r><w:del><w:r><w:delText>old</w:delText></w:r></w:del>
<w:ins><w:r><w:t>new: </w:t></w:r></w:ins><m:oMath><m:f><m:fPr/><m:num><m:r><m:t>a+b</m:t></m:r>
</m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f><m:rad><m:deg/><m:e><m:r><m:t>y</m:t></m:r></m:e>
</m:rad><m:d><m:dPr><m:begChr m:val="["/><m:sepChr m:val=","/><m:endChr m:val="]"/></m:dPr>
<m:e><m:eqArr><m:e><m:r><m:t>u&amp;</m:t></m:r><m:r><m:t>=1</m:t></m:r></m:e><m:e><m:r><m:t>w</m:t>
</m:r></m:e></m:eqArr></m:e><m:e><m:r><m:t>v</m:t></m:r></m:e></m:d><m:nary><m:sub/><m:sup><m:d><m:e><m:r><m:t>n</m:t></m:r></m:e></m:d>
</m:sup><m:e><m:r><m:t>x</m:t></m:r></m:e></m:nary><m:f><m:fPr><m:type m:val="noBar"/></m:fPr>
<m:num><m:r><m:t>n</m:t></m:r></m:num><m:den><m:r><m:t>k</m:t></m:r></m:den></m:f></m:oMath>
<w:r><w:sym/></w:r><w:r><w:rPr><w:position w:val="-8"/><w:sz w:val="14"/></w:rPr>
{FORMS.format("Other", 2)}</w:r>
<w:r><w:rPr><w:position w:val="2"/><w:sz w:val="13"/></w:rPr>
{FORMS.format("Choice", 3)}</w:r><w:altChunk/>
<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:ddList><w:result w:val="1"/><w:listEntry/>
<w:listEntry w:val="Red"/></w:ddList><w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox>
</w:ffData></w:fldChar><w:fldChar w:fldCharType="end"/></w:r><w:r><w:ruby><w:rt><w:r>
<w:t>to</w:t></w:r></w:rt><w:rubyBase><w:r><w:t>東</w:t></w:r></w:rubyBase></w:ruby></w:r></w:p>"""
FIELDS = ("begin", "EQ ", "begin", "separate", "5", "end", "separate", "7 €", "end", "begin", "8 €")
SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
SHARED = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
SHARED = f'<Override PartName="/xl/sharedStrings.xml" ContentType="{SHARED}"/></Types>'
RICH = "<r><t>10</t></r><r><rPr><vertAlign val='superscript'/></rPr><t>-6</t></r><r><t> </t></r>"
RICH += "<r><rPr><strike/></rPr><t>5</t></r></si><si><t>_x005F_x000A_</t>"
PAGE = "<html><body><h1>{0}</h1><p>Text of {0}.</p></body></html>"
FORMATS: list[tuple[Any, str, str]] = [
    (5, '0" kg"', "5 kg"), (12, '0"%"', "12%"), (12, "0\\%", "12%"), (-45, '0" (%)"', "-45 (%)"),
    (0.1234, "0.00 %", "12.34 %"), (0.125, "0.#_)%", "12.5%"), (0.005, "0%", "0.5%"),
    (1234.5, '#,##0.00\\ "€"_-;-0', "1234.50 €"), (-5, '0;[Red]\\(0" loss")', "-5 loss"),
    (0.5, "[$EUR] 0.00", "EUR 0.50"), (1234, "00000", "01234"), (1234, '0.0,"k"', "1234"),
    (3, '[<5]0" g";0" kg"', "3"), (10**30, "0.0", f"{10**30}.0"), (0.5, "# ?/?", "0.5"),
    (7, "#", "7"), (-5, '0;"minus "0', "minus 5"), (1.5, "hh:mm", "12:00:00"),
    (timedelta(hours=45.5), "[h]:mm", "45:30:00"), (timedelta(hours=-1.5), "[h]:mm", "-1:30:00"),
    (datetime(2024, 5, 1, 10, 0, 0, 987000), "yyyy-mm-dd hh:mm", "2024-05-01 10:00:00"),
    (time(0, 0, 2, 5000), "m:s.0", "00:00:02.005"), (time(0, 0, 2, 5000), "h:mm:ss", "00:00:02"),
    (timedelta(0, 1.5), "[s].0", "0:00:01.500"), ("1:02.500000", "@", "1:02.500000"),
]  # fmt: skip


def docx(path: Path) -> None:
    import docx
    from lxml import etree

    file = docx.Document()
    file.add_heading("The pump", 1)
    line = file.add_paragraph("It lifts 10")
    line.add_run("6").font.superscript = True
    line.add_run(" litres of CO")
    styles = [file.styles.add_style(name, 2) for name in ("Low", "Gone", "Late")]
    styles[0].font.subscript, styles[1].font.strike, styles[2].base_style = True, True, styles[1]
    line.add_run("2", styles[0])
    runs = [line.add_run(each) for each in "567"]
    runs[0].style, runs[1].style, runs[1].font.strike = styles[2], styles[2], False
    runs[2].font.strike, runs[2].font.hidden = True, True
    runs[2]._r.rPr.find("{*}strike").set(f"{{{WORD}}}val", "off")
    table = file.add_table(3, 2)
    for cell, text in zip(table._cells, ("Part", "Price", "Seal", "4.50", "-", "-"), strict=True):
        cell.text = text
    table.rows[1].height = 9
    etree.SubElement(table.rows[0]._tr, f"{{{WORD}}}sdt").append(table.rows[0]._tr.tc_lst[1])
    etree.SubElement(table.rows[2]._tr.get_or_add_trPr(), f"{{{WORD}}}del")
    for row, count in ((1, "2"), (0, "0")):
        before = etree.SubElement(table.rows[row]._tr.get_or_add_trPr(), f"{{{WORD}}}gridBefore")
        before.set(f"{{{WORD}}}val", count)
    custom = {f"{{{WORD}}}id": "1", f"{{{WORD}}}customMarkFollows": "1"}
    etree.SubElement(line.add_run()._r, f"{{{WORD}}}footnoteReference", custom)
    for kind in ("footnote", "endnote"):
        for each in ({f"{{{WORD}}}id": number} for number in "223"):
            etree.SubElement(line.add_run()._r, f"{{{WORD}}}{kind}Reference", each)
        style = '<w:pPr><w:pStyle w:val="ListNumber"/></w:pPr>'
        note = f"<w:p>{style}<w:r><w:t>{kind}</w:t></w:r></w:p>"
        blob = f'<n xmlns:w="{WORD}"><n id="2">{note}</n></n>'.encode()
        uri = docx.opc.packuri.PackURI(f"/word/{kind}s.xml")
        file.part.relate_to(docx.opc.part.Part(uri, "text/xml", blob), f"/{kind}s")
    cap = file.add_paragraph("f")._p.get_or_add_pPr()
    etree.SubElement(cap, f"{{{WORD}}}framePr").set(f"{{{WORD}}}dropCap", "drop")
    etree.SubElement(etree.SubElement(cap, f"{{{WORD}}}rPr"), f"{{{WORD}}}del")
    file.add_paragraph("irst", style="List Bullet")
    for text in FIELDS:  # each in a paragraph
        run = file.add_paragraph().add_run("" if text.isalpha() else text)
        if text.isalpha():
            etree.SubElement(run._r, f"{{{WORD}}}fldChar", {f"{{{WORD}}}fldCharType": text})
    end = file.add_paragraph(style="List Number")._p.pPr
    etree.SubElement(etree.SubElement(end, f"{{{WORD}}}rPr"), f"{{{WORD}}}moveFrom")
    table._tbl.addnext(etree.fromstring(TRACKED.replace("\n", "")))
    style = '<w:style xmlns:w="{}" w:styleId="Untyped"/>'
    file.styles.element.append(etree.fromstring(style.format(WORD)))
    file.sections[0].header.paragraphs[0].text = "ACME"
    file.save(str(path))


def pptx(path: Path) -> None:
    import pptx
    from lxml import etree

    file = pptx.Presentation()
    for title, hidden in (("Goals", False), ("Secret", True), ("Sales", False)):
        slide = file.slides.add_slide(file.slide_layouts[1])
        slide.shapes.title.text = title
        slide.placeholders[1].text = f"About {title}"
        slide._element.set("show", str(not hidden).lower())
    slide.notes_slide.notes_text_frame.text = "Speak slowly"
    run = slide.notes_slide.notes_text_frame.paragraphs[0].add_run()
    run.text = "2"
    run.font._element.set("baseline", "30000")
    for field in (None, "slidenum"):
        box = deepcopy(slide.notes_slide.notes_placeholder._element)
        slide.notes_slide.shapes._spTree.append(box)
        for each in box.iter("{*}r") if field else ():
            each.set("type", field)
    slide.shapes.add_table(1, 2, 0, 0, 9, 9).table.cell(0, 1).text = "17"
    last = file.slides.add_slide(file.slide_layouts[6])
    last.shapes._spTree.append(etree.fromstring(PICTURE_TITLE))
    file.save(str(path))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("ppt/comments/modernComment_1.xml", "")


def xlsx(path: Path) -> None:
    import openpyxl
    from openpyxl.cell.rich_text import CellRichText, InlineFont, TextBlock

    file = openpyxl.Workbook()
    sheet = file.active
    sheet.title = "Prices"
    sheet.append(["Item_x000D_", "Price", "Since"])
    sheet.append(["Seal", 4.5, datetime(2026, 3, 1)])
    sheet.append([])
    sheet.append(["Hose", 0.25])
    sheet["B4"].number_format, sheet["C4"] = "0.0%", "=B2*2"
    sheet["D4"] = '=""'
    sheet["D2"] = openpyxl.worksheet.formula.ArrayFormula("D2", "=A1:A3*2")
    sheet["E2"] = CellRichText(TextBlock(InlineFont(strike=True), "a"), "b")
    sheet["A4"].font, sheet.row_dimensions[4].hidden = openpyxl.styles.Font(strike=True), True
    sheet.add_chart(openpyxl.chart.BarChart(), "E5")
    hidden = file.create_sheet("Old")
    hidden.sheet_state = "hidden"
    units = file.create_sheet("Units")
    for number, (value, form, _) in enumerate(FORMATS, 1):
        units.append([form, value])
        units.cell(number, 2).number_format = form
    file.save(path)
    change(path, '<dimension ref="A1:E4"', '<dimension ref="A1"')
    change(path, 't="inlineStr"><is><t>Seal</t></is>', 't="s"><v>0</v>')
    change(path, 't="inlineStr"><is><t>Since</t></is>', 't="s"><v>1</v>')
    change(path, '<c r="D4">', '<c r="D4" t="str">')
    change(path, "</Types>", SHARED)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("xl/sharedStrings.xml", f'<sst xmlns="{SHEET}"><si>{RICH}</si></sst>')


def change(path: Path, old: str, new: str) -> None:
    """Replace a string in every file of an archive, which has it somewhere."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    assert any(old.encode() in part for part in parts.values())
    with zipfile.ZipFile(path, "w") as file:
        for name, part in parts.items():
            file.writestr(name, part.replace(old.encode(), new.encode()))


def epub(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("META-INF/container.xml", '<c><rootfile full-path="o/b.opf"/></c>')
        item = '<item id="{0}" href="{0}%20.xhtml"/><itemref idref="{0}"/>'.format
        lost = '<item id="l" href="l.xhtml"/><itemref idref="l"/><item id="x"/><itemref idref="x"/>'
        file.writestr("o/b.opf", f"<p><title>The Book</title>{''.join(map(item, 'bac'))}{lost}</p>")
        for name in "ab":
            file.writestr(f"o/{name} .xhtml", PAGE.format(name))
        file.writestr("o/c .xhtml", "<html><body><svg><text>Cover</text></svg>")
