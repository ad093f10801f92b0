"""Decode the bytes of a file: marks and declarations first, then UTF-8, then a guess that is said.

Control sequences of terminals are removed, and every repair leaves a note.
"""

import codecs
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, compress
from pathlib import Path
from unicodedata import category

from ragspec.errors import DocumentError, pluralize

MARKS = (
    ((codecs.BOM_UTF8,), "utf-8-sig"),
    ((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    ((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"),
)
DECLARED = re.compile(
    rb"""<meta[^>]{,200}?charset\s*=\s*["']?\s*([\w.:-]+)|<\?xml[^>]{,80}encoding=["']([\w.:-]+)"""
    rb"""|^(?:[^\n]*\n)?(?:#|[^\n]*(?:-\*-|\bvim?:))[^\n]*coding[:=][ \t]*([\w.-]+)"""
    rb"""|^@charset "([\w.-]+)";|\n"Content-Type:[^\n]{,80}charset=([\w.-]+)"""
    rb"""|\n[^%\n]{,80}\\(?:usepackage\[|inputencoding\{)([\w-]+)(?:\]\{inputenc)?\}""",
    re.I,
)
# Names that files use for a smaller set than they are written in, as in WHATWG's Encoding standard.
WIDER = {
    "iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "shift_jis": "cp932",
    "gb2312": "gb18030", "gbk": "gb18030", "euc_kr": "cp949", "big5": "big5hkscs",
    "tis-620": "cp874",
}  # fmt: skip
LATIN = "cp1252 iso8859_15 cp1250 cp1254 iso8859_2 cp1257 mac_roman cp850 cp437"
GUESSED = """cp1252 cp1250 cp1251 koi8_r cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 cp874 cp866
cp932 euc_jp gb18030 big5 cp949 iso8859_5 iso8859_6 koi8_u"""
# Letters of languages above ASCII; one covers nearly all of a text in the right codec.
_ALPHABETS = """äöüß àâçéèêëîïôùûüœæ áéíñóúüªº áâãàçéêíóôõúü àèéìòùî åäöæøéüáêèô ëïéöüèó ąćęłńóśźż
áčďéěíňóřšťúůýž áäčďéíĺľňóôŕšťúýž áéíóöőúüű ăâîșțşţ čćđšžäöüõ çğıöşüâîû áðéíóúýþæö àçèéíïòóúü"""
ALPHABETS = (*_ALPHABETS.split(),)
BALTIC = ("ąčęėįšųūž", "āčēģīķļņšūž")  # which others resemble in codecs that lack some of them
SIGNS, LETTER = "“”‘«»€°§©®™•µ±×½¼²³£¢¥¾÷\xa0", r"[^\W\d_]"
# Signs of such a text: some within words, and others before or behind them.
SIGN = re.compile(f"[’—–…·´]|(?<!{LETTER})[„‚¿¡{SIGNS}]|[{SIGNS}](?!{LETTER})")
ROMANIAN = re.compile("[ãõ](?![oe])")  # in cp1252; or Hungarian
SPELLED = 0.95  # least share of such letters and signs
ENOUGH, DIFFERENT = 8, 2  # fewest bytes above ASCII, and different ones, to guess from
SAMPLE = 65536
HIRAGANA = 0.2  # least share of such letters in Japanese
GAP = "\n\n"  # between the parts of a file
UNTITLED = re.compile(r"^\(?(untitled( document)?[ -]*\d*|unspecified)\)?$|^\(anonymous\)$", re.I)
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
ODD = re.compile(r"[\x01-\x08\x0e-\x1a]")
INVISIBLE = re.compile("[\u00ad\u200b\u2060-\u2064\ufeff]")  # within words
CONTROLS = bytes(number for number in range(128) if CONTROL.match(chr(number)))
SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[@-Z\\-_])")
TERMINAL = re.compile(rf"{SEQUENCE.pattern}|.\x08")


@dataclass(frozen=True, slots=True)
class Extract:
    """The text of a file, its title ("" without one), and the offsets of headings and pages.

    Attributes:
        notes: Repairs and guesses, and the parts that were left out.
        unit: See `Document.unit`.
    """

    text: str
    title: str = ""
    headings: tuple[tuple[int, str], ...] = ()
    pages: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    unit: str = ""


def joined(parts: Sequence[Extract], title: str = "", unit: str = "") -> Extract:
    """Return parts of a file as one text, with an offset for each part if a unit names them."""
    starts = tuple(accumulate((len(part.text) + len(GAP) for part in parts), initial=0))[:-1]
    headings = tuple(
        (start + offset, heading)
        for start, part in zip(starts, parts, strict=True)
        for offset, heading in part.headings
    )
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    text = GAP.join(part.text for part in parts)
    return Extract(text, title, headings, starts if unit else (), notes, unit)


def decode(path: Path, data: bytes) -> Extract:
    """Return the text of a file with line ends "\\n", and notes on what was guessed or repaired.

    Raises:
        DocumentError: The file is binary.
        MissingExtraError: The encoding must be guessed and charset-normalizer is missing.
    """
    has_controls = len(data.translate(None, CONTROLS)) < len(data)
    text, guess = _decoded(data, has_controls)
    sequences, controls, broken = 0, 0, text.count("\ufffd")
    if has_controls:
        text, sequences = TERMINAL.subn("", text)
    if has_controls or broken:
        sample = text[:SAMPLE]
        if len(CONTROL.findall(sample)) + sample.count("\ufffd") > 0.02 * len(sample):
            raise DocumentError(f"{path} is binary or in an unknown encoding; save it as UTF-8.")
        text, controls = CONTROL.subn(" ", text)
    notes = {
        f"the encoding {guess} was guessed": guess,
        f"removed {pluralize(sequences, 'control sequence')} of a terminal": sequences,
        f"read {pluralize(controls, 'control character')} as spaces": controls,
        f"read {pluralize(broken, 'undecodable byte')} as U+FFFD": broken,
    }
    text = text.replace("\r\r\n", "\n").replace("\r\n", "\n").replace("\r", "\n")
    return Extract(text, notes=tuple(note for note, applies in notes.items() if applies))


def clean(text: str) -> str:
    """Replace surrogates (of broken fonts and file names), which are not UTF-8, and controls."""
    return CONTROL.sub(" ", text.encode("utf-8", "replace").decode("utf-8"))


def clean_path(path: str) -> str:
    """Return a path in UTF-8 without controls; escapes keep different paths different."""
    name = path.encode("utf-8", "backslashreplace").decode("utf-8")
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", name)


def _decoded(data: bytes, has_controls: bool) -> tuple[str, str]:
    """Return the text of a file, and the codec if it is a guess."""
    for marks, marked in MARKS:
        if data.startswith(marks):
            return data.decode(marked, "replace"), ""
    text = strict(data, "utf-8")
    if text is not None and not has_controls:
        return text, ""
    codec = _declared(data)
    if codec and codec != "utf-8" and (text is None or codec.startswith("iso2022")):
        return data.decode(codec, "replace"), ""
    for escapes in ("iso2022_jp", "iso2022_kr"):
        if b"\x1b$" in data and (escaped := strict(data, escapes)):
            return escaped, escapes
    # Such a text has other control characters, or more than a few NULs.
    is_odd = text is None or ODD.search(text) or 5 * text.count("\0") > len(text)
    if is_odd and (wide := _utf16(data)):
        return wide, "UTF-16"
    if text is not None:
        return text, ""
    return (data.decode(codec, "replace"), "") if codec == "utf-8" else _by_lines(data)


def _by_lines(data: bytes) -> tuple[str, str]:
    """Return a text without a declaration that is not all UTF-8, and the codec that is guessed.

    Logs of several machines, for example, change their encoding from line to line.
    """
    lines = data.split(b"\n")
    others = [not line.isascii() and _is_other(line) for line in lines]
    part = b"\n".join(compress(lines, others))
    guess, count = _guess(part[:SAMPLE]) if part else "", sum(others)
    if 10 * count > 9 * sum(not line.isascii() for line in lines):
        return data.decode(guess, "replace"), guess
    codecs = (guess if other else "utf-8" for other in others)
    text = "\n".join(map(partial(bytes.decode, errors="replace"), lines, codecs))
    return text, guess and f"{guess} of {pluralize(count, 'line')}"


def _is_other(line: bytes) -> bool:
    """Return whether most of what is not ASCII in a line is not UTF-8."""
    text = line.decode("utf-8", "replace")
    broken = text.count("\ufffd")
    return bool(broken) and len(text.encode("ascii", "ignore")) + 2 * broken >= len(text)


def strict(data: bytes, codec: str) -> str | None:
    """Return the text of bytes, None if they or the codec are invalid."""
    try:
        return data.decode(codec)
    except (LookupError, UnicodeError):
        return None


def codec_of(name: str) -> str:
    """Return the codec that a file means by a name, "" if Python has none of text for it."""
    name = re.sub(r"^(?:x-)+|(?<=8859-8)-[ei]$|-(?:unix|dos)$", "", name.lower())  # of Emacs
    name = re.sub(r"^(?:iso-)?latin-?(?=\d)", "latin", name)
    name = re.sub(r"^(?:windows|win|dos|cp)-?(?=\d)", "cp", name).replace("cp31j", "cp932")
    try:
        codec = codecs.lookup(name).name
        b" ".decode(codec, "replace")  # refuses codecs that are not of text
    except (LookupError, ValueError):
        return ""
    return WIDER.get(codec, codec)


def _declared(data: bytes) -> str:
    """Return the codec that the first lines of a file declare, if Python has it."""
    match = DECLARED.search(data[:4096])
    codec = codec_of(match[match.lastindex or 0].decode("latin-1")) if match else ""
    # ASCII can be read, so that it is not UTF-16, whatever it declares.
    return "utf-8" if codec.startswith("utf-") else codec


def _utf16(data: bytes) -> str:
    """Return the text of UTF-16 without a mark: the order that has spaces and no odd characters."""
    if len(data) % 2 or b"\0" not in data[:SAMPLE]:
        return ""
    texts = (strict(data, codec) or "" for codec in ("utf-16-le", "utf-16-be"))
    plain = [t for t in texts if {"Cn", "Co", "Cc"}.isdisjoint(map(category, {*t} - {*"\t\r\n\f"}))]
    return max(plain, key=lambda text: text.count(" ") + text.count("\n"), default="")


def _guess(data: bytes) -> str:
    """Return the likeliest codec; Windows-1252 where too little stands above ASCII to tell."""
    high = data.translate(None, bytes(range(128)))
    texts = dict[str, str]()
    for codec in LATIN.split():  # the first of equal texts
        texts.setdefault(strict(data, codec) or "\ufffd", codec)
    shares = {c: _spelled(text, ALPHABETS + BALTIC * (c == "cp1257")) for text, c in texts.items()}
    if shares.get("cp1254", 0.0) >= shares["cp1252"] > shares.get("cp1250", 0.0):
        del shares["cp1252"]  # as Icelandic has the letters of Turkish
    elif shares["cp1252"] >= shares.get("cp1250", 0.0) and not ROMANIAN.search(next(iter(texts))):
        shares.pop("cp1250", None)  # as Czech has many letters of other languages
    best = max(shares.values()) if 3 * len(high) < len(data) else 0.0
    codecs = [c for c in shares if shares[c] == best] if best >= SPELLED else GUESSED.split()
    if len(high) < ENOUGH or len({*high}) < DIFFERENT:
        return codecs[0]
    if len(re.findall("[ぁ-ん]", strict(data, "euc_jp") or "")) > HIRAGANA * len(high) / 2:
        return "euc_jp"
    from charset_normalizer import from_bytes

    match = from_bytes(data, cp_isolation=codecs).best()
    return match.encoding if match else codecs[0]


def _spelled(text: str, alphabets: Sequence[str]) -> float:
    """Return the share of characters above ASCII that the best language, or punctuation, has."""
    words, signs = SIGN.subn("", text)
    counts = Counter(words.replace("İ", "ı").lower())
    known = max(sum(counts[letter] for letter in letters) for letters in alphabets)
    return (signs + known) / max(1, len(text) - len(text.encode("ascii", "ignore")))
