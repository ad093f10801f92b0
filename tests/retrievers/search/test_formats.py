"""Pages of PDF files: their numbers, and text in which a quotation can be found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.retrievers.search.documents import load_document
from ragspec.retrievers.search.html import read_html
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.pdf import cleaned, without_running_lines
from tests.support.toy_pdf import pdf_of

PAGE = """<!doctype html><html><head><title> A  page </title><style>p{}</style></head><body>
<nav>menu</nav><h1>Main &amp; first</h1><p>One <b>bold</b>
word.</p><ul><li>alpha</li><li>beta</li></ul><script>var x = "<p>no</p>";</script>
<h2>Second</h2><pre>  keep
    this</pre><table><tr><td>a</td><td>b</td></tr></table></body></html>"""


def test_visible_text_with_title_and_headings() -> None:
    page = read_html(PAGE)
    assert page.title == "A page"
    assert page.text == (
        "Main & first\n\nOne bold word.\n\nalpha\nbeta\n\nSecond\n\n  keep\n    this\n\na\tb"
    )
    assert [heading for _, heading in page.headings] == ["Main & first", "Second"]
    assert all(page.text[start:].startswith(heading) for start, heading in page.headings)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("<p>open<p>again", "open\n\nagain"),
        ("<head><title>t</title><p>head was never closed", "head was never closed"),
        ("</div></script>plain", "plain"),
        ("a<br>b", "a\nb"),
        ("<svg><title>icon</title></svg>text", "text"),
        ("x &lt; y &#8211; z", "x < y – z"),
    ],
)
def test_broken_or_sparse_markup(source: str, text: str) -> None:
    assert read_html(source).text == text


def test_title_falls_back_to_the_first_heading() -> None:
    assert read_html("<h2>Only <i>this</i></h2>text").title == "Only this"


@given(st.text(alphabet="<>/ab1 h&;!-\n\"'=") | st.text())
def test_any_input_gives_text_and_headings_inside_it(source: str) -> None:
    page = read_html(source)
    text = page.text
    assert all(text[start : start + len(heading)] == heading for start, heading in page.headings)


def test_every_character_knows_its_page(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(pdf_of("Apples are red.", ["Pears are", "green."], "Plums are blue."))
    document = load_document(path)
    for number, word in enumerate(("Apples", "green", "Plums"), 1):
        assert document.page_of(document.text.index(word)) == number
    assert [title for _, title in document.headings][1:] == [
        "report.pdf, page 2",
        "report.pdf, page 3",
    ]
    (tmp_path / "plain.txt").write_text("No pages.")
    assert load_document(tmp_path / "plain.txt").page_of(3) is None


def test_pages_and_digests_survive_the_index(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(pdf_of("Apples are red.", "Pears are green."))
    document = load_document(path)
    assert len(document.digest) == 64
    PassageIndex.build([document], embedder=None).save(tmp_path / "one.idx")
    assert PassageIndex.open(tmp_path / "one.idx").documents == (document,)


def test_running_lines_leave_and_the_text_stays() -> None:
    pages = [
        f"The Handbook\nText of {word}.\nMore {word}.\n{n}" for n, word in enumerate("abcd", 7)
    ]
    assert without_running_lines(pages)[0] == [f"Text of {w}.\nMore {w}." for w in "abcd"]
    left = ["Part one | 2", "3 | Of apples", "Part one | 4", "5 | Of apples"] * 2
    facing = [
        f"{line}\nBody {word}\nend {word}" for line, word in zip(left, "abcdefgh", strict=True)
    ]
    assert without_running_lines(facing)[0] == [f"Body {w}\nend {w}" for w in "abcdefgh"]
    few = ["Same\nbody"] * 2
    assert without_running_lines(few)[0] == few, "two pages alike say nothing"


def test_a_line_of_the_body_that_comes_back_stays() -> None:
    pages = [f"Top {w}\nsecond {w}\nNote\nmiddle\nthird {w}\nlast {w}" for w in "abcde"]
    assert without_running_lines(pages)[0] == pages


def test_ligatures_pilcrows_and_cut_words_become_what_one_searches_for() -> None:
    page = (
        "Eﬃcient oﬀices¶\nuse speci\ufffefication files, well\ufffeknown names, "
        "a dis\ufffeh,\xad a specification. Known well."
    )
    assert cleaned([page])[0] == [
        "Efficient offices\nuse specification files, well-known names, a dish, a specification. "
        "Known well."
    ]


@given(st.lists(st.text(max_size=60), max_size=6))
def test_any_pages_can_be_cleaned_and_their_number_stays(pages: list[str]) -> None:
    assert len(cleaned(pages)[0]) == len(pages)
