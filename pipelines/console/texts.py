"""Streams of text for a store: from folders, files of rows and data sets."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from ragspec.errors import DocumentError, InputError
from ragspec.pipelines.console.records import Setting

LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
PARQUET = ".parquet"
DOCUMENTS = (".txt", ".md", ".json", ".csv", ".pdf", ".html")
# Columns that are read by default, in this order; the last three hold token ids.
TEXT_FIELDS = ("text", "content", "document", "answer", "code", "ids", "input_ids", "tokens")
PROMPT_FIELDS = ("prompt", "messages", "question", "ids")
DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Files that `Dataset.save_to_disk` writes to a folder.
SAVED = ("dataset_dict.json", "state.json")
# Marks of a folder in the hub's layout: files named by split, or settings in the data card.
SPLIT_FILE = re.compile(
    r"(train|training|test|testing|valid|validation|val|dev|eval|evaluation)([-_.].*)?"
    r"\.(parquet|jsonl?|ndjson|csv|arrow)(\.\w+)?",
    re.IGNORECASE,
)
CARD = re.compile(r"---\n(?:(?!---).*\n)*?(configs|dataset_info):")
ROWS = 1024
TRAIN = "train"

Item = str | list[int]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextColumns:
    """The column of rows to read, and the split and config of a data set."""

    field: Annotated[
        str | None, Setting("Column of the rows; the usual names are tried without it.")
    ] = None
    split: Annotated[str | None, Setting("Part of a data set. Default: train.")] = None
    config: Annotated[str | None, Setting("Configuration of a data set.")] = None


def read_texts(
    sources: Iterable[str],
    columns: TextColumns,
    skipped: Callable[[str, str], None] = lambda path, reason: None,
) -> Iterator[Item]:
    """Yield the texts (or token ids) of folders, files and data sets, one after the other.

    A folder yields its documents and files of rows, in order of path; unreadable files are skipped.
    A source that is no path is the name of a Hugging Face data set. A folder may hold a data set
    too.

    Args:
        skipped: Called with each file that is left out and the reason.

    Raises:
        DocumentError: A source cannot be read.
        InputError: No source has the split or config, or a row has no such column.
    """
    sources = list(sources)
    for option in ("split", "config"):
        value = getattr(columns, option)
        if value is not None and not any(_has(option, source) for source in sources):
            raise InputError(
                f"--{option} is {value!r}, but {', '.join(sources)} has no {option}s: data sets "
                "have; leave it out."
            )
    for source in sources:
        path = Path(source)
        if path.is_dir():
            yield from _folder(path, columns, skipped)
        elif path.exists():
            yield from _file(path, columns)
        elif _is_path(source):
            raise DocumentError(f"{source} is missing; check the path.")
        else:
            yield from _texts(_hub_rows(source, columns), source, columns)


def check_sources(sources: Iterable[str]) -> None:
    """Raise DocumentError if a source is a path that leads nowhere."""
    for source in sources:
        if _is_path(source) and not Path(source).exists():
            raise DocumentError(f"{source} is missing; check the path.")


def read_prompts(path: Path, field: str | None = None) -> Iterator[Any]:
    """Yield the prompts of a file of rows: texts, chat messages or token ids.

    Args:
        path: A jsonl or parquet file.
        field: The column; None for the first of `prompt`, `messages`, `question` and `ids`.

    Raises:
        DocumentError: The file cannot be read, or a row holds no prompt.
        InputError: A row has no such column.
    """
    if not path.exists():
        raise DocumentError(f"{path} is missing; check the path.")
    for number, row in enumerate(_rows(path), 1):
        name = _pick(row, field, PROMPT_FIELDS, f"{path}, row {number}")
        value = row[name]
        kinds = {type(item) for item in value} if isinstance(value, list) else {type(value)}
        if not value or kinds not in (({dict}, {int}) if isinstance(value, list) else ({str},)):
            raise DocumentError(
                f"{path}, row {number}: got {str(value)[:40]!r} as {name!r}; expected a text, "
                "chat messages or token ids."
            )
        yield value


def _has(option: str, source: str) -> bool:
    """Return whether a source has splits or configs."""
    path = Path(source)
    if not path.is_dir():
        return not path.exists()  # the name of a data set
    if any((path / name).is_file() for name in SAVED):
        return option == "split" and (path / SAVED[0]).is_file()
    return _in_hub_layout(path)


def _folder(
    folder: Path, columns: TextColumns, skipped: Callable[[str, str], None]
) -> Iterator[Item]:
    from ragspec.retrievers.search.documents import list_files

    if any((folder / name).is_file() for name in SAVED):
        yield from _texts(_saved_rows(folder, columns), str(folder), columns)
        return
    if _in_hub_layout(folder):
        skipped(str(folder), "file by file, but as a data set.")
        rows = _loaded(str(folder.resolve()), columns, "cannot be read as a data set")
        yield from _texts(rows, str(folder), columns)
        return
    empty = True
    for path in list_files(folder):
        try:
            for item in _file(path, columns):
                empty = False
                yield item
        except (DocumentError, InputError) as error:
            if isinstance(error, InputError) and columns.field is not None:
                raise  # the requested column is missing
            skipped(str(path), str(error).removeprefix(str(path)).lstrip(" ,"))
    if empty:
        raise DocumentError(
            f"{folder} holds no usable text. Name a folder with documents, jsonl or parquet files."
        )


def _file(path: Path, columns: TextColumns) -> Iterator[Item]:
    from ragspec.retrievers.search.documents import load_document

    if path.name.lower().endswith((*LINES, PARQUET)):
        yield from _texts(_rows(path), str(path), columns)
    else:
        yield load_document(path).text


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; raise DocumentError if it holds none."""
    name = path.name.lower()
    if name.endswith(PARQUET):
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")  # untyped
        try:
            for batch in parquet.ParquetFile(path).iter_batches(ROWS):
                yield from batch.to_pylist()
        except (arrow.ArrowException, OSError) as error:
            raise DocumentError(f"{path} is no parquet file ({error}).") from error
        return
    if not name.endswith(LINES):
        raise DocumentError(f"{path} holds no rows; expected a jsonl or parquet file.")
    number = 0
    try:
        with (gzip.open if name.endswith(".gz") else open)(
            path, "rt", encoding="utf-8-sig"
        ) as file:
            for line in file:
                number += 1  # the message names the line that was read last
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"{type(row).__name__} instead of an object")
                    yield row
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DocumentError(f"{path}, line {number}: no JSON object ({error}).") from error


