"""Tables: CSV files and spreadsheets, a line for each row, with the names of its columns."""

import csv
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, time, timedelta
from decimal import Decimal
from functools import partial
from io import BytesIO, StringIO
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any

from ragspec.errors import DocumentError
from ragspec.retrievers.formats.encodings import SAMPLE, Extract, clean, decode, joined
from ragspec.retrievers.formats.office import read_part, repair
from ragspec.retrievers.formats.readers import MAX_BYTES, format_of, left_out, parsing

NUMBER = re.compile(r"(?=\D*\d)[\W\d_]+(?:e[-+]?\d+)?\W*", re.I)  # or a date, an amount
QUOTED = re.compile(r'(?<![^;,\t|\n]) *"[^"]*(?:""[^"]*)*"(?![^;,\t|\n])')  # a cell of any lines
ESCAPED = re.compile(r'(?<!\\)((?:\\\\)*)\\"')  # a quote behind a backslash
# Comments and empty lines above a table.
COMMENTS = re.compile(r"(?=[ \t\n]*(?:#|//))(?:(?:(?:#|//).*|[ \t]*)\n)+(?!#|//)(?=.*\S)")
SEPARATOR = re.compile(r"sep=([;,|\t])(?:\n|$)", re.I)  # the first line of files that Excel writes
# Of a format of numbers: text, an escape, a gap, a currency or a colour; and a plain section.
LITERAL = re.compile(r'"([^"]*)"|\\(.)|[_*].|\[(?:\$([^]-]*))?[^]]*\]')
LITERALS = r'((?:"[^"]*"|[\\_*].|\[[^]<=>]*\]|[^]["\\_*#?0.,;@/EG])*)'
DIGITS = r"(?=\.?[#?0])((?:[#?0,]{,30}[#?0])?)(?:\.([#?0]{,30}))?"
SIGNS = {  # of a sheet's source -> its note; only texts within cells have fonts there
    rb'<(?:\w+:)?(?:row|col) [^>]*\bhidden="[1t]': "hidden rows or columns read in",
    rb"<(?:\w+:)?(?:vertAlign|strike)\b": "exponents or struck-out parts of cells not read in",
}
ESCAPE = re.compile(r"_x([0-9A-Fa-f]{4})_")  # a character in the text of a cell
SECTION = re.compile(f"{LITERALS}{DIGITS}{LITERALS}(?:;|$)")


def row_lines(rows: Iterable[Sequence[str]], numeric: Container[int] = ()) -> Iterator[str]:
    """Yield a line for each row: "Name: value; ..." below a row of names, else cells and tabs.

    A table begins at the top and below each empty row. Its first row names the columns if its cells
    are several different texts, none a number; a row in `numeric` has one. The first may be empty,
    above the names of the rows. If such a row also stands below names, no row is one of names; but
    a wider one above a number names the columns. Forms above the first table have none.
    """
    lines = ("\t".join(" ".join(cell.split()) for cell in row) for row in rows)
    table = [line.rstrip("\t").split("\t") for line in lines]
    numbers = [n in numeric or any(map(NUMBER.fullmatch, row)) for n, row in enumerate(table)]
    names, below, is_start = list[str](), list[bool](), True  # below: is each row like the names?
    end_of_forms, width = count_form_rows(table, numbers), 0
    for index, cells in enumerate(table):
        if index < end_of_forms or (len(cells) < 2 and (is_start or not cells[0])):
            is_start = True  # below a form, an empty row or the title of a table
            yield "\t".join(cells)
            continue
        is_text = not numbers[index] and all(cells[1:]) and 1 < len(cells) == len(set(cells))
        if is_start and len(cells) > width and is_text and numbers[index + 1 : index + 2] == [True]:
            names, below = [], []
        is_header = is_start and is_text and (bool(below) or not names)
        if is_header:
            names, below = ([], below) if any(below) else (cells, [])
        else:
            names = [] if is_start and len(cells) > len(names) else names
            below.append(is_text)
        is_start, width = False, max(width, len(cells))
        if is_header or not names:
            yield "\t".join(cells)
        else:
            pairs = zip_longest(names, cells, fillvalue="")
            yield "; ".join(f"{name}: {cell}" if name else cell for name, cell in pairs if cell)


