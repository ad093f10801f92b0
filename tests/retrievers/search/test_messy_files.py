"""Encodings, forms and edges of PDF pages, titles, and scripts without spaces."""

import zlib
from pathlib import Path

import pytest

from ragspec.errors import DocumentError
from ragspec.retrievers.search import upkeep
from ragspec.retrievers.search.documents import Document, load_document, load_documents
from ragspec.retrievers.search.passage_index import PassageIndex
from tests.support.toy_pdf import pdf_of

RUSSIAN = "Гарантия на прибор составляет три года. Обратитесь в сервис, если он не включается."
JAPANESE = "保証期間は三年です。電源が入らない場合はサービスにお問い合わせください。"
KOREAN = "보증 기간은 3년입니다."
GERMAN = "Größe – 5 µm\nZeile"
WESTERN = (
    "Õnnelik jõgi, šokolaad ja žanr", "Þeir óska að koma á dagskrá, þurfa að tilkynna það",
    "L'attività è già iniziata: però la città è più bella perché c'è",
    "És obligatòria l'assistència; així això és qüestió", "Drill 3¾ inches, then 5¾ inches deep",
    "Le décès; après ce succès, dès son accès très près",
)  # fmt: skip
CRLF = GERMAN.replace("\n", "\r\n")
MIXED = CRLF.encode() * 9 + CRLF.encode("cp1252") * 9
HEADS = [
    "# coding: koi8-r", ";; x\n;; -*- coding: koi8-r-unix -*-", "// vim: fileencoding=koi8-r",
    '@charset "koi8-r";', 'msgid ""\n"Content-Type: text/plain; charset=koi8-r\\n"',
    "%\\usepackage[latin1]{inputenc}\n\\usepackage[koi8-r]{inputenc}",
]  # fmt: skip
CODED = [f"{head}\n{RUSSIAN}" for head in HEADS]
GUESSES = {
    **dict.fromkeys(("cp1251", "koi8_r", "iso8859_5"), RUSSIAN),
    **dict.fromkeys(("cp932", "euc_jp", "iso2022_jp"), JAPANESE),
    "iso2022_kr": KOREAN,
    "koi8_u": "Гарантія на прилад діє три роки. Зверніться до сервісу, якщо він її не має.",
    "cp1254": "Doğu ve Batı adaları, Buşehr",
    "cp1250": "Limba română are o literă finală lungă; casă, masă, fată, mamă, bună",
    "iso8859_2": "Jeżeli gęś śpi, łóżko jest wolne",
    "mac_roman": "“Die Größe” – in Metern – für die Bänke",
    "cp1252": "Het auto´s kost één ½ £",
    "cp1257": "Svarbūs įvykiai, kurių metu mirė šį paketų",
    "iso8859_15": "L'œuvre coûte 5 € à l'élève",
}
LINE = "日本語の文書です。"
TURKISH = "İSTANBUL BÜYÜKŞEHİR BELEDİYESİ"
DECLARED = (
    (RUSSIAN, "cp1251", "windows-1251 x-cp1251 win-1251"),
    (JAPANESE, "cp932", "Shift_JIS x-sjis windows-31j"),
    ("שלום", "iso8859-8", "iso-8859-8-i"),
    ("gęś śpi", "iso8859_2", "iso-latin-2 latin-2"),
)
META = '<meta charset="{}"><p>{}</p>'


