"""Manual pages: the macros of man(7), mdoc(7) and tbl(1) as HTML, which the writer of pages reads.

Only the requests that pages use are known; definitions and conditions of troff are skipped.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import count, repeat
from pathlib import Path
from unicodedata import normalize

from ragspec.errors import DocumentError
from ragspec.retrievers.formats.encodings import Extract, clean, decode
from ragspec.retrievers.formats.html import read_html
from ragspec.retrievers.formats.markup import read_text

PAGE = re.compile(r"^[.'][ \t]*(?:TH|Dt|so)[ \t]+(.*)", re.M)
_CHARACTERS = r"""bu •  em —  en –  hy -  co ©  rg ®  tm ™  aq '  dq "  lq “  rq ”  oq ‘  cq ’  ga `
ti ~  ha ^  rs \  <= ≤  >= ≥  != ≠  -> →  <- ←  +- ±  mu ×  de °  ss ß  Fo «  Fc »  at @  sh #  Do $
ba |  la ⟨  ra ⟩  -- —  Tm ™  R ®  lt <  gt >  Ba |  C+ C++  Aq '  Bq „  ul _  mi −  sl /  br |
pl +  AE Æ  ae æ  OE Œ  oe œ  /L Ł  /l ł  /O Ø  /o ø  aa ´  bv |  ci ○  dg †  if ∞  is ∫  mc µ  or |
Lt <  Gt >  Am &  Le ≤  Ge ≥  Ne ≠  Pm ±  If ∞  pd ∂  S2 ²  ** ∗  12 ½  14 ¼  34 ¾  Eu €  Cs ¤
Po £  Ye ¥  ct ¢  sc §  ps ¶  no ¬  == ≡  ~= ≈  ~~ ≈  =~ ≅  ap ∼  ua ↑  da ↓  <> ↔  lA ⇐  rA ⇒  hA ⇔
fm ′  sd ″  OK ✓  mo ∈  nm ∉  sr √  pt ∝  es ∅  sb ⊂  sp ⊃  ib ⊆  ip ⊇  ca ∩  cu ∪  AN ∧  OR ∨  fa ∀
te ∃  gr ∇  di ÷  lf ⌊  rf ⌋  lc ⌈  rc ⌉  lB [  rB ]  lC {  rC }  S1 ¹  S3 ³  r! ¡  r? ¿  dd ‡  Of ª
Om º  sq □  lz ◊  fo ‹  fc ›  pc ·  md ⋅  bq ‚  ru _  rn ‾  bb ¦  .i ı  -D Ð  Sd ð  TP Þ  Tp þ"""
CHARACTERS = dict(re.findall(r"(\S+) (\S+)", _CHARACTERS))
LATIN = "ABGDEZYHIKLMNCOPRSTUFXQWabgdezyhiklmncoprstufxqw"
GREEK = "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡΣΤΥΦΧΨΩαβγδεζηθικλμνξοπρστυφχψω"
CHARACTERS |= {f"*{name}": letter for name, letter in zip(LATIN, GREEK, strict=True)}
ACCENTS = dict(zip("'`^:~,vo", map(chr, (769, 768, 770, 776, 771, 807, 780, 778)), strict=True))
GOES_ON = re.compile(r"""(?<!\\)(?:\\\\)*\\c"*$""")  # the line, after no escaped backslash
ACCENT = re.compile(r"['`^:~,vo][^\W\d_]")
SIGNS = {"e": "\\", "~": " ", "0": " ", "t": "\t"} | dict.fromkeys("&|^/,)%:{}acdEpruz!", "")
ESCAPE = re.compile(
    r"\\(?:[\"#].*|[fFnmMgkVY](?:\[[^\]]*\]|\(..|.)|s[-+]?(?:\[[^\]]*\]|\(..|'[^']*'|\d)"
    r"|(?:N'|\[char)(?P<code>\d{1,6})['\]]|[hvwlLDoxbNSHXZRCA]'(?:\\w'[^']*'|[^'])*'"
    r"|\*?\[(?P<long>[^\]]*)\]|\*?\((?P<two>..)|\*(?P<one>.)"
    r"|(?P<sign>.)|$)"
)
STRING = re.compile(r"\\\*(?:\[([^\]\s]*)\]|\((..)|(.))")
STRING_DEFINITION = re.compile(r"[.'][ \t]*(ds|as)1?[ \t]+([^\s\\]+)(?:[ \t]+\"?(.*))?")
MOTION = re.compile(r"\\[hkvwz]|\\\(\*W")  # of marks that overlie letters, and pod2man's dash
ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')
XREF = re.compile(r"(?:(?<![^\s.])Xr|(?<=^\.)MR) (\S+) (\d\w*)(?=\s|$)")
FUNCTION = re.compile(r"^\.Fo(.*)((?:\n\.Fa.*)*)\n\.Fc", re.M)
LINK_END = re.compile(r"\n[.'](?:UE|ME)[ \t]+(?=\S)")  # what follows joins the text of the link
REQUEST = re.compile(r"[.'][ \t]*(%?[A-Za-z][A-Za-z0-9]{0,2})(?![^\s\\])[ \t]*(.*)")
CALL = re.compile(r"[.'][ \t]*([^\s\\]+)[ \t]*(.*)")
SUMMARY = re.compile(r"^\S[^\n]*? (?:--?|[–—]) +(\S.*)\n", re.M)
HEAD = 500  # characters of a page in which its summary stands
SKIPPED = re.compile(r"[.'][ \t]*((?:de|am)i?1?|ig)\b[ \t]*(\S*)[ \t]*([^\s\\\"]*)")
PARAMETER = re.compile(r"(?<!\\)\\\\\$([1-9*@])")
CONDITION = re.compile(
    r"[.'][ \t]*(?:el(?![a-z])|(?:(?P<single>if|while)|ie)\b[ \t]*(?P<no>!?)"
    r"(?:(?P<quote>['\"])(?P<one>.*?)(?P=quote)(?P<other>.*?)(?P=quote)"
    r"|(?P<test>[nt](?=\W)|\S+)))[ \t]*(?P<rest>.*)"
)
# The HTML before and after the text of a request.
_HTML = (
    ("SH Sh", "<h2>", "</h2>"), ("SS Ss", "<h3>", "</h3>"), ("TQ", "", "<br>"),
    ("TP IP It AP", "<p>", "<br>"), ("PP P LP Pp sp Sp HP RS RE", "<p>", ""),
    ("Dl D1 SY", "<br>", "\n"), ("br YS", "<br>", ""), ("nf EX Vb", "<pre>", ""),
    ("fi EE Ve Ed", "</pre>", ""),
)  # fmt: skip
HTML = {name: marks for names, *marks in _HTML for name in names.split()}
NEXT = frozenset({"SH", "SS", "TP", "TQ"})  # their text may be the next line
FONTS = frozenset({"B", "I", "SM", "SB", "R", "UR", "URL", "MT", "MTO", "FN", "q"})
PAIRS = frozenset({"BR", "RB", "BI", "IB", "IR", "RI"})
ENCLOSED = {"Op": "[]", "Bq": "[]", "Pq": "()", "Aq": "<>", "Dq": "“”", "Sq": "‘’", "Ql": "‘’"}
ENCLOSED |= {"Brq": "{}", "OP": "[]", "Qq": '"\b"'}
_BLOCKS = "Oo [ Oc ] Po ( Pc ) Ao < Ac > Do “ Dc ” Bo [ Bc ] Bro { Brc } So ‘ Sc ’"
BLOCKS = dict(re.findall(r"(\S+) (\S+)", _BLOCKS)) | {"Qo": '"\b', "Qc": '\b"'}
# Macros of mdoc that stand for a text with their arguments, and the short names of standards.
NAMES = {
    "Fn": "{}({})", "In": "<{}>", "Lb": "library “{}”", "St": "{}", "At": "{} AT&T UNIX",
    "Ux": "UNIX", "Bx": "{}BSD {}", "Bsx": "BSD/OS {}", "Dx": "DragonFly {}", "Fx": "FreeBSD {}",
    "Nx": "NetBSD {}", "Ox": "OpenBSD {}",
}  # fmt: skip
STANDARDS = {
    r"^-p(1003\.(\w+)(?:-\d+)?)": r"IEEE Std \1 (“POSIX.\2”)",
    r"^-isoC-?(?:\d\d(?=\d\d))?": "ISO C",
    "^-ansiC": "ANSI C",
    r"^-susv(?=\d)": "Single UNIX Specification, Version ",
    r"^v(?=\d)": "Version ",
}
MARKS = frozenset(".,;:?!)]")
# Macros of mdoc that give a font or a link, and such without a text of their own.
SILENT = re.compile(
    r"A[dnr]|C[dm]|Dv|E[comrv]|F[acdlot]|Ic|L[ik]|M[st]|N[mos]|P[af]|S[xy]|T[an]|V[at]|X[cor]"
)
ENDING = re.compile("|".join([r"[.,;:?!)\]]", SILENT.pattern, *ENCLOSED, *BLOCKS, *NAMES]))
_QUIET = "Bd Bf Bk Bl Db Dd Dt Ef Ek El Os Re Rs Sm Tg"
QUIET = frozenset(_QUIET.split())
USUAL = {*HTML, *FONTS, *PAIRS, *QUIET, "TH", "TS", "TE"}
SENTENCES = {
    "Bt": "{} is currently in beta test.",
    "Ud": "currently under development.",
    "Ex": "The {} utility exits 0 on success, and >0 if an error occurs.",
    "Rv": "The {}() function returns the value 0 if successful; otherwise the value -1 is returned"
    " and the global variable errno is set to indicate the error.",
}


