"""Tables: CSV files and spreadsheets, a line for each row, with the names of its columns."""

import csv
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from ragspec.errors import DocumentError
from ragspec.retrievers.formats.encodings import Extract, clean, decode, joined
from ragspec.retrievers.formats.readers import MAX_BYTES, format_of, left_out, parsing

NUMBER = re.compile(r"(?=\D*\d)[\W\d_]+(?:e[-+]?\d+)?\W*", re.I)  # or a date, an amount
# Of a format of numbers: text, an escape, a gap, a currency or a colour; and a plain section.
LITERAL = re.compile(r'"([^"]*)"|\\(.)|[_*].|\[(?:\$([^]-]*))?[^]]*\]')
LITERALS = r'((?:"[^"]*"|[\\_*].|\[[^]<=>]*\]|[^]["\\_*#?0.,;@/EG])*)'
DIGITS = r"(?=\.?[#?0])((?:[#?0,]{,30}[#?0])?)(?:\.([#?0]{,30}))?"
SECTION = re.compile(f"{LITERALS}{DIGITS}{LITERALS}(?:;|$)")


def row_lines(rows: Iterable[Sequence[str]], numeric: Container[int] = ()) -> Iterator[str]:
    """Yield a line for each row: "Name: value; ..." below a row of names, else cells and tabs.

    The first row names the columns if its cells are several different texts, none a number; a row
    in `numeric` has one. The first may be empty, above the names of the rows. A row of texts below
    an empty row starts a table with other names, or with none if a row above is like it.
    """
    names, texts, is_start = list[str](), None, True  # texts: is a row like the names?
    for index, row in enumerate(rows):
        cells = "\t".join(" ".join(cell.split()) for cell in row).rstrip("\t").split("\t")
        is_text = index not in numeric and not any(map(NUMBER.fullmatch, cells))
        is_text = is_text and all(cells[1:]) and 1 < len(cells) == len(set(cells))
        is_title = len(cells) < 2 and (is_start or not cells[0])
        is_header = is_start and is_text and (texts is not None or not names)
        if is_header:
            names, texts = ([], True) if texts else (cells, None)
        elif not is_title:
            names = [] if is_start and len(cells) > len(names) else names
            texts = bool(texts) or is_text
        if names and not is_title and not is_header:
            pairs = zip(names + [""] * (len(cells) - len(names)), cells, strict=False)
            yield "; ".join(f"{name}: {cell}" if name else cell for name, cell in pairs if cell)
        else:
            yield "\t".join(cells)
        is_start = is_title


def read_csv(path: Path, data: bytes) -> Extract:
    """Return a table of comma- or tab-separated values, a line for each row."""
    extract = decode(path, data)
    text, notes, delimiter = extract.text, extract.notes, "\t"
    if format_of(path) != ".tsv":
        lines = text.lstrip("\n").split("\n", 2)[:2]  # a name of a column may hold another one
        counts = {each: [line.count(each) for line in lines if line] or [0] for each in ";\t|,"}
        alike = {each for each in ";\t|" if 0 < min(counts[each]) == max(counts[each])}
        delimiter = max(counts, key=lambda each: (each in alike, min(counts[each]), counts[each]))
        if match := re.match(r"sep=([;,|\t])(?=\n|$)", text, re.I):  # as Excel writes it
            text, delimiter = text[match.end() :], match[1]
    csv.field_size_limit(MAX_BYTES)
    try:
        rows = [*csv.reader(StringIO(text), delimiter=delimiter, strict=True)]
    except csv.Error:
        rows = [*csv.reader(StringIO(text), delimiter=delimiter)]
        if text.count('"') % 2 and any("\n" in cell for row in rows for cell in row):
            rows = [*csv.reader(StringIO(text), delimiter=delimiter, quoting=csv.QUOTE_NONE)]
            notes += ("quotes are not closed; each line was read as a row, with its quotes",)
    return replace(extract, text="\n".join(row_lines(rows)), unit="row", notes=notes)


def read_xlsx(path: Path, data: bytes) -> Extract:
    """Return the sheets of a workbook, a line for each row, with the results of formulas."""
    from openpyxl import load_workbook

    notes = left_out(path, data)
    with parsing(path):
        file = load_workbook(BytesIO(data), read_only=True, data_only=True)
        formulas = load_workbook(BytesIO(data), read_only=True)
        sheets = [(sheet, formulas[sheet.title]) for sheet in file.worksheets]
    parts, unsaved, size = [], 0, 0
    for sheet, unevaluated in sheets:
        if sheet.sheet_state != "visible":
            notes.append(f"the hidden sheet {clean(sheet.title)} left out")
            continue
        rows, numeric = list[list[str]](), set[int]()
        with parsing(path):  # which reads while it yields
            sheet.reset_dimensions()  # files state fewer cells than they have
            unevaluated.reset_dimensions()
            for row in zip(sheet.iter_rows(), unevaluated.iter_rows(), strict=True):
                pairs = list(zip(*row, strict=True))
                if any(isinstance(a.value, int | float) for a, _ in pairs):
                    numeric.add(len(rows))
                unsaved += sum(a.value is None and b.value is not None for a, b in pairs)
                rows.append([cell_text(b if a.value is None else a) for a, b in pairs])
                size += sum(map(len, rows[-1]))
                if size > MAX_BYTES:  # a text that many cells share is packed once
                    raise DocumentError(f"{path} unpacks to more than {MAX_BYTES} characters.")
        text = "\n".join(row_lines(rows, numeric)).rstrip("\n")
        parts.append(Extract(text, headings=((0, f"{path.name}, sheet {clean(sheet.title)}"),)))
    if unsaved:
        notes.append(f"formulas without a saved result, left as formulas: {unsaved}")
    return replace(joined(parts, file.properties.title or "", "sheet"), notes=tuple(notes))


def cell_text(cell: Any) -> str:
    """Return the value of a cell as its reader sees it, with all digits, if its format is plain."""
    value = cell.value
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds").removesuffix(" 00:00:00")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "" if value is None else str(value)
    digits = f"{value:.15g}" if isinstance(value, float) else str(value)
    section = SECTION.match(cell.number_format or "")
    if section is None:
        return digits
    negative = SECTION.match(section.string, section.end()) if value < 0 else None
    before, whole, places, after = (negative or section).groups("")
    amount = abs(Decimal(digits)) * (100 if "%" in LITERAL.sub("", before + after) else 1)
    zeros = max(places.count("0"), -int(amount.normalize().as_tuple().exponent))
    number = f"{amount:0{whole.count('0') + zeros + bool(zeros)}.{zeros}f}"
    signs = "-()" if negative else ""
    before, after = (LITERAL.sub(r"\1\2\3", each).strip(signs) for each in (before, after))
    return f"{'-' * (value < 0)}{before}{number}{after}".strip()