def load(tmp_path: Path, name: str, data: bytes) -> Document:
    (tmp_path / name).write_bytes(data)
    return load_document(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "data", "text", "note"),
    [
        *[
            ("a.html", META.format(label, text).encode(codec), text, "")
            for text, codec, labels in DECLARED
            for label in labels.split()
        ],
        ("a.html", META.format("undefined", RUSSIAN).encode("cp1251"), RUSSIAN, "guessed"),
        ("a.html", META.format("utf-16", RUSSIAN).encode(), RUSSIAN, ""),
        ("a.html", META.format("no-such", RUSSIAN).encode(), RUSSIAN, ""),
        *[("a.el", each.encode("koi8-r"), each, "") for each in CODED],
        ("a.txt", CRLF.encode(), GERMAN, ""),
        ("a.txt", CRLF.encode("utf-8-sig"), GERMAN, ""),
        ("a.txt", CRLF.encode("utf-16"), GERMAN, ""),
        ("a.txt", CRLF.encode("cp1252"), GERMAN, "cp1252 was guessed"),
        *[("a.txt", each.encode("cp1252"), each, "cp1252 was guessed") for each in WESTERN],
        ("a.txt", TURKISH.encode("cp1254"), TURKISH, "cp1254 was guessed"),
        ("a.txt", b"microcap\xae, " * 20, ("microcap®, " * 20).strip(), "cp1252 was guessed"),
        ("a.txt", LINE.encode("euc_jp"), LINE, "euc_jp was guessed"),
        *[("a.txt", each.encode(to), each, f"{to} was guessed") for to, each in GUESSES.items()],
        ("a.txt", b"one\r\r\ntwo\r\r\n", "one\ntwo", ""),
        ("a.txt", f"{JAPANESE}\n".encode("utf-16-le"), JAPANESE, "UTF-16 was guessed"),
        ("a.txt", f"{RUSSIAN}\n".encode("utf-16-be"), RUSSIAN, "UTF-16 was guessed"),
        ("a.txt", RUSSIAN.encode("utf-32"), RUSSIAN, ""),
        ("a.txt", RUSSIAN.encode() + b" \xff end", f"{RUSSIAN} \ufffd end", "1 undecodable byte"),
        ("a.log", MIXED, GERMAN * 18, "of 9 lines was guessed"),
        ("a.log", b"one\n" * 99 + b"\0end", "one\n" * 99 + " end", "1 control character as"),
        ("a.log", b"\x1b[31mE1234\x1b[0m failed", "E1234 failed", "2 control sequences"),
        ("a.txt", b"N\bNA\bAM\bME\bE", "NAME", "4 control sequences"),
    ],
)
def test_encodings_are_detected_and_guesses_noted(
    tmp_path: Path, name: str, data: bytes, text: str, note: str
) -> None:
    document = load(tmp_path, name, data)
    assert document.text.strip() == text
    assert note in "; ".join(document.notes) and bool(note) == bool(document.notes)


def test_repeated_lines_of_invoices_stay(tmp_path: Path) -> None:
    pages = [["ACME Ltd", f"Invoice number 100{n}", "For work", f"Amount due {n}0 EUR"]
             for n in range(1, 6)]  # fmt: skip
    text = load(tmp_path, "invoices.pdf", pdf_of(*pages)).text
    assert all(f"Invoice number 100{n}" in text and f"due {n}0 EUR" in text for n in range(1, 6))
    pages = [[f"Invoice 100{n}", "Amount due: 50 EUR", f"For {n}", "Total: 5"] for n in range(1, 6)]
    text = load(tmp_path, "sums.pdf", pdf_of(*pages)).text
    assert text.count("Amount due: 50 EUR") == text.count("Total: 5") == 5
    assert load(tmp_path, "lines.pdf", pdf_of(*["Same line"] * 5)).text.count("Same line") == 5


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (b"/FT /Tx", "Ann Lee"),
        (b"/FT /Tx /V (Ann\\012Lee)", "n: Ann\nLee"),
        (b"/FT /Ch /Opt [[(a) (A l)] [(b) (B)] [(c) (C)]] /V [(a) (c)] /TU (Who)", "Who: A l, C"),
        (b"/FT /Tx /V (Ann) /F 2", ""),
        (b"/FT /Tx /V (Ann) /Ff 8192", "Ann Lee"),
    ],
)
def test_form_values_are_text_of_their_page(tmp_path: Path, entries: bytes, text: str) -> None:
    data = pdf_of("Name", "Total", field="Ann Lee").replace(b"/FT /Tx", entries)
    document = load(tmp_path, "form.pdf", data)
    assert document.text == f"Name\n{text}".rstrip() + "\n\nTotal"
    assert document.notes == ("1 check boxes left out", "1 sticky notes left out")


