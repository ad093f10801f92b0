"""Mails, notebooks and manual pages with what readers must know of their formats."""

from collections.abc import Callable
from email.message import EmailMessage
from pathlib import Path
from typing import Any

MAIL = b"""From: Ann <ann@example.org>\r
Subject: =?utf-8?q?Gr=C3=B6=C3=9Fe?=\r
Content-Type: multipart/mixed; boundary=B\r
\r
--B\r
Content-Type: text/html; charset=utf-8\r
\r
<p>It lifts 10<sup>6</sup> litres.</p>\r
--B\r
Content-Type: application/pdf\r
Content-Disposition: attachment; filename="bill.pdf"\r
\r
x\r
--B--\r
"""
NESTED = "From: Ann\n\nPlain.\n\nSubject: Inner\n\nForwarded.\n\nThe list."
PART = b"--B=\nContent-Type: %s\n\n%s\n"
LATIN = b"From: \xdc\nContent-Type: multipart/mixed; boundary=B=\n\n%s--B=--\n" % b"".join((
    PART % (b"text/plain; charset=iso-8859-1; delsp=yes", b"> \x93q \r> s \rr\x94"),
    PART % (b"text/plain; charset=us-ascii", "ü".encode()),
    PART % (b"text/css", b"p {}"),
    PART % (b"text/html; charset=undefined", b"<table><td><td>c</table><ol><li>a&#12;b</ol>"),
    PART % (b"text/plain\nContent-Transfer-Encoding: Quoted-Printable (odd)", b"1 =3D 1"),
    PART % (b"message/rfc822\nContent-Transfer-Encoding: base64;", b"VG86IEIKCkhpIQ=="),
    PART % (b'message/rfc822\nContent-Transfer-Encoding: "quoted-printable"', b"A: =3D\n\n=C3=BC"),
    PART % (b"text/enriched", b"<b>X</b>\ny <<z>\n\n<Param>r</Param>u<nofill>\nv\n\nw</nofill>"),
    PART % (b"text/plain\nContent-Transfer-Encoding: base64", b"SGkh\rThanks\n\n--\nList a?b=c1"),
    PART % (b"text/plain\nContent-Transfer-Encoding: base64", b"SGVs bG8g\r\r\n\r d29y bGQ="),
    PART % (b"text/plain", b"\1\x80"),
))  # fmt: skip
ODD = b"From: =?UTF-8?Q?Ann_M=C3?=\n =?UTF-8?Q?\xbcl=0A?= <a@[\nFrom: B\nTo: <\nCc: =?utf-8?B?a?=\n"
ODD_READ = "From: Ann Mül <a@[\nTo: <\nCc: =?utf-8?B?a?=\n\nHi"
HIDING = b"<p hidden>1<p>Stay <b style='color:red; DISPLAY: none'>2</b>at home"
SEALED = b"From: Ann <ann@example.org>\nContent-Type: application/pgp-encrypted\n\nx"
TWO = PART.replace(b"B=", b"C") % (b"text/html", b"<p>Hi 7") * 2 + b"--C--\n"
BEGIN = b"From a@b Mon Jan  1 10:00:00 2024\n"
BOB = b"From: Bob <b@example.org>\nSubject: Two\n\n>From here on.\n\nFrom 2019 on.\n"
MAILBOX = b"\n".join(BEGIN + each for each in (MAIL.replace(b"\r", b""), BOB, b"No: mail\n"))
MAN = rb""".\" A comment
.TH PUMP 1 2026
.de XX
hidden
..
.SH NAME
pump \- lift water
.SH OPTIONS
.TP
.BR \-n ", \c"
.B \-\-no\-cache
Keep \fInothing\fR; see
.BR ls (1).
.nf
pump  a
  b
.fi
.TS
l l.
one	two
T{
long
.B cell
T}	x
.TE
"""
# Conditions, definitions, names of characters, links, and rows that look like rules of a table.
NESTED_MACRO = rb""".TH W 1
.de XX
.de YY
\\\\$1
\\..
..
.SH N
.XX
x
.YY q
"""
DEFINED = rb""".TH T 1
.de QW
.ie '\\*(lq'"' ``\\$1''\\$2
.el \\*(lq\\$1\\*(rq\\$2
..
.de XX
.BR bar (1)
..
.am XX
\\$*
..
.SH N
.QW "a b" .
.XX c d
.nf
e  f
.nf
g  h
.SH M
i  j
"""
ROFF = rb""".TH X 1
.SH NAMEN
.if !'po4a'hide' .B \-v
.if t \{\
.ie n paper
.\}
.ie n \{ terminal
.if t paper
\}
.el\{\ paper
.\}
.de1 INDENT END
level
. END \" of it
.P
.ds V "2\" version
.as V .5
Gr\(:o\(sse \(sc\(==\(~=\(zz\*(zz \[u0065_0301]t\['e] \(*a\(Eu \&a\@b\+\N'64'\[char43]\*V\*[V]:
.UR https://e.org
.UE .
.TS
l l.
_
_row	.5
.TE
.%T Title
"""
READ = "Größe §≡≈[zz] été α€ a@b+@+2.52.5: https://e.org.\n\n_row\t.5\n\nTitle"
MDOC = rb""".Dt PUMP 8
.Sh NAME
.Nm pump
.Nd lift water
.Sh SYNOPSIS
.Nm
.Op Fl v
.Op Fl o Ar file
.Xr ls 1 .
.de hash
.Qq \\$1
..
.hash $1$
.D1 run Fl v
.Bo a Bc , Bro b Brc So c Sc Eo d Ec
.Fo f
.Fa "int a"
.Fa b
.Fc ;
.Fo g
.Op Fl \*[Lt] ,
.Bx 4.3 . At v7 , Fx 2.0 Ox St -p1003.1-2008 Ux and Lb libc
.Ex -std cat dog
.SY foo
.OP \-v level
.MR ls 1 ,
.Bl -enum
.It
One
"""
MDOC_READ = """pump [-v] [-o file] ls(1). "$1$"
run -v [a], {b} ‘c’ d f(int a, b); g [-<], 4.3BSD. Version 7 AT&T UNIX, FreeBSD 2.0 OpenBSD \
IEEE Std 1003.1-2008 (“POSIX.1”) UNIX and library “libc” \
The cat and dog utilities exit 0 on success, and >0 if an error occurs.
foo [-v level] ls(1),

1.
One"""
CELLS: list[dict[str, Any]] = [
    {"cell_type": "markdown", "source": ["# Sales\n", "By year."]},
    {
        "cell_type": "code",
        "source": "total()",
        "outputs": [{"data": {"text/plain": ["17"], "image/png": "x"}}, {"text": "done\x1b[0m"}],
    },
]
SHOWN = {"text/html": ["<b>3", " kg"], "text/plain": "<IPython.core.display.HTML object>"}
OBJECTS = {"text/markdown": "*4*", "text/plain": "<a.B object at 0x7f>", "execution_count": 1}
OUTPUTS = [{"text": ["2"]}, {"data": SHOWN}, OBJECTS, {"data": None, "ename": "E", "evalue": None}]
OLD_CODE = {"cell_type": "code", "input": ["1+1"], "outputs": OUTPUTS}
OLD = {"worksheets": [{"cells": [{"cell_type": "markdown", "source": "# Old"}, OLD_CODE]}]}


def write(data: bytes | str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    return make


def nested(path: Path) -> None:
    outer, mail, inner = EmailMessage(), EmailMessage(), EmailMessage()
    outer["From"], inner["Subject"] = "Ann", "Inner"
    mail.set_content("Plain.")
    mail.add_alternative("<p>Plain.", subtype="html", params={"name": "plain.html"})
    mail.set_param("name", "both")
    mail.add_alternative(b"x", "image", "png", filename="a.png")
    inner.set_content("Forwarded.")
    mail.add_attachment(inner)
    outer.make_mixed()
    outer.attach(mail)
    outer.add_attachment("The list.", disposition="inline")
    outer.add_attachment(b"x", "application", "pkcs7-mime")
    path.write_bytes(outer.as_bytes())


def forms(plain: bytes, form: bytes, kind: bytes = b"text/html") -> Callable[[Path], None]:
    parts = PART % (b"text/plain", plain) + PART % (kind, form)
    return write(b"From: A\nContent-Type: multipart/alternative; boundary=B=\n\n%s--B=--\n" % parts)
