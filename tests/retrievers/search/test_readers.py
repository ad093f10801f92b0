"""Readers by suffix: office files, books, mail, notebooks, tables, JSON and manual pages."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ragspec.errors import DocumentError, MissingExtraError
from ragspec.retrievers.search.documents import Document, load_document, load_documents
from ragspec.retrievers.search.passage_index import PassageIndex
from tests.support.office_files import FORMATS, change, docx, epub, pptx, xlsx
from tests.support.text_files import (
    CELLS,
    DEFINED,
    HIDING,
    LATIN,
    MAIL,
    MAILBOX,
    MAN,
    MDOC,
    MDOC_READ,
    NESTED,
    NESTED_MACRO,
    ODD,
    ODD_READ,
    OLD,
    READ,
    ROFF,
    SEALED,
    TWO,
    forms,
    nested,
    write,
)
from tests.support.toy_pdf import pdf_of

BOOK = "b\n\nText of b.\n\na\n\nText of a."
FORM = "To,Ann\nBy,Bob\nNet,5\n\nNo,7\nAt,Bonn\n"
MAKERS = {"docx": docx, "pptx": pptx, "xlsx": xlsx, "epub": epub, "pdf": write(pdf_of("A fox."))}
# The text of a file by its name, without a title or notes.
TEXTS: dict[str, tuple[str | bytes, str]] = {
    "NEWS": ("From 2019 on:\nNote: A", "From 2019 on:\nNote: A"),
    "j.eml": (ODD + b"Content-Type: text/plain; x*\n\nHi", ODD_READ),
    "p.eml": (b"To: B\nContent-Type: text/enriched\n\n" + b"<param><nofill>" * 99999, "To: B"),
    "a.mht": (b"Content-Type: text/html\n\n<p>Hi", "Hi"),
    "a.ics": ("D:08\r\n 15\\, gr\xc3\r\n \xbc\\nn".encode("latin-1"), "D:0815, grü\nn"),
    "a.csv": (
        'Name;Price\n"Seal; red";4,50\nHose;"1\n2"\n',
        "Name\tPrice\nName: Seal; red; Price: 4,50\nName: Hose; Price: 1 2",
    ),
    "d.csv": ("\nA;B (x, y)\n1\u20282;3,5", "A\tB (x, y)\nA: 1 2; B (x, y): 3,5"),
    "e.csv": ("On, High ($|EUR)\n1, 2", "On\tHigh ($|EUR)\nOn: 1; High ($|EUR): 2"),
    "g.tsv": ("# A b\tC\nx\ty", "# A b\tC\n# A b: x; C: y"),
    "g.csv": ("sep=;\nA, x;B\n1,5;2", "A, x\tB\nA, x: 1,5; B: 2"),
    "h.csv": ("A, x;B, y\n1,5;2,5", "A, x\tB, y\nA, x: 1,5; B, y: 2,5"),
    "i.csv": ("a,b\nx,1\n\nT\nc,d\ny,2", "a\tb\na: x; b: 1\n\nT\nc\td\nc: y; d: 2"),
    "j.csv": ("a,b\n\nx,y\n\nv,w\nt,u", "a\tb\n\na: x; b: y\n\nv\tw\nt\tu"),
    "l.csv": ("1,Up,a|b|c\n2,In,d|e|f", "1\tUp\ta|b|c\n2\tIn\td|e|f"),
    "m.csv": (f"{FORM}\nc,d,e\nx,1,y", f"{FORM}\nc,d,e\nc: x; d: 1; e: y".replace(",", "\t")),
    "n.csv": ("a,b\nx,1\ny,z", "a\tb\na: x; b: 1\na: y; b: z"),
    "o.csv": ("a,b\n1,5\n2,z\n\nT\n", "a\tb\na: 1; b: 5\na: 2; b: z\n\nT"),
    "p.csv": ("a,b\n1,5\n2,z\n\n3,4,5", "a\tb\na: 1; b: 5\na: 2; b: z\n\n3\t4\t5"),
    "q.csv": ("R, V\n\nA;B;C\nu;1,5;v", "R, V\n\nA\tB\tC\nA: u; B: 1,5; C: v"),
    "r.csv": ("# R\n\nA,B\nu, 1", "# R\n\nA\tB\nA: u; B: 1"),
    "s.csv": ('"u; v",1,2\n"x; y",3,4', "u; v\t1\t2\nx; y\t3\t4"),
    "t.csv": ("K,L\n\na,b\nx,1", "K\tL\n\na\tb\na: x; b: 1"),
    "u.csv": ("K,L\n\nT,7\n\na,b,c\n1", "K\tL\n\nT\t7\n\na\tb\tc\na: 1"),
    "v.csv": ("a,b\nx,y\n\nc,d,e\n1", "a\tb\na: x; b: y\n\nc\td\te\nc: 1"),
    "w.csv": ("a,b\n\n,1\n,2\n\nc,d,e", "a\tb\n\nb: 1\nb: 2\n\nc\td\te"),
    "k.csv": ('A,B\n1,"x;\n\ty;\n\tz;"\n2,"u;\n\tv;"', "A\tB\nA: 1; B: x; y; z;\nA: 2; B: u; v;"),
    "y.csv": ("T\na,b\n\nU\nc,d,e\nx,y,z", "T\na\tb\n\nU\nc\td\te\nx\ty\tz"),
    "z.csv": ("1,M6\nNut,x\n\nPin,y\nBar,7", "1\tM6\nNut\tx\n\nPin\ty\nBar\t7"),
    "A.csv": ("K,7\n\nT\na,b,c\n\nx,y,1", "K\t7\n\nT\na\tb\tc\n\na: x; b: y; c: 1"),
    "C.csv": ('a; b\n1; "x; y"\n', "a\tb\na: 1; b: x; y"),
    "D.csv": ('a,b\n"u \\"v, w\\"",1', 'a\tb\na: u "v, w"; b: 1'),
    "E.csv": ('1, "x" y\n2, "z"', '1\t"x" y\n2\t"z"'),
    "F.csv": ('# A, "B\n\n// x, y\nc,d\n1', '# A, "B\n\n// x, y\nc\td\nc: 1'),
    "G.csv": ("# a, b\n# c, d\n1, 2", "# a, b\n# c\td\n# c: 1; d: 2"),
    "H.csv": ("#c,d\nx,y\nu,v", "#c\td\n#c: x; d: y\n#c: u; d: v"),
    "d.tsv": ('##v="4\n#A\tB\n1\t2', '##v="4\n#A\tB\n#A: 1; B: 2'),
    "a.tsv": ("1\t2\n3\t4\n", "1\t2\n3\t4"),
    "b.tsv": ("\tmm\nSeal\t4\n", "\tmm\nSeal; mm: 4".strip()),
    "c.csv": ("1e-3,$4,7:30\n1,2,3", "1e-3\t$4\t7:30\n1\t2\t3"),
    "c.json": ('{"a": 1, "b": 2, "a": 3}', "a: 1, 3\nb: 2"),
    "a.html": ("<pre>a\x0cb&#1;</pre>\ufffec", "a b \n\nc"),
    "messages.1.gz": (gzip.compress(b"plain log\n"), "plain log"),
}
# The name and the maker of a file, its text, its title ("" for its name), and a part of each note.
CASES: list[tuple[str, Callable[[Path], None], str, str, list[str]]] = [
    (
        "a.docx",
        docx,
        "The pump\n\nIt lifts 10^6 litres of CO₂~~5~~ 67[1][1][2][endnote 1][endnote 1][endnote 2]"
        "\n\nPart\tPrice\n\t\tSeal\t4.50\n\nIt is new: (a+b)/2√y[u=1; w,v]∫^(n) xn; k\ufffd₂3Red☒"
        "東(to)first\n\n7 €\n\n8 €\n\n[1] 1. footnote\n\n[endnote 1] 2. endnote",
        "The pump",
        ["1 headers", "1 fields", "1 embedded", "1 runs of hidden", "2 tracked", "1 symbols"],
    ),
    (
        "a.pptx",
        pptx,
        "Goals\n\nAbout Goals\n\n\n\nSales\n\nAbout Sales\n\n\t17\n\nNotes: Speak slowly^2\n\n"
        "Speak slowly^2",
        "",
        ["1 files of comments", "hidden slide 2"],
    ),
    (
        "a.xlsx",
        xlsx,
        "Item\tPrice\t_x000A_\nItem: 10^-6 ~~5~~; Price: 4.5; _x000A_: 2026-03-01; =A1:A3*2; ab\n\n"
        "Item: ~~Hose~~; Price: 25.0%; _x000A_: =B2*2\n\n"
        + "\n".join(f"{form}\t{text}" for _, form, text in FORMATS),
        "",
        ["1 charts", "1 drawings", "hidden rows", "exponents", "hidden sheet Old", "formulas"],
    ),
    ("a.epub", epub, BOOK, "The Book", ["text of svg", "chapter o/l.xhtml", "chapter o/x"]),
    (
        "a.eml",
        write(MAIL),
        "From: Ann <ann@example.org>\nSubject: Größe\n\nIt lifts 10^6 litres.",
        "Größe",
        ["attachment bill.pdf"],
    ),
    ("b.eml", nested, NESTED, "", ["attachment a.png", "attachment application/pkcs7"]),
    (
        "d.mht",
        write(b"\xef\xbb\xbf" + LATIN),
        "From: Ü\n\n> “q \n> sr”\n\nü\n\n\tc\n\n1. a b\n\n1 = 1\n\nTo: B\n\nHi!\n\nü\n\n"
        "X y <z>\nu\nv\n\nw\n\nHi!\n\nThanks\n\n--\nList a?b=c1\n\nHello world",
        "",
        ["text/css left out", "a binary part"],
    ),
    ("c.eml", write(SEALED), "From: Ann <ann@example.org>", "", ["pgp-encrypted left out"]),
    ("e.eml", forms(b"See 1 page.", b"1: 77,50"), "From: A\n\n1: 77,50", "", ["the plain text"]),
    ("f.eml", forms(b"Stay.", HIDING), "From: A\n\nStay at home", "", ["hidden-elements left"]),
    ("g.eml", forms(b"A b c http:x?8", b"A b c d"), "From: A\n\nA b c http:x?8", "", ["page"]),
    ("h.eml", forms(b"Pay 7 or 8", b"Pay 9"), "From: A\n\nPay 7 or 8", "", ["page left out"]),
    ("k.eml", write("From: Д\nContent-Type:a;charset=koi8-r".encode("koi8-r")), "From: Д", "", []),
    ("n.eml", write("From: 訳".encode("iso2022_jp")), "From: 訳", "", ["guessed"]),
    ("o.eml", write(b"To: =?L1?q?=FC?= \xfc\nContent-Type:a;charset=u16"), "To: ü ü", "", ["1252"]),
    ("l.eml", forms(b"Hi", TWO, b"multipart/mixed; boundary=C"), "From: A\n\nHi 7\n\nHi 7", "", []),
    ("m.eml", forms(b"Hi", b"Ho", b"text/plain"), "From: A\n\nHi\n\nHo", "", []),
    ("i.eml", forms(b"S", b"D:9\n  x\\,y", b"text/calendar"), "From: A\n\nS\n\nD:9 x,y", "", []),
    (
        "a.vcf",
        write(
            "N;ENCODING=QUOTED-PRINTABLE;X=1:M=C3=BC=\nl=20=0Al\nPHOTO;BASE64:/9j\n 4A\nT;B:a=b\n"
            "FN;CHARSET=windows-1252;QUOTED-PRINTABLE:J=F6rg\nKEY:data:a/b;base64,iV"
        ),
        "N;X=1:Mül  l\nPHOTO;BASE64:\nT;B:a=b\nFN;CHARSET=windows-1252:Jörg\nKEY:data:a/b;base64,",
        "",
        ["2 embedded files left out"],
    ),
    *(
        (
            name,
            write(data),
            "From: Ann <ann@example.org>\nSubject: Größe\n\nIt lifts 10^6 litres.\n\n"
            "From: Bob <b@example.org>\nSubject: Two\n\nFrom here on.\n\nFrom 2019 on.",
            "",
            ["attachment bill.pdf", "message 3 left out: it is no mail"],
        )
        for name, data in (("a.mbox", MAILBOX.replace(b"\n", b"\r")), ("Inbox", MAILBOX))
    ),
    (
        "a.ipynb",
        write(json.dumps({"cells": CELLS})),
        "# Sales\nBy year.\n\ntotal()\n\n17\n\ndone",
        "Sales",
        ["1 picture left"],
    ),
    ("b.ipynb", write(json.dumps(OLD)), "# Old\n\n1+1\n\n2\n\n3 kg\n\n*4*\n\nE", "Old", []),
    ("f.csv", write('1,"two\nlines"\n3,"x" y'), "1\ttwo lines\n3\tx y", "", ["some were removed"]),
    ("x.csv", write('1,"A\n2,B\n3,"C" D\n'), '1\t"A\n2\tB\n3\t"C" D', "", ["with them"]),
    (
        "B.csv",
        write('a,b\nx,"1"2\n' + "y,3\n" * 40 + 'z,"4\n5"'),
        "a\tb\na: x; b: 12\n" + "a: y; b: 3\n" * 40 + "a: z; b: 4 5",
        "",
        ["some were removed"],
    ),
    ("c.tsv", write('1\t"a\n2\tb'), '1\t"a\n2\tb', "", ["quotes are not closed"]),
    (
        "a.json",
        write('{"name": "P", "n": 12345678901234567890.10, "a": {"b": ["x", {"c": true}]}}'),
        "name: P\nn: 12345678901234567890.10\na.b[0]: x\na.b[1].c: true",
        "P",
        [],
    ),
    ("b.json", write("{// old\n}"), "{// old\n}", "", ["no valid JSON"]),
    (
        "a.jsonl",
        write('{"question": "\\u001b[1mQ?\\u001b[0m", "n": "3\\b2"}\n\n{bad\n{"a": [1, 2]}'),
        "question: Q?\nn: 3 2\n\n\n\n{bad\n\na: 1, 2",
        "",
        ["left as text, no valid JSON: 1 line, as 3"],
    ),
    (
        "pump.1",
        write(MAN),
        "NAME\n\npump - lift water\n\nOPTIONS\n\n-n, --no-cache\nKeep nothing; see ls(1).\n\n"
        "pump  a\n  b\n\none\ttwo\nlong cell\tx",
        "PUMP(1): lift water",
        [],
    ),
    (
        "pump.8.gz",
        write(gzip.compress(MDOC)),
        f"NAME\n\npump – lift water\n\nSYNOPSIS\n\n{MDOC_READ}",
        "PUMP(8): lift water",
        [],
    ),
    ("x.1", write(ROFF), f"NAMEN\n\n-v terminal\n\n{READ}", "X(1)", []),
    ("t.1", write(DEFINED), "N\n\n“a b”. bar(1) c d\n\ne  f\ng  h\n\nM\n\ni j", "T(1)", []),
    ("v.1", write(b".TH V 1\n.ig zz\na\n.zz\n.SH N\nx\n.zz"), "N\n\nx", "V(1)", []),
    ("w.1", write(NESTED_MACRO), "N\n\nx q", "W(1)", []),
    ("u.1", write(b".TH U 1\n.de X\n.X \\\\$* \\\\$*\n..\n.SH N\nx\n.X a"), "N\n\nx", "U(1)", []),
    ("c.1", write(b".TH C 1\n.SH N\na \\\\c\nb \\c\nc"), "N\n\na \\c b c", "C(1)", []),
    ("rm.1", write(b".TH RM 1\n.SH POPIS\n.P\nUvolni."), "POPIS\n\nUvolni.", "RM(1)", []),
    *((name, write(data), text, "", []) for name, (data, text) in TEXTS.items()),
]


PLACES = {
    "a.pptx": ("About Sales", "slide 3", "slide 1 to slide 3"),
    "a.xlsx": ("Hose", "sheet 1, row 4", "sheet 1, row 1 to sheet 2, row 25"),
    "a.mbox": ("From here", "message 2", "message 1 to message 2"),
    "a.ipynb": ("done", "cell 2", "cell 1 to cell 2"),
    "a.jsonl": ("a: 1, 2", "line 4", "line 1 to line 4"),
    "a.csv": ("Hose", "row 3", "row 1 to row 3"),
    "b.json": ("}", "line 2", "line 1 to line 2"),
    "a.eml": ("lifts", "", ""),
}


@pytest.mark.parametrize(
    ("name", "make", "text", "title", "notes"), CASES, ids=[case[0] for case in CASES]
)
def test_files_are_read_by_format(
    tmp_path: Path, name: str, make: Callable[[Path], None], text: str, title: str, notes: list[str]
) -> None:
    make(tmp_path / name)
    document = load_document(tmp_path / name)
    assert (document.text.strip(), document.title) == (text, title or name)
    assert len(document.notes) == len(notes), document.notes
    assert all(part in note for part, note in zip(notes, document.notes, strict=True))
    end = len(document.text)
    piece, place, whole = PLACES.get(name, ("", document.place(0, 0), document.place(0, end)))
    at = document.text.index(piece)
    assert document.place(at, at) == (place or f"characters {at} to {at}")
    assert document.place(0, end) == (whole or f"characters 0 to {end}")
    assert document.page_of(0) is None
    PassageIndex.build([document], embedder=None).save(tmp_path / "idx")
    assert PassageIndex.open(tmp_path / "idx").documents == (document,)


RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
OFFICE = "vnd.openxmlformats-officedocument."
LINK = f'<externalReference xmlns:r="{RELATIONS}" r:id="z"/>'
LOST = '<Relationship Id="z" Type="image" Target="NULL"/>'


@pytest.mark.parametrize(
    ("make", "suffix", "old", "new"),
    [
        (docx, "dotx", "document.main", "template.main"),
        (docx, "docm", f"{OFFICE}wordprocessingml.document", "vnd.ms-word.document.macroEnabled"),
        (pptx, "ppsx", "presentation.main", "slideshow.main"),
        (docx, "docx", "</Relationships>", f"{2 * LOST}</Relationships>"),
        (xlsx, "xlsx", "<fill><patternFill/></fill>", "<fill/>"),
        (xlsx, "xlsx", "<xf ", '<xf odd="1" '),
        (xlsx, "xlsx", '<cellStyle name="Normal"', "<cellStyle"),
        (xlsx, "xlsx", "</sheets>", f"</sheets><externalReferences>{LINK}</externalReferences>"),
        (xlsx, "xltm", 'W3CDTF">', 'W3CDTF">on '),
    ],
)
def test_office_files_that_packages_refuse_are_read(
    tmp_path: Path, make: Callable[[Path], None], suffix: str, old: str, new: str
) -> None:
    make(path := tmp_path / f"a.{make.__name__}")
    text = load_document(path).text
    change(path, old, new)
    assert load_document(path.rename(path.with_suffix(f".{suffix}"))).text == text


def test_strict_and_oversized_office_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for make in (docx, pptx, xlsx):
        make(path := tmp_path / f"strict.{make.__name__}")
        change(path, RELATIONS, "http://purl.oclc.org/ooxml/officeDocument/relationships")
        with pytest.raises(DocumentError, match="Strict Open XML; save it as an ordinary"):
            load_document(path)
    docx(path := tmp_path / "a.docx")
    change(path, "<w:document ", '<!DOCTYPE w [<!ENTITY e SYSTEM "e">]><w:document ')
    change(path, "litres of CO", "litres&e; of CO")
    assert "litres&e; of CO₂" in load_document(path).text
    epub(path := tmp_path / "a.epub")
    change(path, "<html>", "\1" * 99)
    with pytest.raises(DocumentError, match=r"a\.epub\Wo\Wb \.xhtml is binary"):
        load_document(path)
    xlsx(path := tmp_path / "a.xlsx")
    monkeypatch.setattr("ragspec.retrievers.formats.sheets.MAX_BYTES", 20)
    with pytest.raises(DocumentError, match="more than 20 characters"):
        load_document(path)


@pytest.mark.parametrize("suffix", MAKERS)
def test_damaged_files_are_refused_or_read(tmp_path: Path, suffix: str) -> None:
    MAKERS[suffix](path := tmp_path / f"a.{suffix}")
    whole = path.read_bytes()
    steps = range(0, len(whole), max(1, len(whole) // 16))
    for data in [whole[:at] + each for at in steps for each in (b"", bytes(40) + whole[at + 40 :])]:
        path.write_bytes(data)
        try:
            assert isinstance(load_document(path), Document)
        except DocumentError as error:
            assert path.name in str(error)


def test_bugs_of_the_library_are_not_reported_as_damaged_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragspec.retrievers.formats.html.TextWriter.close", lambda *_: 1 // 0)
    for make in (docx, pptx, epub):
        make(path := tmp_path / f"a.{make.__name__}")
        with pytest.raises(ZeroDivisionError):
            load_document(path)
    (tmp_path / "good.txt").write_text("Text.")
    assert {"ZeroDivisionError" in e.reason for e in load_documents(tmp_path).skipped} == {True}


def test_error_for_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "docx", None)
    epub(tmp_path / "a.docx")
    (tmp_path / "b.txt").write_text("Text.")
    with pytest.raises(MissingExtraError, match=r"pip install 'ragspec\[office\]'"):
        load_document(tmp_path / "a.docx")
    assert "ragspec[office]" in load_documents(tmp_path).skipped[0].reason
