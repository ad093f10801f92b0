"""Mail: the main lines of the header and the text of each message; attachments are named."""

from __future__ import annotations

import re
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path

from ragspec.errors import DocumentError
from ragspec.retrievers.formats.encodings import Extract, clean, decode, joined
from ragspec.retrievers.formats.html import read_html
from ragspec.retrievers.formats.readers import parsing

LINES = ("From", "To", "Cc", "Date", "Subject")
START = re.compile(rb"(?:\A|(?<=\n)\r?\n)From [^\n]*\d{4}[^\n]*\n")
QUOTED_FROM = re.compile(rb"^>(>*From )", re.M)


def read_message(path: Path, data: bytes) -> Extract:
    """Return the text of a mail; its subject is the title.

    Raises:
        DocumentError: The file is no mail.
    """
    with parsing(path):
        message = message_from_bytes(data.lstrip(), policy=default)
        header = {name: " ".join(str(message[name]).split()) for name in LINES if message[name]}
        body = message.get_body(("plain", "html"))
        attached = [*message.iter_attachments()] if header else []
        names = [part.get_filename() or part.get_content_type() for part in attached]
    if not header:
        raise DocumentError(f"{path} is no mail; expected lines such as From and Subject.")
    lines = "\n".join(f"{name}: {value}" for name, value in header.items())
    text = _body(path, body) if isinstance(body, EmailMessage) else Extract("")
    notes = [f"the attachment {clean(name)} left out" for name in names]
    title = clean(header.get("Subject", ""))
    whole = clean(f"{lines}\n\n{text.text.strip()}").rstrip()
    headings = ((0, title),) if title else ()
    return Extract(whole, title, headings, notes=(*text.notes, *notes))


def _body(path: Path, body: EmailMessage) -> Extract:
    """Return the text of a part by its charset, or by a guess if Python has none of the name."""
    with parsing(path):
        content, charset = body.get_payload(decode=True), body.get_content_charset() or "utf-8"
    data = content if isinstance(content, bytes) else b""
    try:
        text = Extract(data.decode(charset).replace("\r\n", "\n"))
    except (LookupError, UnicodeDecodeError):
        text = decode(path, data)
    return read_html(text.text) if body.get_content_subtype() == "html" else text


def read_mailbox(path: Path, data: bytes) -> Extract:
    """Return the messages of a mailbox in their order.

    Raises:
        DocumentError: The file is no mailbox.
    """
    starts = [*START.finditer(data)]
    if not starts:
        raise DocumentError(f"{path} is no mailbox; expected messages that begin with a From line.")
    ends = [match.start() for match in starts[1:]] + [len(data)]
    messages = [data[match.end() : end] for match, end in zip(starts, ends, strict=True)]
    parts = [read_message(path, QUOTED_FROM.sub(rb"\1", message)) for message in messages]
    return joined(parts, unit="message")