def plain(text: str) -> str:
    """Return a text of troff without its escapes."""

    def character(match: re.Match[str]) -> str:
        name = match["long"] or match["two"] or match["one"] or ""
        if re.fullmatch(r"u[0-9A-F]{4,5}(?:_[0-9A-F]{4,5})*", name):
            return normalize("NFC", "".join(chr(int(code, 16)) for code in name[1:].split("_")))
        if name not in CHARACTERS and ACCENT.fullmatch(name):
            return normalize("NFC", name[1] + ACCENTS[name[0]])
        if match["code"]:
            return chr(int(match["code"]))
        sign = match["sign"] or ""
        unknown = "" if match[0].startswith("\\*") else f"[{name}]"  # strings that are undefined
        return CHARACTERS.get(name, unknown) if name else SIGNS.get(sign, sign)

    return ESCAPE.sub(character, text) if "\\" in text else text


def arguments(text: str) -> list[str]:
    """Return the arguments of a request, without quotes."""
    words = ARGUMENT.findall(text.replace("\\ ", "\\~"))
    return [word or quoted.replace('""', '"') for quoted, word in words]


def read_man(path: Path, data: bytes) -> Extract:
    """Return a manual page; a file with such a suffix that is none is read as plain text.

    Raises:
        DocumentError: The page only names another file.
    """
    extract = decode(path, data)
    page = PAGE.search(extract.text)
    if page is None:
        return read_text(path, data)
    names = [plain(each) for each in arguments(page[1])]
    text = read_html("".join(html_of(extract.text)))
    if names and not text.text:
        raise DocumentError(f"{path} only refers to {names[0]}; name that page.")
    title = f"{names[0]}({names[1]})" if len(names) > 1 else text.title
    if summary := SUMMARY.search(text.text, 0, HEAD):  # as apropos(1) shows it
        title += f": {summary[1]}"
    return replace(text, title=clean(title), notes=extract.notes)


