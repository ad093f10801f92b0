"""Load files and folders as documents: plain text with its title and headings.

All offsets count characters of a document's `text`. For text files it is the file's text with line
ends "\\n"; for other formats it is the text that a reader of `retrievers/formats` extracts.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ragspec.errors import DocumentError, InputError, MissingExtraError, StoreError
from ragspec.retrievers.formats.encodings import clean
from ragspec.retrievers.formats.readers import MAX_BYTES, check_format, extract_text
from ragspec.storage.store import is_store, read_current

ProgressCallback = Callable[[str, int, int], None]  # the stage, items done, all items


@dataclass(frozen=True, slots=True)
class Document:
    """One text that can be searched and cited.

    All text of a loaded document is valid UTF-8: a file name that is not has "?" for foreign bytes.

    Attributes:
        name: Unique in a collection: the path inside the folder that was read.
        headings: (character offset, heading) in order of offset.
        path: Path of the file.
        pages: Offset of each part that `unit` names, if the file has such parts.
        unit: The part of a file that a citation names: "page", "slide", "sheet", "message", "cell"
            or "line"; "" where the file has none. Lines without `pages` are those of the text.
        digest: SHA-256 of the file.
        notes: Guesses and repairs that the text needed, and the parts that were left out.
    """

    name: str
    title: str
    text: str
    path: str | None = None
    headings: tuple[tuple[int, str], ...] = ()
    pages: tuple[int, ...] = ()
    digest: str = ""
    notes: tuple[str, ...] = ()
    unit: str = ""

    def page_of(self, offset: int) -> int | None:
        """Return the page number of a character, from 1; None without pages."""
        return (bisect_right(self.pages, offset) or None) if self.unit == "page" else None

    def place(self, start: int, end: int) -> str:
        """Return where text[start:end] stands, such as "page 3", "line 12" or "sheet 2, row 7"."""
        if not self.unit:
            return f"characters {start} to {end}"
        part = bisect_right(self.pages, start)
        line = self.text.count("\n", self.pages[part - 1] if part else 0, start) + 1
        if self.unit == "sheet":
            return f"sheet {part}, row {line}"
        return f"{self.unit} {part or line}"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file of a folder that was not read, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collection:
    """Loaded documents in sorted order, the files that were skipped, and all paths named."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...] = ()
    paths: tuple[str, ...] = ()


def load_documents(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    known: Mapping[str, Document] = MappingProxyType({}),
    on_progress: ProgressCallback = lambda what, done, total: None,
) -> Collection:
    """Read files and folders (recursively, sorted, hidden names left out).

    A file in `paths` must be usable; unusable files of a folder are skipped and listed with the
    reason. A file that several paths lead to is read once.

    Args:
        known: Documents by path; they are reused if the file's hash is still the same.
        on_progress: Called with the stage, the files done, and all files.

    Raises:
        DocumentError: A path is missing, a file is unusable, or a folder has no usable file.
    """
    values = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
    if not all(isinstance(path, str | os.PathLike) and path != "" for path in values):
        raise InputError(f"got {paths!r} as documents; expected a path, or a list of paths.")
    absolute = tuple(os.path.abspath(path) for path in values)
    if not absolute:
        raise DocumentError("No path was given; name at least one file or folder of documents.")
    documents: list[Document] = []
    skipped: list[Skipped] = []
    read: set[str] = set()
    for path in map(Path, absolute):
        if path.is_dir():
            loaded = load_folder(path, known, on_progress, read)
            documents += loaded.documents
            skipped += loaded.skipped
        elif str(path) not in read:
            read.add(str(path))
            documents.append(load_document(path, known=known))
    return Collection(tuple(with_unique_names(documents)), tuple(skipped), absolute)