def count_form_rows(table: Sequence[list[str]], numbers: Sequence[bool]) -> int:
    """Return how many rows forms take: below 40 keys, with texts (a third or more) and numbers."""
    groups = [[*rows] for _, rows in groupby(enumerate(table), lambda row: row[1] == [""])]
    for place, rows in enumerate(groups):
        pairs = [(n, cells[0], cells[1]) for n, cells in rows if len(cells) == 2]
        keys = [key for n, key, _ in pairs if numbers[n]]
        has_number = bool(keys) and not any(map(NUMBER.fullmatch, keys))
        texts = sum(not re.search(r"\d", value) for *_, value in pairs[1:])
        is_form = has_number and 1 < len(pairs) < 40 and 3 * texts >= len(pairs) - 1
        if (pairs and not is_form) or max(len(cells) for _, cells in rows) > 2:
            return count_to_names(groups[place:], numbers)
    return 0  # as the first row may be one of names


def count_to_names(groups: Sequence[list[tuple[int, list[str]]]], numbers: Sequence[bool]) -> int:
    """Return the first row of names below a pair of cells alone, else that of the groups.

    Names are wider, or at once above a number. Rows of numbers or below a title are a table's.
    """
    (start, pair), *more = groups[0]
    for place, rows in enumerate(groups[2::2] if len(pair) == 2 and not more else ()):
        row, cells = rows[0]
        is_names = len(cells) > 1 and numbers[row : row + 2] == [False, True]
        if len(cells) > 2 or (is_names and not place):
            return row
        has_title = len(cells) < 2 < max(len(each) for _, each in rows)
        if has_title or (len(rows) > 1 and all(numbers[n] for n, _ in rows)):
            break
    return start


def read_csv(path: Path, data: bytes) -> Extract:
    """Return a table of comma- or tab-separated values, a line for each row."""
    csv.field_size_limit(MAX_BYTES)
    extract = decode(path, data)
    text, notes = extract.text, extract.notes
    match = SEPARATOR.match(text)
    text = text[match.end() :] if match else text
    delimiter = "\t" if format_of(path) == ".tsv" else match[1] if match else ""
    comments, text, delimiter = split_comments(text, delimiter)
    read = partial(csv.reader, delimiter=delimiter)
    for source, skips in ((text, True), (text, False), (ESCAPED.sub(r'\1""', text), True)):
        with suppress(csv.Error):
            rows = [*read(StringIO(source), strict=True, skipinitialspace=skips)]
            break
    else:
        rows = [*read(StringIO(text))]
        by_line = [*read(StringIO(text), quoting=csv.QUOTE_NONE)]
        ((width, count),) = Counter(map(len, by_line)).most_common(1)
        fewest = max(0.9 * len(by_line), sum(len(row) == width for row in rows))
        is_torn = text.count('"') % 2 or (width > 1 and count > fewest)
        what = "some were removed"
        if is_torn and any("\n" in cell for row in rows for cell in row):
            rows, what = by_line, "each line was read as a row, with them"
        notes += (f"quotes are not closed, doubled or escaped; {what}",)
    lines = row_lines([*([comment] for comment in comments), *rows])
    return replace(extract, text="\n".join(lines), unit="row", notes=notes)


def split_comments(text: str, delimiter: str) -> tuple[list[str], str, str]:
    """Return the lines of comments above a table, the table, and its delimiter, chosen if "".

    The last line with a mark names the columns if it has as many cells as the row below, and no
    space behind its mark, a number in that row, or tabs between its cells.
    """
    head = COMMENTS.match(text)
    comments, table = head[0].split("\n") if head else [""], text[head.end() if head else 0 :]
    delimiter = delimiter or delimiter_of(table)
    row, last = table.partition("\n")[0].split(delimiter), comments[-2:][0].split(delimiter)
    is_spaced = delimiter != "\t" and re.match("#[ #]|//", last[0])
    if 1 < len(row) == len(last) and (not is_spaced or any(map(NUMBER.fullmatch, row))):
        return comments[:-2], "\n".join((comments[-2], table)), delimiter
    return comments[:-1], table, delimiter


def delimiter_of(text: str) -> str:
    """Return the character that most likely separates the cells of a table, by its first lines.

    It forms the most cells in lines of the most frequent width. But a semicolon or tab that splits
    the first two alike precedes commas, which numbers have.
    """
    lines = [*islice(filter(str.strip, StringIO(QUOTED.sub('""', text[:SAMPLE]))), 40)]
    scores = dict[str, tuple[bool, bool, int]]()
    for each in ";\t,|":
        counts = [line.count(each) for line in lines]
        ((most, rows),) = Counter(filter(None, counts)).most_common(1) or [(0, 0)]
        is_alike = each in ";\t" and 0 < min(counts[:2], default=0) == max(counts[:2])
        scores[each] = is_alike, rows > 1, rows * most
    return max(scores, key=scores.__getitem__)


