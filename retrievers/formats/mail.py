"""Mail: the main lines of the header and the text of each message; attachments are named."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from email import message_from_bytes
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import MIMEPart
from email.policy import EmailPolicy
from pathlib import Path
from typing import Any

from ragspec.errors import DocumentError
from ragspec.retrievers.formats.encodings import Extract, clean, codec_of, decode, joined, strict
from ragspec.retrievers.formats.html import read_html
from ragspec.retrievers.formats.markup import read_calendar
from ragspec.retrievers.formats.readers import parsing

LINES = ("From", "To", "Cc", "Date", "Subject")
FROM = rb"From [^\n]*\d{4}[^\n]*\n"
START = re.compile(rb"\A" + FROM + rb"|(?<=\n)\r?\n" + FROM + rb"(?=[!-9;-~]+:)")
BEFORE = b" \t\r\n\xef\xbb\xbf"  # a message: empty lines and a mark of UTF-8
WORD = re.compile(r"https?:\S+|(\d+|[^\W\d]+)")  # links have none
MORE = 0.25  # of a page's words: least surplus over its plain text for the page to be read
BREAK = re.compile("\r{1,9}\n|\r")
FOUR = r"(?:\s*+[a-z\d+/](?:(?:\n\s*+)?[a-z\d+/]){3})*(?:\s*+[a-z\d+/]{2,3}(?==))?=*+"  # no words
BASE64 = re.compile(rf"\s*+(?:{FOUR}|[a-z\d+/]+)[ \t]*+(?=\n)", re.I | re.A)  # whole lines
CODE = re.compile(r"^[ \t]*+[A-Za-z0-9+/]{60,}={0,2}\s*$", re.M)  # such lines are no plain text
COMMAND = re.compile(r"<(<)|<param>[^<]*</param>|</?[\w-]{1,60}>", re.I)  # of text/enriched
FILLED = re.compile(r"<nofill>(?:(?!<nofill>).)*?</nofill>|\n(\n*)", re.I | re.S)
RUN = re.compile("[\0-\x7f\udc80-\udcff]+|[^\0-\x7f\udc80-\udcff]+")  # raw, or decoded
QUOTED_FROM = re.compile(rb"^>(>*From )", re.M)
ENCODED = r"=\?[^?\s]+\?[bq]\?.*?\?="
BARE_BOUNDARY = re.compile(r'(?<![\w*-])(boundary\s*=\s*)(?!")([^;\s]+)', re.I)
ENCODED_WORDS = re.compile(rf"{ENCODED}(?:\s*{ENCODED})*", re.I)  # nothing stands between them


class LenientPolicy(EmailPolicy):
    """Return the main lines of a header as they stand, and of others a part that can be parsed."""

    refold_source = "none"

    def header_fetch_parse(self, name: str, value: str) -> Any:
        """Return a line, with encoded words as text."""
        if name.title() in LINES:
            return ENCODED_WORDS.sub(_decoded_words, " ".join(value.split()))
        if name.title() == "Content-Transfer-Encoding":  # with a comment or other signs
            value = "".join(re.findall(r"[\w-]+", value)[:1])
        value = BARE_BOUNDARY.sub(r'\1"\2"', value) if name.title() == "Content-Type" else value
        with suppress(Exception):  # such as IndexError
            return super().header_fetch_parse(name, value)
        return super().header_fetch_parse(name, value.partition(";")[0])


def _decoded_words(match: re.Match[str]) -> str:
    """Return the text of encoded words; characters may be split between them, or not encoded."""
    words = re.sub("[\udc80-\udcff]", lambda byte: f"={ord(byte[0]) & 255:02X}", match[0])
    with suppress(HeaderParseError):
        return "".join(
            data.decode(codec_of(str(name).split("*")[0]) or "utf-8", "replace")
            for data, name in decode_header(words)
        )
    return match[0]


def read_message(path: Path, data: bytes) -> Extract:
    """Return the text of a mail and of the mails in it; raise DocumentError if it is none."""
    with parsing(path):
        message: Any = message_from_bytes(data.lstrip(BEFORE), policy=LenientPolicy())
        is_mail = any(map(message.get, (*LINES, "Content-Type")))
    if not is_mail:
        raise DocumentError(f"{path} is no mail; expected lines such as From and Subject.")
    parts = [*_parts(path, message)]
    title = "".join(title for _, title in parts[0].headings)
    return replace(joined([part for part in parts if part.text], title), notes=joined(parts).notes)


def _codec(message: MIMEPart) -> str:
    """Return the codec that a part declares; "" if none, or ASCII, as other bytes are an error."""
    charset = message.get_content_charset() or ""
    return codec_of(charset) if "ascii" not in charset else ""


def _text(path: Path, data: bytes, *codecs: str) -> Extract:
    """Return the text by the first codec that can be, or by a guess; of binary data only a note."""
    for codec in codecs:
        if (text := strict(data, codec)) is not None:
            return Extract(BREAK.sub("\n", text))
    with suppress(DocumentError):
        return decode(path, data)
    return Extract("", notes=("a binary part left out",))


def _line(path: Path, line: str, codecs: list[str]) -> Extract:
    """Return a line of a header; raw bytes in it are read without the words that were decoded."""
    runs = (run.encode("utf-8", "surrogateescape") for run in RUN.findall(line))
    parts = [_text(path, run, *["utf-8", *codecs] * (b"\x1b$" not in run)) for run in runs]
    return Extract("".join(part.text for part in parts), notes=joined(parts).notes)


def _parts(path: Path, message: MIMEPart) -> Iterator[Extract]:
    """Yield the header of a message, and the texts and messages in it."""
    with parsing(path):
        lines = {name: " ".join(str(message[name]).split()) for name in LINES if message[name]}
        codecs = [codec for codec in map(_codec, message.walk()) if strict(b" ", codec) == " "]
        kind, name = message.get_content_type(), message.get_filename()
        is_attachment, inner = message.is_attachment(), _inner(message)
    header = {name: _line(path, line, codecs) for name, line in lines.items()}
    text = clean("\n".join(f"{name}: {line.text}" for name, line in header.items()))
    titles = [
        (0, clean(line.text)) for name, line in header.items() if name == "Subject" and line.text
    ]
    yield Extract(text, headings=(*titles,), notes=joined([*header.values()]).notes)
    if kind == "multipart/alternative":
        inner, note = _forms(path, message)
        yield Extract("", notes=(note,) * bool(note))
    if inner and kind.startswith(("multipart/", "message/rfc822")):
        for part in inner:
            yield from _parts(path, part)
    elif re.match(r"multipart/|text/(?!css$|rtf$)", kind) and not is_attachment:
        yield _body(path, message)
    else:
        yield Extract("", notes=(f"the attachment {clean(name or kind)} left out",))


def _inner(message: MIMEPart) -> list[Any]:
    """Return the parts of a message; a mail that was encoded together with its head is decoded."""
    inner = [*message.iter_parts()]
    lines = [str(value) for part in inner[:1] for _, value in part.raw_items()]
    if message.get_content_type() != "message/rfc822" or (lines and "=3D" not in "".join(lines)):
        return inner
    source = b"".join(part.as_bytes() for part in inner)
    message.set_payload(source.decode("ascii", "surrogateescape"))
    policy, data = LenientPolicy(), message.get_payload(decode=True)
    return [message_from_bytes(data, policy=policy)] if isinstance(data, bytes) and data else inner


def _forms(path: Path, message: MIMEPart) -> tuple[list[MIMEPart], str]:
    """Return the plain text, or the page if that says more, then files; and a note on the other."""
    forms, texts = list[list[MIMEPart]](), list[str]()
    for kind in ("plain", "html"):
        with parsing(path):
            form = [part for part in message.iter_parts() if part.get_body((kind,)) is not None]
            inner = [part for each in form for part in each.walk() if not part.is_attachment()]
            bodies = [part for part in inner if part.get_content_type() == f"text/{kind}"]
        forms.append(form)
        texts.append(" ".join(_body(path, part).text.lower() for part in bodies))
    plain, page = ({*WORD.findall(text)} - {""} for text in texts)
    numbers = [sum(map(str.isdecimal, words)) for words in (plain, page)]
    is_page = (numbers[1], len(page)) > (numbers[0], len(plain) + MORE * len(page))
    note = f"the {('page', 'plain text')[is_page]} left out; it has words that the other lacks"
    best, lost = forms[is_page], plain - page if is_page else page - plain
    with parsing(path):
        read = [part for each in best for part in each.walk()]
        files = [part for part in [*message.walk()][1:] if _is_file(part) and part not in read]
        return [*best, *files] or [*message.iter_parts()], note if lost else ""


def _is_file(part: MIMEPart) -> bool:
    """Return whether a part is attached or a date; the form of a body may have a name, too."""
    form = (kind := part.get_content_type()).startswith(("text/", "multipart/"))
    return kind == "text/calendar" or part.is_attachment() or bool(part.get_filename() and not form)


def _body(path: Path, body: MIMEPart) -> Extract:
    """Return the text of a part by its charset, or by a guess if Python has none of the name."""
    with parsing(path):
        _cut(body)
        content, codec = body.get_payload(decode=True), _codec(body)
    data = content if isinstance(content, bytes) else b""
    text = _text(path, data, *["utf-8"] * (codec == "cp1252"), codec)  # as UTF-8 is declared often
    if str(body.get_param("delsp")).lower() == "yes":  # whose lines were cut within words
        text = replace(text, text=re.sub(r"(?<!\n--) \n(?!>)", "", text.text))
    if (subtype := body.get_content_subtype()) == "calendar":
        text = read_calendar(path, data)
    elif subtype == "html":
        page = read_html(text.text, is_mail=True)
        text = replace(page, notes=text.notes + page.notes)
    elif subtype == "enriched":  # RFC 1896: n line ends in filled text are n - 1 breaks, one a gap
        filled = FILLED.sub(lambda m: m[0] if m[1] is None else m[1] or " ", text.text)
        text = replace(text, text=COMMAND.sub(r"\1", filled))
    return Extract(clean(f"{text.text}\n\n{body.epilogue or ''}".strip("\r\n ")), notes=text.notes)


def _cut(body: MIMEPart) -> None:
    """Move plain text behind a body in Base64, such as the footer of a list, to the epilogue."""
    text = body.get_payload()
    if isinstance(text, str) and str(body["Content-Transfer-Encoding"]).lower() == "base64":
        end = len((BASE64.match(text := BREAK.sub("\n", text)) or [""])[0])
        if re.search(r"[^A-Za-z0-9+/=\s]", text[end:]) and not CODE.search(text, end):
            body.set_payload(text[:end])
            body.epilogue = text[end:].strip()


def read_mailbox(path: Path, data: bytes) -> Extract:
    """Return the messages of a mailbox in their order; raise DocumentError if it is none."""
    data = data if b"\n" in data else data.replace(b"\r", b"\n")
    messages = START.split(data.lstrip(BEFORE))[1:]
    if not messages:
        raise DocumentError(f"{path} is no mailbox; expected messages that begin with a From line.")
    parts = []
    for message in messages:
        try:
            parts.append(read_message(path, QUOTED_FROM.sub(rb"\1", message)))
        except DocumentError as error:
            reason = str(error).removeprefix(f"{path} ")
            parts.append(Extract("", notes=(f"message {len(parts) + 1} left out: it {reason}",)))
    return joined(parts, unit="message")
