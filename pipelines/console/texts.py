"""Streams of text for a store: from folders, files of rows and data sets."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from ragspec.errors import DocumentError, InputError
from ragspec.pipelines.console.records import setting

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = ".parquet"
# Columns that are read by default, in this order; the last three hold token ids.
TEXT_FIELDS = ("text", "content", "document", "answer", "code", "ids", "input_ids", "tokens")
PROMPT_FIELDS = ("prompt", "messages", "question", "turns", "ids", "text")
HUB = "hf:"  # begins the name of a data set of Hugging Face, or of a folder that holds one
ROWS = 1024

Item = str | list[int]
Row = Mapping[str, Any]
OnSkipped = Callable[[str, str], None]  # takes a file that is left out, and the reason
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextColumns:
    """The column of rows to read, and the split and config of a data set."""

    field: str | None = setting(None, "Column of the rows; the usual names are tried without it.")
    split: str | None = setting(None, "Part of a data set hf:NAME. Default: train.")
    config: str | None = setting(None, "Configuration of a data set hf:NAME.")


def read_texts(
    sources: Iterable[str], columns: TextColumns, skipped: OnSkipped = lambda path, reason: None
) -> Iterator[Item]:
    """Return the texts (or token ids) of folders, files and data sets, one after the other.

    The first is read at once, and of rows the first `ROWS`, so that a wrong one is named before a
    model is loaded. A folder has its files, in order of path; unreadable ones are skipped, and
    files of rows from a wrong row on.
    `hf:NAME` is a data set, by its name or its folder, as `datasets.load_dataset` takes it.

    Raises:
        DocumentError: A source cannot be read.
        InputError: No source is a data set with the split or config, or a row has no such column.
    """
    sources = list(sources)
    for option in ("split", "config"):
        value = getattr(columns, option)
        if value is not None and not any(source.startswith(HUB) for source in sources):
            raise InputError(
                f"got --set {option}={value}, but {', '.join(sources)} has no {option}s: data sets "
                f"have, such as {HUB}NAME; leave it out."
            )
    for source in sources:
        if not source or not (source.startswith(HUB) or Path(source).exists()):
            raise DocumentError(
                f"{source or 'an empty path'} is missing; check the path, or name a data set by "
                f"{HUB}NAME."
            )
    return read_ahead(chain.from_iterable(_source(s, columns, skipped) for s in sources), 1)


def read_ahead(rows: Iterable[T], count: int = ROWS) -> Iterator[T]:
    """Return rows of which the first `count` are read at once."""
    rows = iter(rows)
    return chain(list(islice(rows, count)), rows)


def _source(source: str, columns: TextColumns, skipped: OnSkipped) -> Iterator[Item]:
    if source.startswith(HUB):
        return _texts(_data_set(source.removeprefix(HUB), columns), columns)
    path = Path(source)
    return _folder(path, columns, skipped) if path.is_dir() else _file(path, columns)


def read_prompts(path: Path, field: str | None = None) -> Iterator[object]:
    """Yield the prompts of a file of rows: texts, chat messages or token ids.

    Args:
        field: The column; None for the first of `PROMPT_FIELDS`. Of `turns` the first one counts.

    Raises:
        DocumentError: The file cannot be read, or a row holds no prompt.
        InputError: A row has no such column.
    """
    for where, row in read_rows(path):
        name = _pick(row, field, PROMPT_FIELDS, where)
        value = row[name]
        kinds: object = {*map(type, value)} if isinstance(value, list) else type(value)
        if name == "turns" and kinds == {str}:
            value, kinds = value[0], str
        if not value or kinds not in ({dict}, {int}, str):
            raise DocumentError(
                f"{where}: got {str(value)[:40]!r} as {name!r}; expected a text, "
                "chat messages or token ids."
            )
        yield value


def _folder(folder: Path, columns: TextColumns, skipped: OnSkipped) -> Iterator[Item]:
    from ragspec.retrievers.search.documents import list_files

    empty = True
    for path in list_files(folder):
        where = ""
        try:
            for item in _file(path, columns, ahead=0):
                empty, where = False, "from here on: "
                yield item
        except (DocumentError, InputError) as error:
            if isinstance(error, InputError) and columns.field is not None:
                raise  # the requested column is missing
            skipped(str(path), where + str(error).removeprefix(str(path)).lstrip(" ,"))
    if empty:
        raise DocumentError(
            f"{folder} holds no usable text. Name a folder with documents, jsonl or parquet files."
        )


def _file(path: Path, columns: TextColumns, ahead: int = ROWS) -> Iterator[Item]:
    from ragspec.retrievers.search.documents import load_document

    if path.name.lower().endswith((*LINES, PARQUET)):
        yield from read_ahead(_texts(read_rows(path), columns), ahead)
    else:
        yield load_document(path).text


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield rows of JSON lines or parquet with where they stand; raise DocumentError for none."""
    row = None
    for row in _rows(path):
        yield row
    if row is None:
        raise DocumentError(f"{path} holds no rows; expected one object in each line.")


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    name = path.name.lower()
    if not path.exists():
        raise DocumentError(f"{path} is missing; check the path.")
    if name.endswith(PARQUET):
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")  # untyped
        try:
            batches = parquet.ParquetFile(path).iter_batches(ROWS)
            for number, row in enumerate((r for batch in batches for r in batch.to_pylist()), 1):
                yield f"{path}, row {number}", row
        except (arrow.ArrowException, OSError) as error:
            raise DocumentError(f"{path} is no parquet file ({error}).") from error
        return
    if not name.endswith(LINES):
        raise DocumentError(f"{path} holds no rows; expected a jsonl or parquet file.")
    where = f"{path}, line 1"
    try:
        opener = gzip.open if name.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}, line {number}"
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"{type(row).__name__} instead of an object")
                    yield where, row
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DocumentError(f"{where}: no JSON object ({error}).") from error


