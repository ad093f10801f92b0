"""JSON, lines of JSON and notebooks: a line for each value, with the path that leads to it.

A file is one document. A record of JSON lines is a part of it, cited by its line.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ragspec.errors import DocumentError, pluralize
from ragspec.retrievers.formats.encodings import SEQUENCE, TERMINAL, Extract, clean, decode, joined
from ragspec.retrievers.formats.html import read_html
from ragspec.retrievers.formats.markup import markdown_headings
from ragspec.retrievers.formats.readers import parsing

OBJECT = re.compile(r"<[\w.]+ object( at 0x\w+)?>")
TITLES = ("title", "name", "question", "subject")


def value_lines(value: object, name: str = "") -> Iterator[str]:
    """Yield a line for each value, named by its path."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from value_lines(each, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for number, each in enumerate(value):
            yield from value_lines(each, f"{name}[{number}]" if name else "")
            yield from [""] * (not name)
    else:
        values = value if isinstance(value, list) else [value]
        text = ", ".join(each if isinstance(each, str) else json.dumps(each) for each in values)
        yield f"{name}: {text}" if name else text


def record(source: str) -> Extract:
    """Return the text of a JSON value, under its title if it has one; numbers stay as written.

    Raises:
        ValueError: The source is no JSON, or nests too deeply.
    """
    try:
        value = json.loads(source, parse_int=str, parse_float=str, object_pairs_hook=_object)
        text = clean(SEQUENCE.sub("", "\n".join(value_lines(value)))).strip("\n")
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    titles = [value.get(key) for key in TITLES] if isinstance(value, dict) else []
    title = next((each for each in titles if isinstance(each, str)), "")
    title = clean(SEQUENCE.sub("", title)).strip()
    return Extract(text, title, ((0, title),) if title else ())


def _object(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return an object, with a list of the values for a key that occurs several times."""
    values = dict[str, list[object]]()
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return {key: each if len(each) > 1 else each[0] for key, each in values.items()}


def read_json(path: Path, data: bytes) -> Extract:
    """Return a line for each value of a JSON file; a file that is none is read as text."""
    extract = decode(path, data)
    try:
        return replace(record(extract.text), notes=extract.notes)
    except ValueError as error:
        note = f"no valid JSON ({error}); read as plain text"
        return replace(extract, unit="line", notes=(*extract.notes, note))


def read_json_lines(path: Path, data: bytes) -> Extract:
    """Return the records of a file with a JSON value on each line."""
    extract = decode(path, data)
    parts, broken = [], []
    for number, line in enumerate(extract.text.split("\n"), 1):
        try:
            parts.append(record(line) if line.strip() else Extract(""))
        except ValueError:
            broken.append(str(number))
            parts.append(Extract(line))
    numbers = ", ".join(broken[:5])
    note = f"left as text, no valid JSON: {pluralize(len(broken), 'line')}, as {numbers}"
    notes = (*extract.notes, note) if broken else extract.notes
    return replace(joined(parts, unit="line"), notes=notes)


def read_notebook(path: Path, data: bytes) -> Extract:
    """Return the cells of a notebook and their outputs; raise DocumentError if it is none."""
    source = decode(path, data).text
    with parsing(path):
        notebook = json.loads(source)
    if not isinstance(notebook, dict) or not {"cells", "worksheets"} & notebook.keys():
        raise DocumentError(f"{path} is no notebook; expected JSON with cells or worksheets.")
    with parsing(path):
        sheets = [notebook, *notebook.get("worksheets", ())]  # these up to version 3
        cells = [cell for sheet in sheets for cell in sheet.get("cells", ())]
        kinds = [cell["cell_type"] for cell in cells]
        sources = ["".join(cell["source"] if "source" in cell else cell["input"]) for cell in cells]
        every = [[dict(o.get("data") or o) for o in cell.get("outputs") or ()] for cell in cells]
    parts, pictures = [], 0
    for kind, text, outputs in zip(kinds, sources, every, strict=True):
        headings = markdown_headings(text) if kind == "markdown" else ()
        pictures += sum(any(form.startswith("image/") for form in each) for each in outputs)
        texts = filter(None, [text, *map(output_text, outputs)])
        parts.append(Extract(clean(TERMINAL.sub("", "\n\n".join(texts))), headings=headings))
    title = next((heading for part in parts for _, heading in part.headings), "")
    notes = (f"{pluralize(pictures, 'picture')} left out",) if pictures else ()
    return replace(joined(parts, title, "cell"), notes=notes)


def output_text(forms: dict[str, object]) -> str:
    """Return the text of an output: a table of its page, else its plain text, else an error.

    Plain text that only names an object yields to the other forms.
    """
    lines = {name: each if isinstance(each, list) else [each or ""] for name, each in forms.items()}
    texts = {name: "".join(map(str, each)) for name, each in lines.items()}
    page, plain = texts.get("text/html"), texts.get("text/plain", texts.get("text", ""))
    result = "" if OBJECT.fullmatch(plain) else plain
    if page and ("<table" in page or not result):
        result = read_html(page).text
    result = result or texts.get("text/markdown") or texts.get("text/latex") or plain
    return result or ": ".join(texts[name] for name in ("ename", "evalue") if texts.get(name))