def _saved_rows(folder: Path, columns: TextColumns) -> Iterator[Row]:
    import datasets

    try:
        saved: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # it raises many kinds on damaged folders
        raise DocumentError(f"{folder} cannot be read as a data set ({error}).") from error
    if isinstance(saved, datasets.DatasetDict):
        split = columns.split or TRAIN
        if split not in saved:
            raise InputError(
                f"{folder} has no split {split!r}; it has {', '.join(saved)}: name it with --split."
            )
        saved = saved[split]
    yield from saved


def _hub_rows(name: str, columns: TextColumns) -> Iterator[Row]:
    """Yield the rows of a data set by name, streamed from the hub, or from its cache."""
    import datasets
    from huggingface_hub import constants

    from ragspec.models.resolve import hub_answers

    nowhere = "is no file, no folder, and no data set"
    if hub_answers():
        yield from _loaded(name, columns, f"{nowhere} on the hub")
        return
    # The libraries would retry a hub that does not answer for half a minute.
    places: tuple[Any, ...] = (datasets.config, constants)
    with ExitStack() as stack:
        for place in places:
            stack.callback(setattr, place, "HF_HUB_OFFLINE", place.HF_HUB_OFFLINE)
            place.HF_HUB_OFFLINE = True
        wrong = f"{nowhere} in the cache, and the hub does not answer"
        yield from _loaded(name, columns, wrong, streaming=False)


def _loaded(
    name: str, columns: TextColumns, wrong: str, *, streaming: bool = True
) -> Iterator[Row]:
    """Yield the rows of a data set; `wrong` begins the error message if it does not load."""
    import datasets

    try:
        split = columns.split or TRAIN
        rows = datasets.load_dataset(name, columns.config, split=split, streaming=streaming)
    except Exception as error:  # it raises many kinds, of several libraries
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(
            f"{name} {wrong} ({reason}); check the name, --config and --split."
        ) from error
    try:
        yield from rows
    except Exception as error:
        raise DocumentError(f"{name} cannot be read to its end ({error}).") from error


def _in_hub_layout(folder: Path) -> bool:
    """Return whether a folder holds a data set in the hub's layout."""
    files = [*folder.glob("*"), *folder.glob("data/*")]
    if any(SPLIT_FILE.fullmatch(path.name) and path.is_file() for path in files):
        return True
    try:
        card = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return CARD.match(card) is not None


def _texts(rows: Iterable[Row], name: str, columns: TextColumns) -> Iterator[Item]:
    for number, row in enumerate(rows, 1):
        where = f"{name}, row {number}"
        value = row[_pick(row, columns.field, TEXT_FIELDS, where)]
        if value is None:
            continue
        if not isinstance(value, str | list):
            raise InputError(
                f"{where} holds {type(value).__name__}; expected a text or a list of token ids: "
                "name another column with --field."
            )
        yield value


def _pick(row: Row, field: str | None, usual: Iterable[str], where: str) -> str:
    """Return the name of the column to read; raise InputError if that is not clear."""
    names = [name for name in (usual if field is None else [field]) if name in row]
    texts = [name for name, value in row.items() if field is None and isinstance(value, str)]
    if names or len(texts) == 1:
        return (names or texts)[0]
    missing = f"no column {field!r}" if field is not None else "no column of a usual name"
    raise InputError(
        f"{where} has {missing}; it has {', '.join(row) or 'none'}: name one with --field."
    )


def _is_path(source: str) -> bool:
    return (
        DATASET.fullmatch(source) is None
        or source.startswith((".", "~"))
        or source.lower().endswith((*LINES, PARQUET, *DOCUMENTS))
    )