def _data_set(name: str, columns: TextColumns) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a data set, streamed; from the cache if the hub is switched off."""
    import datasets

    streaming = not datasets.config.HF_HUB_OFFLINE or Path(name).is_dir()
    split = columns.split or "train"
    try:
        rows = datasets.load_dataset(name, columns.config, split=split, streaming=streaming)
    except Exception as error:  # it raises many kinds, of several libraries
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(
            f"{HUB}{name} is no data set that loads ({reason}); check the name, config and split."
        ) from error
    try:
        for number, row in enumerate(rows, 1):
            yield f"{HUB}{name}, row {number}", row
    except Exception as error:
        raise DocumentError(f"{HUB}{name} cannot be read to its end ({error}).") from error


def _texts(rows: Iterable[tuple[str, Row]], columns: TextColumns) -> Iterator[Item]:
    for where, row in rows:
        value = row[_pick(row, columns.field, TEXT_FIELDS, where)]
        if value is None:
            continue
        ids = isinstance(value, list) and {*map(type, value)} <= {int}
        if not isinstance(value, str) and not ids:
            raise InputError(
                f"{where} holds {type(value).__name__}; expected text or token ids: set field=."
            )
        yield value


def _pick(row: Row, field: str | None, usual: Iterable[str], where: str) -> str:
    """Return the usual column, or the only text of a row without lists; refuse other rows."""
    names = [name for name in (usual if field is None else [field]) if name in row]
    names.sort(key=lambda name: row[name] is None)
    texts = [name for name, value in row.items() if field is None and isinstance(value, str)]
    if names or (len(texts) == 1 and not any(isinstance(v, list | dict) for v in row.values())):
        return (names or texts)[0]
    missing = f"no column {field!r}" if field is not None else "no column of a usual name"
    raise InputError(
        f"{where} has {missing}; it has {', '.join(row) or 'none'}: name one with --set field=."
    )
