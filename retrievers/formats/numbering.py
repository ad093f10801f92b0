"""Automatic numbers of paragraphs in Office Open XML (part 1, 17.9 and 21.1.2.4).

In word-processor files a definition has up to nine levels, each with a start, a format and a text
such as "%1.%2.". A list is an instance of a definition, perhaps with other starts or levels. All
lists of a definition share its counts.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lxml.etree import _Element

ONES = ["", "i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix"]
TENS, HUNDREDS = ([e.translate(str.maketrans("ivx", to)) for e in ONES] for to in ("xlc", "cdm"))
ROMAN = [hundred + ten + one for hundred in HUNDREDS for ten in TENS for one in ONES]
OFF = ("0", "false", "off")  # values of properties that do not hold
IN_DIGITS = "automatic numbers in other letters or words are read as digits"


def attribute(element: "_Element", path: str) -> str:
    """Return the first attribute at a path of local names, "" without it."""
    *steps, name = path.split("/")
    if steps:
        element = element.find("/".join(f"{{*}}{step}" for step in steps))
    items = [] if element is None else element.items()
    return next((value for key, value in items if key.rpartition("}")[2] == name), "")


def whole(value: str | None, default: int = 0) -> int:
    """Return a whole number of up to six digits, perhaps before other text, or the default."""
    match = re.match(r"\s*[+-]?\d{1,6}(?!\d)", value or "")
    return int(match[0]) if match else default


ALPHABETIC = ["", *(a + b for a in ("", *ascii_lowercase) for b in ascii_lowercase)]  # to "zz"
DIGITS, CIRCLES = ["", *"一二三四五六七八九"], ["", *map(chr, range(0x2460, 0x2474))]
COUNTING = [f"{a.strip('一')}{'十' * bool(a)}{b}" for a in DIGITS for b in DIGITS]
# Numbers from 0 by their format, without "upper" or "lower"; larger ones are written in digits.
LETTERS: dict[str, Sequence[str]] = {
    "Letter": [ascii_lowercase[(n - 1) % 26] * ((n + 25) // 26) for n in range(703)],
    "russian": ["", *"абвгдежзиклмнопрстуфхцчшщыэюя"],
    "ganada": ["", *"가나다라마바사아자차카타파하"],
    **dict.fromkeys(("Roman", "-roman"), ROMAN),
    **dict.fromkeys(("-alpha", "-latin"), ALPHABETIC),  # of pages
    **dict.fromkeys(("chineseCounting", "japaneseCounting", "taiwaneseCounting"), COUNTING),
    **dict.fromkeys(("decimalEnclosedCircle", "circleNumDb", "circleNumWdBlack"), CIRCLES),
}
# Formats of slides.
SLIDE_FORMS = {"alphaLc": "lowerLetter", "alphaUc": "upperLetter", "arabic": "", "arabicDb": ""}
SLIDE_FORMS |= {"romanLc": "lowerRoman", "romanUc": "upperRoman"}
SLIDE_FORMS |= dict.fromkeys(("ea1Chs", "ea1Cht", "ea1JpnKor"), "chineseCounting")
SLIDE_FORM = re.compile(r"(\w+?)(ParenBoth|ParenR|Period|Plain|Minus)")
BULLET = re.compile("bu(None|AutoNum|Char|Blip)$")
SLIDE_TEXTS = {"ParenBoth": "({})", "ParenR": "{})", "Period": "{}.", "Plain": "{}", "Minus": "{}-"}


def formatted(count: int, form: str) -> str:
    """Return a count in a format such as "upperRoman", in digits if that is unknown."""
    if form in ("decimalZero", "decimal-leading-zero"):
        return f"{count:02}"
    table = LETTERS.get(re.sub("^(upper|lower)|(Upper|Lower|Thousand|Chinese)$", "", form), ())
    text = table[count] if 0 < count < len(table) else str(count)
    return text.upper() if "upper" in form.lower() else text


def number_slide(root: "_Element", notes: Counter[str]) -> None:
    """Write the automatic numbers of a slide before the texts of its paragraphs; see Numbering."""
    for body in root.iter("{*}txBody"):
        counts: dict[int, tuple[str, int]] = {}  # kind and count of the last paragraph of a level
        for paragraph in _all(body, "p"):
            if (text := next(paragraph.iter("{*}t"), None)) is None:
                continue
            level = whole(attribute(paragraph, "pPr/lvl"))
            marks = [*_all(paragraph, "pPr/*"), *_all(body, f"lstStyle/lvl{level + 1}pPr/*")]
            marks = [each for each in marks if BULLET.search(str(each.tag))]
            kind = "".join(attribute(each, "type") for each in marks[:1])
            before, form = counts.get(level, ("", 0)), SLIDE_FORM.fullmatch(kind)
            counts = {n: each for n, each in counts.items() if n < level}
            if form is None:
                continue
            start = whole(attribute(marks[0], "startAt"), 1)
            count = max(start, before[1] + 1) if before[0] == kind else start
            counts[level] = kind, count
            number = formatted(count, SLIDE_FORMS.get(form[1], form[1]))
            notes[IN_DIGITS] += number.isdecimal() and SLIDE_FORMS.get(form[1]) != ""
            text.text = f"{SLIDE_TEXTS[form[2]].format(number)} {text.text or ''}"


class Level(NamedTuple):
    """One level of a list.

    Attributes:
        restart: The level begins again after one above this; by default after any above itself.
        in_digits: Whether numbers of levels above are written in digits, too.
    """

    start: int
    form: str
    text: str
    restart: int
    in_digits: bool
    style: str

    @classmethod
    def read(cls, element: "_Element", number: int, start: str) -> "Level":
        """Return a level; `start` of the list, if any, takes the place of that of the level."""
        return cls(
            whole(start or attribute(element, "start/val")),
            attribute(element, "numFmt/val") or "decimal",
            attribute(element, "lvlText/val"),
            min(whole(attribute(element, "lvlRestart/val"), number), number),
            element.find("{*}isLgl") is not None and attribute(element, "isLgl/val") not in OFF,
            attribute(element, "pStyle/val"),
        )


class Numbering:
    """The numbers of a file's lists, counted in the order of its paragraphs.

    Args:
        part: The definitions and lists of a file.
        linked: The list of each style, for definitions that name a style in place of levels.
        notes: What notes report, and how often; it is added to.
    """

    def __init__(self, part: "_Element", linked: Mapping[str, str], notes: Counter[str]) -> None:
        self._notes = notes
        keys = {attribute(e, "numId"): attribute(e, "abstractNumId/val") for e in _all(part, "num")}
        definitions = {attribute(e, "abstractNumId"): e for e in _all(part, "abstractNum")}
        self._lists: dict[str, tuple[str, dict[int, Level]]] = {}
        self._restarts: set[tuple[str, int]] = set()  # lists and levels that begin anew once
        self._counts: dict[str, dict[int, int]] = {}  # of the levels of each definition
        for each in _all(part, "num"):
            key = keys[number := attribute(each, "numId")]
            if key in definitions and (style := attribute(definitions[key], "numStyleLink/val")):
                key = keys.get(linked.get(style, ""), "")
            changes = _all(each, "lvlOverride")
            starts = {attribute(e, "ilvl"): attribute(e, "startOverride/val") for e in changes}
            places = [*_all(definitions[key], "lvl")] if key in definitions else []
            places += _all(each, "lvlOverride/lvl")
            levels = {whole(attribute(place, "ilvl")): place for place in places}
            read = {n: Level.read(place, n, starts.get(str(n), "")) for n, place in levels.items()}
            self._lists[number] = key, read
            self._restarts |= {(number, whole(n)) for n, start in starts.items() if start}

    def label(self, number: str, place: str, style: str) -> str:
        """Count the next paragraph of a list, and return its label; "" for a bullet or none.

        Args:
            place: Its level, "" for that of its style.
        """
        key, levels = self._lists.get(number, ("", {}))
        at = whole(place, next((n for n, e in levels.items() if e.style == style != ""), 0))
        if at not in levels:
            return ""
        counts, level = self._counts.setdefault(key, {}), levels[at]
        if (number, at) in self._restarts:
            self._restarts.remove((number, at))
            counts.pop(at, None)
        counts[at] = counts.get(at, level.start - 1) + 1
        for n, each in levels.items():
            if at < each.restart:
                counts.pop(n, None)

        def written(match: re.Match[str]) -> str:
            n = int(match[1]) - 1
            if n not in levels or (form := levels[n].form) in ("bullet", "none"):
                return ""
            # A level without a paragraph so far is one before its start: "0.1".
            form = "decimal" if level.in_digits else form
            text = formatted(counts.get(n, levels[n].start - 1), form)
            self._notes[IN_DIGITS] += text.isdecimal() and not form.startswith("decimal")
            return text

        return "" if level.form == "bullet" else re.sub("%([1-9])", written, level.text).strip()


def _all(element: "_Element", path: str) -> Iterator["_Element"]:
    yield from element.iterfind("/".join(f"{{*}}{step}" for step in path.split("/")))
