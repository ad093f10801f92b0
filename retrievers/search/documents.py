"""Load files and folders as documents: plain text with its title and headings.

All offsets count characters of a document's `text`. For text files it is the file's text with line
ends "\\n"; for HTML and PDF it is the extracted text.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ragspec.errors import DocumentError, StoreError
from ragspec.retrievers.search.encodings import Extract, clean, decode
from ragspec.storage.store import is_store, read_current

MAX_BYTES = 64 * 2**20
MARKDOWN = frozenset({".md", ".markdown", ".mdown", ".mkd"})
RST = frozenset({".rst", ".rest"})
HTML = frozenset({".html", ".htm", ".xhtml"})
PDF = frozenset({".pdf"})
PYTHON = frozenset({".py", ".pyi"})
ProgressCallback = Callable[[str, int, int], None]  # the stage, items done, all items
# Formats whose text is not extracted; refused by suffix, so that the reason is clear.
UNREAD = {
    ".doc .docx .odt .rtf .pages": "word-processor file",
    ".xls .xlsx .ods .numbers": "spreadsheet",
    ".ppt .pptx .odp .key": "presentation",
    ".epub .mobi .azw3": "electronic book",
    ".zip .gz .bz2 .xz .zst .7z .rar .tar .tgz .whl .jar": "archive",
    ".png .jpg .jpeg .gif .bmp .webp .tif .tiff .ico .heic": "picture",
    ".json .jsonl .ndjson .csv .tsv .parquet .npy .npz .sqlite .db .ipynb": "data file",
    ".mp3 .wav .flac .ogg .m4a .mp4 .mkv .mov .avi .webm": "recording",
}
UNREAD_SUFFIXES = {suffix: kind for names, kind in UNREAD.items() for suffix in names.split()}
MARKDOWN_PART = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})(?P<info>.*)$"
    r"|^#{1,6}[ \t]+(?P<hashed>\S.*?)[ \t]*#*[ \t]*$"
    r"|^(?P<underlined>\S.*)\n(?:={3,}|-{3,})[ \t]*$",
    re.M,
)
FRONT_MATTER = re.compile(r"---[ \t]*\n(?:.*\n)*?(?:---|\.\.\.)[ \t]*(?:\n|\Z)")
FRONT_TITLE = re.compile(r"^title:[ \t]*(.+?)[ \t]*$", re.M)
RST_HEADING = re.compile(r"^(\S.*)\n([=\-~^\"'`#*+.:_])\2{2,}[ \t]*$", re.M)
PYTHON_HEADING = re.compile(r"^((?:async +)?def|class) +(\w+)", re.M)


@dataclass(frozen=True, slots=True)
class Document:
    """One text that can be searched and cited.

    All text of a loaded document is valid UTF-8: a file name that is not has "?" for foreign bytes.

    Attributes:
        name: Unique in a collection: the path inside the folder that was read.
        headings: (character offset, heading) in order of offset.
        path: Path of the file.
        pages: Offset of each page, if the file has pages.
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

    def page_of(self, offset: int) -> int | None:
        """Return the page number of a character, from 1; None without pages."""
        return bisect_right(self.pages, offset) or None

    def heading_of(self, offset: int) -> str:
        """Return the nearest heading above a character, the title without one."""
        number = bisect_right(self.headings, offset, key=lambda heading: heading[0])
        return self.headings[number - 1][1] if number else self.title

    def place(self, start: int, end: int) -> str:
        """Return a position in the text, in words for people."""
        page = self.page_of(start)
        return f"characters {start} to {end}" if page is None else f"page {page}"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file of a folder that was not read, and why."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collection:
    """Loaded documents in sorted order, and the files that were skipped."""

    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...] = ()