def lines_of(source: str) -> Iterator[str]:
    """Yield the lines of a page, without comments, definitions, and text for paper only.

    A macro that the page defines stands for the lines of its definition, if it is no usual one.
    """
    body, end, depth, otherwise = list[str](), "", 0, False
    defined = dict[str, list[str]]()
    source = FUNCTION.sub(lambda m: f".Fn{m[1]}" + m[2].replace("\n.Fa", ""), source)
    lines = LINK_END.sub("", source.replace("\\\n", "")).split("\n")[::-1]
    left = 10 * len(source)  # characters of definitions, which may call themselves
    while lines:
        line = lines.pop()
        if end:
            call = CALL.match(line.removeprefix("\\"))
            end = "" if call and call[1] == end else end
            body += [line] * bool(end)
            continue
        if depth:
            depth += line.count("\\{") - line.count("\\}")
            continue
        applies = True
        while applies and (match := CONDITION.match(line)):
            applies = holds(match) if match["test"] or match["quote"] else otherwise
            otherwise = otherwise if match["single"] else not applies
            line = match["rest"].removeprefix("\\{").lstrip() if applies else match["rest"]
        if not applies:
            depth = max(0, line.count("\\{") - line.count("\\}"))
        elif skipped := SKIPPED.match(line):
            end = skipped[2 if skipped[1] == "ig" else 3] or "."
            body = [*defined.get(skipped[2], ())] if skipped[1].startswith("am") else []
            defined |= {} if skipped[1] == "ig" else {skipped[2]: body}
        elif (call := CALL.match(line)) and call[1] in defined and call[1] not in USUAL:
            written = expanded(defined[call[1]] if left > 0 else [], arguments(call[2]))
            left -= sum(map(len, written)) + 1
            lines += written[::-1]
        elif not line.startswith((".\\", "'\\", "...", "\\}")):
            yield line