def load_folder(
    folder: Path, known: Mapping[str, Document], on_progress: ProgressCallback, read: set[str]
) -> Collection:
    """Read every usable file below a folder.

    Args:
        read: Paths that were read before and are left out; the new paths are added.

    Raises:
        DocumentError: No file is usable.
    """
    documents: list[Document] = []
    skipped: list[Skipped] = []
    files = list_files(folder)
    new = [path for path in files if str(path) not in read]
    read.update(map(str, new))
    for number, path in enumerate(new):
        on_progress("reading documents", number, len(new))
        try:
            name = path.relative_to(folder).as_posix()
            documents.append(load_document(path, name=name, known=known))
        except (DocumentError, MissingExtraError) as error:
            reason = str(error).removeprefix(f"{path} ")
            skipped.append(Skipped(clean(str(path)), clean(reason)))
    if not documents and len(new) == len(files):
        first = " (it holds no file)"
        if skipped:
            what = f"{skipped[0].path} {skipped[0].reason}".rstrip(".")
            first = f"; the first of {len(skipped)} skipped: {what}"
        raise DocumentError(
            f"{folder} holds no usable text{first}. "
            "Name a folder with text, Markdown, HTML, PDF, office or source files."
        )
    return Collection(tuple(documents), tuple(skipped))


def list_files(folder: Path) -> list[Path]:
    """List the files below a folder, sorted by path, without hidden files and ragspec's stores.

    Links to folders are listed but not followed: they may form a circle or leave the folder.

    Raises:
        DocumentError: The folder is such a store itself, or cannot be listed.
    """
    if is_store(folder):
        raise DocumentError(f"{folder} is {_advice(folder)}.")
    results: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=raise_unreadable):
        if is_store(Path(root)):  # an index that was written among its own documents
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(root, name).is_symlink()]
        results += [Path(root, name) for name in (*names, *links) if not name.startswith(".")]
    return sorted(results, key=lambda path: path.as_posix())


def _advice(folder: Path) -> str:
    """Describe a store that was passed instead of documents, and how to use it."""
    from ragspec.retrievers.corpus.catalogue import KIND

    kind = ""
    with suppress(StoreError):  # a damaged one
        kind = read_current(folder)[1].kind
    if kind == KIND:
        return "a store of text, expected documents; draft from it with --store"
    return "an index, expected documents; open it with `ragspec ask --docs`"


def raise_unreadable(error: OSError) -> None:
    """Raise a DocumentError for a folder that cannot be listed."""
    raise DocumentError(f"{error.filename} cannot be read ({error.strerror}).") from error


def with_unique_names(documents: Sequence[Document]) -> list[Document]:
    """Rename documents whose name occurs before, by their path or with a number."""
    renamed: dict[str, Document] = {}
    for document in documents:
        name = document.name
        if name in renamed and document.path is not None:
            name = Path(document.path).as_posix()
        base, number = name, 2
        while name in renamed:
            name, number = f"{base} ({number})", number + 1
        renamed[name] = replace(document, name=name)
    return list(renamed.values())


def load_document(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    known: Mapping[str, Document] = MappingProxyType({}),
) -> Document:
    """Read one file.

    Args:
        known: See `load_documents`.

    Raises:
        DocumentError: The file is missing or holds no usable text.
    """
    path = Path(path)
    data = read_bytes(path)
    digest = hashlib.sha256(data).hexdigest()
    before = known.get(clean(str(path)))
    if before is not None and before.digest == digest:
        return replace(before, name=clean(name or path.name))
    extract = extract_text(path, data)
    if not extract.text.strip():
        raise DocumentError(f"{path} holds no text.")
    return Document(
        clean(name or path.name),
        extract.title or clean(path.name),
        extract.text,
        clean(str(path)),
        extract.headings,
        extract.pages,
        digest,
        extract.notes,
        extract.unit,
    )


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file; raise DocumentError if it is missing, too large or refused."""
    if path.is_symlink() and path.is_dir():
        raise DocumentError(f"{path} is a link to a folder, not followed; name that folder too.")
    if path.exists():
        check_format(path)
    if path.is_symlink() and not path.exists():
        raise DocumentError(f"{path} is a link to something that is missing; restore or remove it.")
    if not path.exists():
        raise DocumentError(f"{path} is missing; check the path.")
    if not path.is_file():
        raise DocumentError(f"{path} is not a regular file; name one.")
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DocumentError(f"{path} has {size} bytes, more than the limit of {MAX_BYTES}.")
        return path.read_bytes()
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror}).") from error