def read_xlsx(path: Path, data: bytes) -> Extract:
    """Return the sheets of a workbook, a line for each row, with the results of formulas."""
    from openpyxl import load_workbook

    notes = left_out(path, data)
    with parsing(path):
        data = repair(data)
        read = partial(load_workbook, read_only=True, keep_links=False)
        file, formulas = read(BytesIO(data), data_only=True, rich_text=True), read(BytesIO(data))
        sheets = [(sheet, formulas[sheet.title]) for sheet in file.worksheets]
    parts, unsaved, size = [], 0, 0
    for sheet, unevaluated in sheets:
        name = f"sheet {clean(sheet.title)}"
        if sheet.sheet_state != "visible":
            notes.append(f"the hidden {name} left out")
            continue
        rows, numeric = list[list[str]](), set[int]()
        with parsing(path):  # which reads while it yields
            source = sheet._get_source().read()
            notes += [f"{note} {name}" for sign, note in SIGNS.items() if re.search(sign, source)]
            twins = [sheet, unevaluated] if re.search(rb"<(?:\w+:)?f[ />]", source) else [sheet]
            for each in twins:
                each.reset_dimensions()  # files state fewer cells than they have
            for row in zip(*(each.iter_rows() for each in twins), strict=True):
                pairs = ((twin[0], twin[-1]) for twin in zip(*row, strict=True))
                cells = [(a, a if a.data_type == "str" else b) for a, b in pairs]  # the result ""
                if any(isinstance(a.value, int | float) for a, _ in cells):
                    numeric.add(len(rows))
                unsaved += sum(a.value is None and b.value is not None for a, b in cells)
                rows.append([cell_text(b if a.value is None else a) for a, b in cells])
                size += sum(map(len, rows[-1]))
                if size > MAX_BYTES:  # a text that many cells share is packed once
                    raise DocumentError(f"{path} unpacks to more than {MAX_BYTES} characters.")
        text = "\n".join(row_lines(rows, numeric)).rstrip("\n")
        parts.append(Extract(text, headings=((0, f"{path.name}, {name}"),)))
    notes += [f"formulas without a saved result, left as formulas: {unsaved}"] * bool(unsaved)
    return replace(joined(parts, file.properties.title or "", "sheet"), notes=tuple(notes))


def cell_text(cell: Any) -> str:
    """Return the value of a cell as its reader sees it."""
    text = "" if cell.value is None else value_text(cell.value, cell.number_format or "")
    if isinstance(cell.value, time | datetime | timedelta):
        has_fractions = re.search(r"s\]?\.0", cell.number_format, re.I)  # of milliseconds
        text = re.sub(r"(?<=\.\d{3})000$" if has_fractions else r"(?<=:\d\d)\.\d+$", "", text)
    text = ESCAPE.sub(lambda match: clean(chr(int(match[1], 16))), text)
    return f"~~{text}~~" if text and cell.font.strike else text


def value_text(value: Any, form: str) -> str:
    """Return a value in a format, with all digits if the format is plain."""
    if isinstance(value, timedelta):
        hours, rest = divmod(abs(value), timedelta(hours=1))
        return f"{'-' * (value < timedelta())}{hours}{str(rest)[1:]}"
    if isinstance(value, datetime):
        text = value.isoformat(" ", "milliseconds" if value.microsecond else "seconds")
        is_time = re.fullmatch("(?i)[^yd]*[hs][^yd]*", LITERAL.sub("", form))
        return text[11:] if is_time else text.removesuffix(" 00:00:00")
    fonts = [getattr(run, "font", None) for run in value] if isinstance(value, list) else []
    if any(font and (font.strike or font.vertAlign) for font in fonts):
        from lxml.builder import E

        runs = (E.r(E.t(run)) if isinstance(run, str) else run.to_tree() for run in value)
        return read_part(E.p(*runs), Counter(), {}).text
    if not isinstance(value, int | float) or isinstance(value, bool):
        value = f"=TABLE({value.r1})" if hasattr(value, "r1") else value
        return str(getattr(value, "text", value))  # of the formula of an array
    digits = f"{value:.15g}" if isinstance(value, float) else str(value)
    section = SECTION.match(form)
    if section is None:
        return digits
    negative = SECTION.match(section.string, section.end()) if value < 0 else None
    before, whole, places, after = (negative or section).groups("")
    amount = abs(Decimal(digits)) * (100 if "%" in LITERAL.sub("", before + after) else 1)
    units, _, decimals = f"{amount.normalize():f}".partition(".")
    decimals = decimals.ljust(places.count("0"), "0")
    number = units.zfill(whole.count("0")) + "." * bool(decimals) + decimals
    signs = "-()" if negative else ""  # a minus stands for them
    before, after = (LITERAL.sub(r"\1\2\3", each).strip(signs) for each in (before, after))
    sign = "-" * (value < 0 and not (negative and "minus" in before.lower()))
    return f"{sign}{before}{number}{after}".strip()
