"""Plain text, Markdown, reStructuredText, Python and calendars, with title and headings."""

import re
from codecs import decode as decode_bytes
from dataclasses import replace
from pathlib import Path

from ragspec.errors import pluralize
from ragspec.retrievers.formats.encodings import Extract, codec_of, decode

_RAW, _ITEM = r"<(?:pre|script|style|textarea)\b", r"(?:[-*+]|\d{1,9}[.)])[ \t]|>"
_RULE = r"(?:(?:[-*_][ \t]*){3,}|={3,}[ \t]*)$"
_ENDS = rf"[ \t]*$| {{0,3}}(?:`{{3,}}[^`\n]*$|~{{3,}}|#{{1,6}}[ \t]|<!--|{_RAW}|{_ITEM}|{_RULE})"
_LINES = rf".*(?:\n(?!{_ENDS}).*)*"  # to the end of a paragraph
_UNDERLINE = r"\n {0,3}(?:={3,}|-{3,})[ \t]*$"
MARKDOWN_PART = re.compile(
    r"^ {0,3}(?:(?:[-*+] |\d[.)] )?(?P<fence>`{3,}(?=[^`\n]*$)|~{3,})(?s:.*?)"
    r"(?:\n {0,3}(?P=fence)[`~]*[ \t]*$|\Z)"
    rf"|<!--(?s:.*?)(?:-->|\Z)|{_RAW}(?s:.*?)(?:</(?:pre|script|style|textarea)>|\Z)"
    r"|#{1,6}[ \t]+(?P<hashed>\S.*)$"
    rf"|{_RULE}|(?:[-*+][ \t]|[>|]){_LINES}"
    rf"|(?:<.*>|\[[^]\n]+\]:.*|\#{{1,6}})[ \t]*$(?!{_UNDERLINE})"  # tags, and targets of links
    rf"|(?P<text>\S{_LINES})(?P<underline>{_UNDERLINE})?)",
    re.M | re.I,
)
MAX_TITLE_LINES = 3  # as more lines above a rule are rather a paragraph
FRONT_MATTER = re.compile(r"---[ \t]*\n(?:.*\n)*?(?:---|\.\.\.)[ \t]*(?:\n|\Z)")
FRONT_TITLE = re.compile(r"^title:[ \t]*(?:[>|].*\n[ \t]+)?(\S.*(?:\n[ \t]+.*)*)", re.M)
CLOSING = re.compile(r"[ \t]#+$")  # but "C#" is a name
RST_HEADING = re.compile(r"^ ?(\S.*)\n([=\-~^\"'`#*+.:_])\2{2,}[ \t]*$", re.M)
FOLD = re.compile(rb"\r?\n[ \t]")  # within a line of a calendar or of contacts
# Texts and files of contacts, as in vCard 2.1.
CODED = re.compile(rb"(?im)^([^:\n]*);(?:ENCODING=)?QUOTED-PRINTABLE\b([^:\n]*:)((?:.*=\r?\n)*.*)")
BINARY = re.compile(rb"(?im)^([^:\n]*(?:(?:;ENCODING=B|\bBASE64)\b[^:\n]*:|:data:.*;base64,))\S.*")
ESCAPED = re.compile(r"\\([\\,;nN])")
PYTHON_HEADING = re.compile(r"^((?:async +)?def|class) +(\w+)", re.M)


def read_text(path: Path, data: bytes) -> Extract:
    """Return the text of a file of no known format."""
    return replace(decode(path, data), unit="line")


def read_markdown(path: Path, data: bytes) -> Extract:
    """Return Markdown with its headings; the title may come from front matter."""
    extract = read_text(path, data)
    headings = markdown_headings(extract.text)
    title = headings[0][1] if headings else ""
    if front := FRONT_MATTER.match(extract.text):
        named = FRONT_TITLE.search(front[0])
        title = (" ".join(named[1].split()).strip("\"' ") if named else "") or title
    return replace(extract, title=title, headings=headings)


def read_rst(path: Path, data: bytes) -> Extract:
    """Return reStructuredText with its headings."""
    extract = read_text(path, data)
    headings = tuple((m.start(1), m[1].strip()) for m in RST_HEADING.finditer(extract.text))
    return replace(extract, title=headings[0][1] if headings else "", headings=headings)


def read_python(path: Path, data: bytes) -> Extract:
    """Return Python source; functions and classes at the left edge are headings."""
    extract = read_text(path, data)
    names = PYTHON_HEADING.finditer(extract.text)
    return replace(extract, headings=tuple((match.start(), match[2]) for match in names))


def read_calendar(path: Path, data: bytes) -> Extract:
    """Return the whole lines of a calendar or of contacts (RFC 5545, RFC 6350, vCard 2.1)."""

    def decoded(match: re.Match[bytes]) -> bytes:
        name, plain = match[1] + match[2], decode_bytes(match[3], "quopri")
        charset = re.search(rb";CHARSET=\"?([\w.:-]+)", name, re.I)
        if charset and (codec := codec_of(charset[1].decode())):
            plain = plain.decode(codec, "replace").encode()
        return name + b" ".join(plain.splitlines())

    data, count = BINARY.subn(rb"\1", FOLD.sub(b"", data))
    extract = decode(path, CODED.sub(decoded, data))
    text = ESCAPED.sub(lambda m: "\n" if m[1] in "nN" else m[1], extract.text)
    notes = [f"{pluralize(count, 'embedded file')} left out"] * bool(count)
    return replace(extract, text=text, notes=(*extract.notes, *notes))


def markdown_headings(text: str) -> tuple[tuple[int, str], ...]:
    """Return (offset, heading) of Markdown, without front matter, code, comments and raw HTML."""
    front, headings = FRONT_MATTER.match(text), []
    for match in MARKDOWN_PART.finditer(text, front.end() if front else 0):
        lines = match["text"].split("\n") if match["underline"] else []
        heading = CLOSING.sub("", (match["hashed"] or "").rstrip()).rstrip()
        heading = heading or " ".join(map(str.strip, lines * (len(lines) <= MAX_TITLE_LINES)))
        headings += [(match.start(), heading)] * bool(heading)
    return tuple(headings)