def with_strings(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines with the strings that they define, which may lengthen a line 50 times."""
    strings = dict[str, str]()
    for line in lines:
        text = STRING.sub(lambda match: strings.get(match[match.lastindex or 0], match[0]), line)
        text = r"\&" * line.startswith(r"\*") + text[: 50 * len(line)]
        if (match := STRING_DEFINITION.match(text)) and not MOTION.search(text):
            value = re.sub(r'\\".*', "", match[3] or "").replace('"', r"\(dq")
            strings[match[2]] = strings.get(match[2], "") * (match[1] == "as") + value
        yield text


def expanded(body: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the lines of a macro that is called with some words."""

    def argument(match: re.Match[str]) -> str:
        return " ".join(words if match[1] in "*@" else words[int(match[1]) - 1 :][:1])

    return [PARAMETER.sub(argument, line).replace("\\\\", "\\") for line in body]


def holds(condition: re.Match[str]) -> bool:
    """Return whether a condition holds on a terminal; one that needs registers does not."""
    if condition["quote"]:
        return (condition["one"] == condition["other"]) != bool(condition["no"])
    return condition["no"] + condition["test"] in ("n", "!t")


def html_of(source: str) -> Iterator[str]:
    """Yield the HTML of a page."""
    after, literal, command = "", False, ""
    lines = with_marks(with_strings(lines_of(source)))
    for line in lines:
        request = REQUEST.match(XREF.sub(r"No \1(\2)", line))
        name, rest = (request[1], request[2]) if request else ("", line)
        if name == "TS":
            yield table(lines)
        elif name in HTML or (name == "Bd" and re.search("literal|unfilled", rest)):
            before, ending = HTML.get(name, ("<pre>", ""))
            was, ends = literal, before in ("</pre>", "<h2>", "<h3>")
            literal = before == "<pre>" or (was and not ends)
            words = arguments(rest)
            words = {"IP": words[:1], "TP": [], "TQ": []}.get(name, words if ending else [])
            start = "\n" if literal and before == "<p>" else before.removesuffix("</pre>")
            start = "" if was and before == "<pre>" else "</pre>" * (was and ends) + start
            content = macros(words, command) if not name[1:].isupper() else plain(" ".join(words))
            yield start + escape(content, False) + ending * bool(words)
            after = ending if name in NEXT and not words else after
        elif request or not line.startswith((".", "'")):
            if name == "Nm" and not command:
                command = plain(rest)
            text = text_of(name, rest, command)
            if text is None:
                continue
            gap = "<p>" if not text.strip() else "<br>" if text[0] == " " else ""
            ending = "" if GOES_ON.search(line) else after + "\n"
            yield ("" if literal else gap) + escape(text, False) + ending
            after = "" if ending else after


def text_of(name: str, rest: str, command: str) -> str | None:
    """Return the text of a line, or of a request; None if it has none."""
    if not name:
        return plain(rest)
    if name in FONTS or name in PAIRS or name.startswith("%"):  # of references
        return plain(("" if name in PAIRS else " ").join(arguments(rest)))
    if name in QUIET or not (name == "OP" or (name[0].isupper() and name[1:].islower())):
        return None
    if name in SENTENCES:
        subjects = [plain(each) for each in arguments(rest) if each != "-std"] or [command]
        text = SENTENCES[name].format(" and ".join(subjects))
        return text if len(subjects) == 1 else text.replace("ty exits", "ties exit")
    return macros([name, *arguments(rest)], command)


def with_marks(lines: Iterator[str]) -> Iterator[str]:
    """Yield lines with the marks of the items of mdoc's lists."""
    marks = list[Iterator[str]]()
    for line in lines:
        if line.startswith(".Bl"):
            bullet = repeat(r" \(bu" if "-bullet" in line else "")
            marks.append(map(" {}.".format, count(1)) if "-enum" in line else bullet)
        elif marks and line.startswith(".El"):
            marks.pop()
        yield line + next(marks[-1]) if marks and line.startswith(".It") else line


def with_names(words: list[str]) -> Iterator[str]:
    """Yield the words of a line of mdoc, with the texts of macros that form a name."""
    words = words[::-1]
    while words:
        macro, values = words.pop(), list[str]()
        most = {"Fn": len(words), "Bx": 2, "Ux": 0}.get(macro, int(macro in NAMES))
        while len(values) < min(most, len(values) + len(words)) and not ENDING.fullmatch(words[-1]):
            values.append(words.pop())
        first, *others = values or [""]
        for pattern, text in STANDARDS.items() if macro in ("At", "St") else ():
            first = re.sub(pattern, text, first)
        yield NAMES[macro].format(first, ", ".join(others)).strip() if macro in NAMES else macro


def macros(words: list[str], command: str = "") -> str:
    """Return the text of a line of callable macros of mdoc and their arguments."""
    texts, closing, flag = list[str](), "", False
    words = [*with_names(words)]
    end = len(words)
    while end > 1 and words[end - 1] in MARKS:
        end -= 1
    for word, following in zip(words[:end], [*words, "."][1:], strict=False):
        text = None
        if word in ENCLOSED:
            text, closing = ENCLOSED[word][:-1], ENCLOSED[word][-1] + closing
        elif SILENT.fullmatch(word):
            bare = following in MARKS or SILENT.fullmatch(following)
            text = {"Nm": command, "Ar": "file ...", "Fl": "-"}.get(word) if bare else None
            texts += ["\b"] * (word == "Ns")
            flag = word == "Fl"
        else:
            text = BLOCKS.get(word) or {"Nd": "–"}.get(word) or plain(word)
            text = f"-{text}" if flag and text not in MARKS | {"|"} else text
        texts += [text] if text else []
    line = re.sub(r" ?\x08 ?", "", " ".join([" ".join(texts) + closing, *words[end:]]))
    return re.sub(r"(?<=[\[(<{“‘]) | (?=[.,;:?!)\]>}”’](?:[ \])]|$))", "", line)


def table(lines: Iterator[str]) -> str:
    """Return the rows of a table of tbl(1) as HTML."""
    separator, rows, in_formats = "\t", list[str](), True
    cells = list[str]()  # of a row whose last cell is a block of text
    for line in lines:
        if line.startswith(".TE"):
            break
        if line.startswith(".T&") or in_formats:
            option = re.search(r"tab ?\((.)\)", line)
            separator = option[1] if option else separator
            in_formats = not line.rstrip().endswith(".")
        elif cells and not line.startswith("T}"):
            request = REQUEST.match(line)
            name, rest = (request[1], request[2]) if request else ("", line)
            cells.append(f" {text_of(name, rest, '') or ''}")
        elif line.strip() not in ("_", "=") and not REQUEST.match(line):
            cells.append(plain(line.removeprefix("T}") if cells else line))
            if cells[-1].endswith("T{"):
                cells[-1] = cells[-1].removesuffix("T{")
                continue
            row = [escape(cell.strip(), False) for cell in "".join(cells).split(separator)]
            rows.append("".join(f"<td>{cell}</td>" for cell in row))
            cells.clear()
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>\n"