def test_attached_files_xfa_and_layers_of_a_pdf_are_noted(tmp_path: Path) -> None:
    form = b"/NeedsRendering true /AcroForm << /Fields [] /XFA [(a) 1 0 R] >>"
    files = b"/Names << /EmbeddedFiles << /Names [(a) << /F (a) >>] >> >>"
    data = pdf_of("Wait").replace(b"/Catalog", b"/Catalog %s %s" % (form, files))
    data = data.replace(b"/Page ", b"/Page /Annots [<< /Subtype /FileAttachment >>] ")
    packed = zlib.compress(b"/OCProperties << /D << /OFF [1 0 R] >> >>")
    objects = b"9 0 obj << /ObjStm 0 /Length %d >> stream\n%s\nendstream endobj\ntrailer"
    notes = load(tmp_path, "a.pdf", data.replace(b"trailer", objects % (len(packed), packed))).notes
    parts = ("2 attached files left out", "1 forms in XFA left out")
    assert notes == (*parts, "layers that are switched off were read")


def test_texts_and_comments_on_a_page_need_no_form(tmp_path: Path) -> None:
    data = pdf_of("Name", field="Ann Lee").replace(b"/AcroForm", b"/None")
    data = data.replace(b"/Text", b"/Highlight /Contents (Why)")
    stamp = data.replace(b"/Widget", b"/Stamp", 1)
    typed = data.replace(b"/Widget", b"/FreeText /Contents (Ann Lee)", 1).replace(b"/AP", b"/None")
    for each in (stamp, typed):
        document = load(tmp_path, "a.pdf", each)
        assert document.text == "Name\nAnn Lee" and document.notes == ("1 comments left out",)


@pytest.mark.parametrize(
    ("before", "raised", "after", "text"),
    [
        ("It lifts 10", "-6", " litres", "10^-6"),
        ("A note", "3,4", " ends", "note^3,4"),
        ("m", "2", " is a unit", "m^2 is a unit"),
        ("2", "10", " = 1024", "2^10 = 1024"),
        ("log) Tj /F1 9 Tf -5 Ts (2", "", "8 = 3", "log28 = 3"),
        ("See ", "5", "6 and 3", "See 5"),
        ("A) Tj 0 1 -1 0 40 300 Tm (Q", "", "4 W12 turned", "Q4 W12 turned"),
        ("A) Tj 0 1 -1 0 80 300 Tm (m", "2", " upwards", "m^2 upwards"),
        ("A) Tj -1 0 0 -1 400 300 Tm (10", "23", " per mol", "10^23 per mol"),
        ("AAAA x", "2", " ends", "\U0001d434" * 4 + " x^2"),
        ("1.234,50 [7] Q4 x", "2", " ends", "1.234,50 [7] Q4 x^2"),
    ],
)
def test_raised_digits_of_a_pdf_follow_a_caret(
    tmp_path: Path, before: str, raised: str, after: str, text: str
) -> None:
    line = f"{before}) Tj /F1 7 Tf 5 Ts ({raised}) Tj 0 Ts /F1 12 Tf ({after}"
    data = pdf_of([line, "Next"])
    if "Q4 x" in before:  # a font without an ascent, for which pdfium has only boxes of the glyphs
        data = data.replace(b"/BaseFont", b"/FontDescriptor << /FontBBox [0 -9 9 9] >> /BaseFont")
    if before.startswith("AAAA"):  # letters outside the first 65536 characters
        mapped = b"begincmap 1 beginbfchar <41> <D835DC34> endbfchar endcmap"
        stream = b"99 0 obj\n<< /Length %d >>\nstream\n%s\nendstream\nendobj\n"
        data = data.replace(b"/BaseFont", b"/ToUnicode 99 0 R /BaseFont")
        data = data.replace(b"trailer", stream % (len(mapped), mapped) + b"trailer")
    assert text in load(tmp_path, "a.pdf", data).text


ARABIC = b"begincmap 1 beginbfchar <41> <06440627> endbfchar endcmap"
CHINESE = (
    b"/Type0 /Encoding /GBK-EUC-H /DescendantFonts [<< /Type /Font /Subtype /CIDFontType0 "
    b"/BaseFont /SimSun /CIDSystemInfo << /Registry (Adobe) /Ordering (GB1) /Supplement 2 >> "
    b"/FontDescriptor << /Type /FontDescriptor /FontName /SimSun /Flags 6 >> >>]"
)


