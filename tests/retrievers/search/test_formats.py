"""HTML and PDF pages as text: markup, page numbers, running lines and ligatures."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.retrievers.formats.html import read_html
from ragspec.retrievers.formats.pdf import cleaned, without_running_lines
from ragspec.retrievers.search.documents import load_document
from tests.support.toy_pdf import pdf_of

PAGE = """<!doctype html><html><head><title> A  page </title><style>p{}</style></head><body>
<nav>menu</nav><i aria-hidden=true>copy</i><svg><text>x</text></svg><h1>Main &amp; first</h1><p>One
<b>bold</b> word.</p><ul><li>alpha</li><li>beta</li></ul><script>var x = "<p>no</p>";</script>
<h2>Second</h2><noscript>n</noscript><pre>  keep
    this</pre><table><tr><td>a</td><td>b</td></tr></table></body></html>"""
W3, NEEDS = "xmlns:n='http://www.w3.org/1998/Math/", "required-namespace='"
HALF, POWER = "<mfrac><mn>1</mn><mn>2</mn></mfrac>", "<msup><mn>10</mn><mn>3</mn></msup>"
FORMULAS = [
    (f"<mn>2</mn>{HALF}", "2 1/2"), (f"{HALF}<mn>5</mn>", "1/2 5"), (HALF * 2, "1/2 1/2"),
    (
        "<mn>5</mn><mmultiscripts><mi>U</mi><none/><mn>2</mn><mprescripts/><mn>9</mn><mn>3</mn>"
        "</mmultiscripts><mi>x</mi>", "5 ₉^3U^2x",
    ),
    (f"<mn>5</mn>{POWER}", "5 10^3"), (f"{POWER}<mrow>{POWER}<mi>x</mi></mrow>", "10^3 10^3x"),
    ("<msqrt><mn>2</mn></msqrt><mn>3</mn>", "√2 3"), ("<mn>1</mn><mn>0</mn>", "10"),
    ("<mn>2</mn><mo>\u2062</mo><mi>x</mi>", "2x"), ("<mi>f</mi><mo>\u2061</mo><mi>x</mi>", "f x"),
    (f"{HALF.replace('mfrac', 'mfrac linethickness=0.0pt', 1)}<mfenced></mfenced>", "1; 2()"),
    (f"<msup>{HALF}<mn>2</mn></msup>", "(1/2)^2"),
    ("<mn>5</mn><mspace/><mi>kg</mi>", "5 kg"), ("<mn>5</mn><mtext>\xa0m</mtext>", "5 m"),
]  # fmt: skip


def test_visible_text_with_title_headings_and_notes() -> None:
    page = read_html(PAGE)
    assert page.title == "A page"
    assert page.text == (
        "Main & first\n\nOne bold word.\n\nalpha\nbeta\n\nSecond\n\n  keep\n    this\n\na\tb"
    )
    assert [heading for _, heading in page.headings] == ["Main & first", "Second"]
    assert all(page.text[start:].startswith(heading) for start, heading in page.headings)
    parts = ("hidden-elements", "svg", "noscript")
    assert page.notes == tuple(f"text of {part} left out" for part in parts)
    assert read_html("<title>Untitled 1</title><h2>Only <i>this</i></h2>t").title == "Only this"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<p>open<p>again", "open\n\nagain"),
        ("<head><title>t</title><p>head was never closed", "head was never closed"),
        ("</div></script>plain", "plain"),
        ("<div>a</p>x <picture></picture> y<ol><li><br>y</ol>", "a\nx y\n1.\ny"),
        ("<ol style='White-space: pre'>\n<li>a\nb<tr>\n<td>c<td>d", "1. a\nb\nc\td"),
        ("<p style='white-space: pre'>a\nb<b style=white-space:normal>\nc", "a\nb c"),
        ("<pre style=white-space:pre-wrap>a\n\n b</pre>", "a\n\n b"),
        ("a<br>b</br>c<BR></br>d", "a\nb\nc\nd"),
        ("<html><body>a</html>b<html><body><p>c", "a\n\nb\n\nc"),
        ("<script type='x'/>1</script>a<script/>b<script>2</script>", "ab"),
        ("<h3>a</H2>b<h4>c<i>d</i></h4>", "a\n\nb\n\ncd"),
        ("98<a role=doc-noteref>1</a>, <a epub:type=noteref><sup>2</sup></a>", "98^1, ^2"),
        ("<svg><title>icon</title></svg>text", "text"),
        ("x &lt; y &#8211; z <q>a <b>b</b></q>.", "x < y – z “a b”."),
        (
            "10<sup>6</sup> l.<sup>2</sup> 2<sup>31</sup>-1 2<sup>31-1</sup>",
            "10^6 l.^2 2^31-1 2^(31-1)",
        ),
        ("10<sup>-3</sup> m<sup>2</sup> x<sup>a<sup>b</sup></sup>", "10^-3 m^2 x^(a^b)"),
        ("CO<sub>2</sub> x<sub>i</sub> a<sub>i,j</sub>", "CO₂ x_i a_(i,j)"),
        ("the 1<sup>st</sup><sup>[3]</sup>", "the 1st[3]"),
        ("depth is&nbsp;<b>12</b>&nbsp;levels", "depth is 12 levels"),
        ("<select><option>One<option>Two</select>", "One\nTwo"),
        ("<table><tr><th>a<th>b<tr><td><p>1</p><td><p>x</p><p>y</p></table>", "a\tb\n1\tx y"),
        ("<table><tr><td>1<td><td>3<tr><td><td>2</table>", "1\t\t3\n\t2"),
        ("<table><tr><td><pre>1\n2</pre><td><pre>a\n  b</pre></table>", "1\n2\n\na\n  b"),
        ("<pre><b>def</b> f():\n    <i>re</i>turn\n\n    x</pre>", "def f():\n    return\n\n    x"),
        ("<pre>a<br>  b</pre>", "a\n  b"),
        ("<pre><b style=display:block>8</b>0<div>\n</div><p>c</p>\nd<hr>e", "8\n0\n\nc\nd\ne"),
        ("<pre><b><table><tr><td>1<td>x = 1<tr><td>2<td><pre>y</table>", "1\tx = 1\n2\ny"),
        ("E=<math><mi>m</mi><msup><mi>c</mi><mn>2</mn></msup></math>!", "E=mc^2!"),
        ("<math><mfrac><mrow><mi>a</mi> <mo>+</mo></mrow><mn>2</mn></mfrac></math>", "(a+)/2"),
        ("<math><mn>1</mn></math><math><mi>y</mi></math>", "1 y"),
        ("<math><mn>1</mn><br><mn>3</mn></math>", "1;3"),
        ("<math><mi>a</mi><annotation>\\frac</annotation></math>", "a"),
        ("<math><msqrt><mi>b</mi></msqrt><msub><mi>x</mi><mi>k</mi></msub></math>", "√bx_k"),
        *((f"<math>{source}</math>", text) for source, text in FORMULAS),
        ("2<sup>1</sup>/<sub>2</sub> <sup>3</sup>&frasl;<sub>4</sub>", "2 1/2 3/4"),
        ("(<sup>1</sup>/<sub>2</sub> x<sup>2</sup>/<sub>3</sub>", "(1/2 x^2/₃"),
        ("soft\xadhyphen zero\u200bwidth", "softhyphen zerowidth"),
        ("<ruby>東<rt>to</rt>京<rp>(<rt>kyo<rp>)</ruby>の<ruby>x</ruby>", "東京(tokyo)のx"),
        ("a<!-- hidden -->b<style>c</style>", "ab"),
        ("<table><tr><td rowspan=2>A<td>1<td colspan=2>x<td>y<tr><td>2", "A\t1\tx\t\ty\n\t2"),
        ("<table><tr><td rowspan=100>A<td colspan=' 02'>1<td>2<tr><td>3", "A\t1\t\t2\n\t3"),
        (
            "<table><tr><td rowspan=0 colspan=-9>A<td colspan=0>1<td>2<tr><td>3</table>4",
            "A\t1\t2\n\t3\n\n4",
        ),
        ("<table><tr><td colspan=5000>1<td>2", "1" + 1000 * "\t" + "2"),
        ("<table><tr><td>a<td rowspan=3>b<tr><td rowspan=2>c<td>1<tr><td>2", "a\tb\nc\t\t1\n\t\t2"),
        ("<table><tr><td colspan=2>a<td rowspan=2;>b<tr><td colspan=2%>c<td>1", "a\t\tb\nc\t\t\t1"),
        ("10<span style='font-size:6pt; Vertical-Align: super'>6</span>", "10^6"),
        ("CO<a style=vertical-align:sub>2</a><p style=vertical-align:sub>3</p>", "CO₂\n\n3"),
        ("<b style=vertical-align:sub>Name</b> of", "Name of"),
        (
            "<table><tr><td rowspan=2>4<td>5<tr style=text-decoration:line-through> <td>6</table>",
            "4\t5\n\t~~6~~",
        ),
        ("<p hidden style='text-decoration: red line-through'><b>5</b><br>x", "~~5 x~~"),
        ("a<button>S 5</button><button>10 Stop</button>.<label>Q</label>b", "a S 5 10 Stop. Q b"),
        ("<input value=7><input type=Email value=a@b><input type=hidden value=9> m", "7 a@b m"),
        ("<center>a</center>b<xmp>c\n d</xmp>e<search>f</search>", "a\n\nb\nc d\ne\n\nf"),
        ("<td>a<b style='top:0; Display: block'>b</b>c<b style=display:inline-block>d", "a b cd"),
        ("a<img style=display:block alt='Two boxes of the same'>b", "a\nTwo boxes of the same\nb"),
        ("e<sup>2a</sup> x<sup>ab</sup>", "e^(2a) x^ab"),
        ("<math><mfenced open='['><mi>a</mi><mn>2</mn></mfenced></math>", "[a,2)"),
        (f"<math><mfenced separators='; |'>{'<mi>x</mi>' * 4}</mfenced></math>", "(x;x|x|x)"),
        ("<math><mfrac><mn>1</mn><mrow><mn>2</mn><mi>a</mi></mrow></mfrac></math>", "1/(2a)"),
        ("let <img class=math alt='x_i&#1;'> be <img alt='$y$'><img alt=logo>", "let x_i be $y$"),
        ("<p>is <script type='math/tex'>a+b</script><script>c</script>", "is a+b"),
        ("<p style=display:grid>a 1<b>2 b</b><b>3", "a 1\n2 b\n3"),
        ("<b style=display:inline-flex><i>1</i><i>2</i></b>x", "1 2 x"),
        ("one<img alt='Three boxes, one above another'>5", "one Three boxes, one above another 5"),
        ("<div role=navigation>up</div><i aria-hidden=true>*</i>down", "down"),
        ("<body aria-hidden=true>behind a window", "behind a window"),
        ("<ol start=3.><li>a<li value=+9><p>b</p><p>c</p><li>d</ol>", "3. a\n\n9. b\n\nc\n\n10. d"),
        ("<ol type=a><li>x<ol reversed type=I><li>y<li>z</ol></ol>", "a. x\nII. y\nI. z"),
        ("a <del>5<b>0</b></del><ins>60</ins>", "a ~~50~~ 60"),
        ("<s>a<strike>b</strike><br>1</s>2<del><p>c<p>d</del>", "~~ab 1~~ 2\n\n~~c~~\n\n~~d~~"),
        ("<del><b><h2>c</h2></b>d<ol><li>e</ol>f</del>g", "~~c~~\n\n~~d~~\n~~1. e~~\n~~f~~ g"),
        ("<del><del><p>a<s>b</s></p></del> </del><del><pre>c\nd</pre></del>", "~~ab~~\n\n~~c\nd~~"),
        ("<pre>a\n <del>b\n c</del>d</pre>", "a\n ~~b\n c~~ d"),
        ("<table><tr><th><th>a<tr><td>b<td>1</table>", "\ta\nb\t1"),
        ("<ol type=i start=99><li value=x>q<ul><li><pre>  r</ul></ol>", "xcix. q\n\n  r"),
        ("<ol><li><b style=display:grid>a</b>c</ol>", "1. a\nc"),
        (f"<p {W3}MathML'><n:msup><n:mi>x</n:mi><n:mn>2</n:mn></n:msup><o:p>y</o:p>", "x^2y"),
        (f"<e:s><e:case {NEEDS}MathML'>a</e:case><e:case {NEEDS}X'>b</e:case><e:default>c", "a"),
        ("1<i epub:type='pagebreak'>2</i>3<i role=doc-pagebreak>4</i>5", "135"),
        (
            "<ol type=a start=26><li>a<li>b<li style='list-style: none'>c<li type=I>d</ol>"
            "<ul style='list-style-type: upper-latin'><li>e<li style=list-style-type:decimal>f",
            "z. a\naa. b\nc\nXXIX. d\nA. e\n2. f",
        ),
    ],
)
def test_html_fragments_are_read_as_text(source: str, text: str) -> None:
    assert read_html(source).text == text


def test_deeply_nested_page_loses_tags_but_no_text() -> None:
    page = read_html("<p>first" + "<div>" * 5000 + "last")
    assert page.text == "first last" and "nested too deeply" in page.notes[0]


@given(st.text(alphabet="<>/ab1 h&;!-\n\"'=") | st.text())
def test_headings_of_any_input_stand_in_its_text(source: str) -> None:
    page = read_html(source)
    text = page.text
    assert all(text[start : start + len(heading)] == heading for start, heading in page.headings)


def test_page_of_returns_page_numbers(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    data = pdf_of("Apples are red.", ["Pears are", "green."], "Plums are blue.")
    info = b"99 0 obj\n<< /Title (\\(anonymous\\)) >>\nendobj\ntrailer << /Info 99 0 R "
    path.write_bytes(data.replace(b"trailer << ", info))
    document = load_document(path)
    for number, word in enumerate(("Apples", "green", "Plums"), 1):
        assert document.page_of(document.text.index(word)) == number
    assert document.headings[0][0] == 0 and document.text.startswith("Apples are red.\n\nPears")
    assert [title for _, title in document.headings] == [f"report.pdf, page {n}" for n in (1, 2, 3)]
    (tmp_path / "plain.txt").write_text("No pages.")
    assert load_document(tmp_path / "plain.txt").page_of(3) is None


def test_running_lines_are_removed_after_their_first_page() -> None:
    pages = [
        f"The Handbook\nText of {word}.\nMore {word}.\n{n}" for n, word in enumerate("abcd", 7)
    ]
    bodies = [f"Text of {w}.\nMore {w}." for w in "bcd"]
    removed = ["The Handbook", "8", "The Handbook", "9", "The Handbook", "10"]
    assert without_running_lines(pages) == ([pages[0], *bodies], removed)
    padded = [f"Text of {word}.\nMore {word}.\n{n:03}" for n, word in enumerate("abcd", 9)]
    assert without_running_lines(padded) == ([padded[0], *bodies], ["010", "011", "012"])
    left = ["Part one | 2", "3 | Of apples", "Part one | 4", "5 | Of apples"] * 2
    facing = [
        f"{line}\nBody {word}\nend {word}" for line, word in zip(left, "abcdefgh", strict=True)
    ]
    bodies = [f"Body {w}\nend {w}" for w in "cdefgh"]
    assert without_running_lines(facing)[0] == [*facing[:2], *bodies]
    receipts = [f"Receipt - {n}\nFor {n}\nSum of {n}\n{n}.50" for n in (1001, 2044, 3999)]
    assert without_running_lines(receipts) == (receipts, []), "they do not count pages"
    values = [f"Of {n}\nx {n}\ny {n}\n{n + n % 5 * 10 + 99}\n{n}" for n in range(1, 40)]
    texts = [page.split("\n") for page in without_running_lines(values)[0]]
    assert texts[1:] == [page.split("\n")[:-1] for page in values[1:]], "they count no pages nearby"
    years = [f"{year}\nSales of {year % 7}\n{year % 5} rose" for year in range(2019, 2024)]
    assert without_running_lines(years) == (years, []), "they head slides"
    few = ["Same\nbody"] * 2
    assert without_running_lines(few)[0] == few, "two equal pages are too few"


def test_repeated_body_lines_stay() -> None:
    pages = [f"Top {w}\nsecond {w}\nNote\nmiddle\nthird {w}\nlast {w}" for w in "abcde"]
    assert without_running_lines(pages)[0] == pages


def test_ligatures_pilcrows_and_hyphenated_words_are_normalized() -> None:
    page = (
        "Eﬃcient oﬀices¶\nuse speci\ufffefication files, well\ufffeknown names, "
        "a dis\ufffeh,\xad a specification. Known well, in\ufffeter\ufffenation\u2010\nal."
    )
    assert cleaned([page])[0] == [
        "Efficient offices\nuse specification files, well-known names, a dish, a specification. "
        "Known well, international."
    ]


def test_hyphens_of_names_options_and_linked_words_stay() -> None:
    page = "Rolls_Royce, A_B, pre_and post, pock_et, NATIO_NAL, --no_cache, ~/a_b, black_and-white"
    assert cleaned([page.replace("_", "\ufffe"), "black and white"])[0][0] == (
        "Rolls-Royce, A-B, pre- and post, pocket, NATIONAL, --no-cache, ~/a-b, black-and-white"
    )


@given(st.lists(st.text(max_size=60), max_size=6))
def test_cleaning_preserves_the_number_of_pages(pages: list[str]) -> None:
    assert len(cleaned(pages)[0]) == len(pages)