def load_documents(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    max_bytes: int = MAX_BYTES,
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
    values = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not values:
        raise DocumentError("No path was given; name at least one file or folder of documents.")
    documents: list[Document] = []
    skipped: list[Skipped] = []
    read: set[str] = set()
    for path in map(Path, values):
        if path.is_dir():
            loaded = load_folder(path, max_bytes, known, on_progress, read)
            documents += loaded.documents
            skipped += loaded.skipped
        elif _first(path, read):
            documents.append(load_document(path, max_bytes=max_bytes, known=known))
    return Collection(tuple(with_unique_names(documents)), tuple(skipped))


def load_folder(
    folder: Path,
    max_bytes: int,
    known: Mapping[str, Document],
    on_progress: ProgressCallback,
    read: set[str],
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
    new = [path for path in files if _first(path, read)]
    for number, path in enumerate(new):
        on_progress("reading documents", number, len(new))
        try:
            name = path.relative_to(folder).as_posix()
            documents.append(load_document(path, name=name, max_bytes=max_bytes, known=known))
        except DocumentError as error:
            reason = str(error).removeprefix(f"{path} ")
            skipped.append(Skipped(clean(str(path)), clean(reason)))
    if not documents and len(new) == len(files):
        first = " (it holds no file)"
        if skipped:
            what = f"{skipped[0].path} {skipped[0].reason}".rstrip(".")
            first = f"; the first of {len(skipped)} skipped: {what}"
        raise DocumentError(
            f"{folder} holds no usable text{first}. "
            "Name a folder with txt, md, rst, html, pdf or source files."
        )
    return Collection(tuple(documents), tuple(skipped))


def _first(path: Path, read: set[str]) -> bool:
    """Add a path to those that were read; tell whether it is new."""
    place, count = os.path.abspath(path), len(read)
    read.add(place)
    return len(read) > count


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
    max_bytes: int = MAX_BYTES,
    known: Mapping[str, Document] = MappingProxyType({}),
) -> Document:
    """Read one file.

    Args:
        known: See `load_documents`.

    Raises:
        DocumentError: The file is missing or holds no usable text.
    """
    path = Path(path)
    data = read_bytes(path, max_bytes)
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
    )


def extract_text(path: Path, data: bytes) -> Extract:
    """Return the text of a file by the format that its suffix names.

    Raises:
        DocumentError: The file holds no text of this format.
        MissingExtraError: The format's package is missing.
    """
    suffix = path.suffix.lower()
    if suffix in PDF:
        from ragspec.retrievers.search.pdf import read_pdf

        return read_pdf(path, data)
    extract = decode(path, data)
    if suffix in HTML:
        from ragspec.retrievers.search.html import read_html

        page = read_html(extract.text)
        return replace(page, notes=extract.notes + page.notes)
    headings = find_headings(extract.text, suffix)
    title = headings[0][1] if headings and suffix in MARKDOWN | RST else ""
    if suffix in MARKDOWN and (front := FRONT_MATTER.match(extract.text)):
        named = FRONT_TITLE.search(front[0])
        title = named[1].strip("\"' ") if named else title
    return replace(extract, title=title, headings=tuple(headings))


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a file.

    Raises:
        DocumentError: It is missing, unreadable, too large, or of a refused format.
    """
    if path.is_symlink() and path.is_dir():
        raise DocumentError(f"{path} is a link to a folder, not followed; name that folder too.")
    kind = UNREAD_SUFFIXES.get(path.suffix.lower())
    if kind is not None and path.exists():
        raise DocumentError(f"{path} is a {path.suffix} file ({kind}); convert it to text first.")
    if path.is_symlink() and not path.exists():
        raise DocumentError(f"{path} is a link to something that is missing; restore or remove it.")
    if not path.exists():
        raise DocumentError(f"{path} is missing; check the path.")
    if not path.is_file():
        raise DocumentError(f"{path} is not a regular file; name a file or a folder.")
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise DocumentError(f"{path} has {size} bytes, more than the limit of {max_bytes}.")
        return path.read_bytes()
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror}).") from error


def find_headings(text: str, suffix: str) -> list[tuple[int, str]]:
    """Return (offset, heading) for the headings of Markdown, reStructuredText and Python text."""
    if suffix in MARKDOWN:
        front = FRONT_MATTER.match(text)
        return list(_markdown_headings(text, front.end() if front else 0))
    if suffix in RST:
        return [(match.start(), match[1].strip()) for match in RST_HEADING.finditer(text)]
    if suffix in PYTHON:
        return [(match.start(), match[2]) for match in PYTHON_HEADING.finditer(text)]
    return []


def _markdown_headings(text: str, start: int) -> Iterator[tuple[int, str]]:
    """Yield the headings behind a start, without those in fenced code."""
    fence = ""
    for match in MARKDOWN_PART.finditer(text, start):
        if mark := match["fence"]:
            if not fence:
                fence = mark
            elif mark.startswith(fence) and not match["info"].strip():
                fence = ""
        elif not fence:
            yield match.start(), (match["hashed"] or match["underlined"]).strip()