@pytest.mark.parametrize(
    ("line", "old", "new", "text"),
    [
        ("A", b"/BaseFont", b"/ToUnicode 99 0 R /BaseFont", "\u0644\u0627"),
        ("\\260\\262) Tj 12 0 Td (\\273\\325", b"/Type1", CHINESE, "安徽"),
        ("Left) Tj 600 0 Td (Right", b"", b"", "Left"),
        ("A) Tj -1 0 0 -1 300 300 Tm (one) Tj -60 0 Td (two", b"A)", b")", "two one"),
        ("A) Tj 0 1 1 0 300 300 Tm (one) Tj 60 0 Td (two", b"A)", b")", "one two"),
        ("10) Tj 0 -20 Td 12 Tc (70", b"", b"", "10\n7 0"),
    ],
    ids=["two letters", "no font", "outside", "upside down", "mirrored", "cells"],
)
def test_pages_of_a_pdf_are_read_as_they_look(
    tmp_path: Path, line: str, old: bytes, new: bytes, text: str
) -> None:
    mapped = b"99 0 obj\n<< /Length %d >>\nstream\n%s\nendstream\nendobj\ntrailer"
    data = pdf_of(line).replace(b"trailer", mapped % (len(ARABIC), ARABIC)).replace(old, new)
    assert load(tmp_path, "a.pdf", data).text.strip() == text


def test_removed_lines_and_empty_pages_of_a_pdf_are_noted(tmp_path: Path) -> None:
    pages = [["The Handbook", f"Text {w}", f"more {w}", f"Page {n} of 4"]
             for n, w in enumerate("abcd", 1)]  # fmt: skip
    document = load(tmp_path, "a.pdf", pdf_of(*pages, ""))
    assert document.text.startswith(
        "The Handbook\nText a\nmore a\nPage 1 of 4\n\nText b\nmore b\n\nT"
    )
    assert document.notes[0] == "no text on pages 5"
    note = "6 running lines of page edges were removed, each stands once: The Handbook; Page 4 of 4"
    assert document.notes[1:] == (note,)
    assert len(document.digest) == 64 and len(document.pages) == 5
    PassageIndex.build([document], embedder=None).save(tmp_path / "one.idx")
    assert PassageIndex.open(tmp_path / "one.idx").documents == (document,)
    with pytest.raises(DocumentError, match="no text on 2 pages"):
        load(tmp_path, "b.pdf", pdf_of("", ""))


def test_title_of_front_matter_is_read_and_refreshed(tmp_path: Path) -> None:
    source = b"---\ntitle: 'The Pump'\ndraft: false\n---\n\n# Use\n\nText.\n"
    document = load(tmp_path, "a.md", source)
    assert document.title == "The Pump" and [text for _, text in document.headings] == ["Use"]
    assert load(tmp_path, "a.md", source.replace(b" 'The", b" >-\n The\n ")).title == "The Pump"
    assert load(tmp_path, "b.md", source.replace(b"title", b"date")).title == "Use"
    assert load(tmp_path, "c.md", source.replace(b" 'The", b"\n  en: 'The")).title == "Use"
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.html"
    page.write_text("<title>Old</title><p>Text.")
    PassageIndex.build(load_documents(page), embedder=None).save(tmp_path / "idx")
    page.write_text("<title>New</title><p>Text.")
    assert upkeep.refresh(tmp_path / "idx").changed == ("page.html",)


@pytest.mark.parametrize(
    ("texts", "query"),
    [
        (["这台机器的保修期为三年。", "请用清水清洁滤网。"], "保修期多长？"),
        (["保証期間は三年です。", "フィルターを水で洗います。"], "保証はいつまで"),
        (["보증 기간은 3년입니다.", "필터를 물로 씻으십시오."], "보증기간이 얼마나 됩니까"),
        (["การรับประกันสามปี", "ล้างไส้กรองด้วยน้ำ"], "รับประกันกี่ปี"),
        (["वारंटी तीन वर्ष की है।", "फ़िल्टर को पानी से धोएँ।"], "वारंटी कितने वर्ष"),
    ],
)
def test_scripts_without_spaces_are_searched(texts: list[str], query: str) -> None:
    for order in (texts, texts[::-1]):
        documents = [Document(f"{n}", "t", text) for n, text in enumerate(order)]
        index = PassageIndex.build(documents, embedder=None)
        assert index.search(query, 2)[0].passage.text == texts[0]


def test_passages_of_chinese_are_as_short_as_others() -> None:
    document = Document("a", "t", "保修期为三年，请联系服务部门" * 100)
    passages = PassageIndex.build([document], embedder=None).passages
    assert all(len(each.text) <= 130 for each in passages) and len(passages) > 8
