from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.retrievers.search.formats import extract_html

PAGE = """<!doctype html><html><head><title> A  page </title><style>p{}</style></head><body>
<nav>menu</nav><h1>Main &amp; first</h1><p>One <b>bold</b>
word.</p><ul><li>alpha</li><li>beta</li></ul><script>var x = "<p>no</p>";</script>
<h2>Second</h2><pre>  keep
    this</pre><table><tr><td>a</td><td>b</td></tr></table></body></html>"""


def test_visible_text_with_title_and_headings() -> None:
    title, text, headings = extract_html(PAGE)
    assert title == "A page"
    assert text == (
        "Main & first\n\nOne bold word.\n\nalpha\nbeta\n\nSecond\n\n  keep\n    this\n\na\tb"
    )
    assert [heading for _, heading in headings] == ["Main & first", "Second"]
    assert all(text[start:].startswith(heading) for start, heading in headings)


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
    assert extract_html(source)[1] == text


def test_title_falls_back_to_the_first_heading() -> None:
    assert extract_html("<h2>Only <i>this</i></h2>text")[0] == "Only this"


@given(st.text(alphabet="<>/ab1 h&;!-\n\"'=") | st.text())
def test_any_input_gives_text_and_headings_inside_it(source: str) -> None:
    _, text, headings = extract_html(source)
    assert all(text[start : start + len(heading)] == heading for start, heading in headings)
