"""Load files and folders as documents: plain text with its title and headings.

All offsets count characters of a document's `text`. For text files it is the file's text with line
ends "\\n"; for HTML and PDF it is the extracted text.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

from ragspec.errors import DocumentError, StoreError
from ragspec.storage.store import is_store, read_current

MAX_BYTES = 64 * 2**20
MARKDOWN = frozenset({".md", ".markdown", ".mdown", ".mkd"})
RST = frozenset({".rst", ".rest"})
HTML = frozenset({".html", ".htm", ".xhtml"})
PDF = frozenset({".pdf"})
PYTHON = frozenset({".py", ".pyi"})
PAGE_BREAK = "\n\n"
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
CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
MARKDOWN_HEADING = re.compile(
    r"^(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$|^(\S.*)\n(={3,}|-{3,})[ \t]*$", re.M
)
MARKDOWN_FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
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
    """

    name: str
    title: str
    text: str
    path: str | None = None
    headings: tuple[tuple[int, str], ...] = ()
    pages: tuple[int, ...] = ()
    digest: str = ""

    def page_of(self, offset: int) -> int | None:
        """Return the page number of a character, from 1; None without pages."""
        return bisect_right(self.pages, offset) or None


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
    suffix, pages = path.suffix.lower(), []
    if suffix in PDF:
        from ragspec.retrievers.search.formats import read_pdf

        title, texts = read_pdf(path, data)
        text = PAGE_BREAK.join(map(clean, texts))
        pages = [0, *accumulate(len(clean(each)) + len(PAGE_BREAK) for each in texts[:-1])]
        named = title or path.name
        headings = [(at, clean(f"{named}, page {n}")) for n, at in enumerate(pages, 1)]
    elif suffix in HTML:
        from ragspec.retrievers.search.formats import extract_html

        title, text, headings = extract_html(decode(path, data))
    else:
        text = decode(path, data)
        headings = find_headings(text, suffix)
        title = headings[0][1] if headings and suffix in MARKDOWN | RST else ""
    if not text.strip():
        hint = " A scanned PDF needs text recognition first." if suffix in PDF else ""
        raise DocumentError(f"{path} holds no text.{hint}")
    name, title, place = clean(name or path.name), clean(title or path.name), clean(str(path))
    return Document(name, title, text, place, tuple(headings), tuple(pages), digest)


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


def decode(path: Path, data: bytes) -> str:
    """Decode UTF-8, UTF-16 with its mark, else Windows-1252; raise DocumentError if binary."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        text = data.decode("utf-16", errors="replace")
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("cp1252", errors="replace")
    sample = text[:65536]
    strange = len(CONTROL.findall(sample)) + sample.count("�")
    if "\x00" in text or strange > 0.02 * len(sample):
        raise DocumentError(f"{path} is a binary file, expected text.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def clean(text: str) -> str:
    """Replace surrogates (of broken fonts and file names), which are not UTF-8, and NULs."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", " ")


def find_headings(text: str, suffix: str) -> list[tuple[int, str]]:
    """Return (offset, heading) for the headings of Markdown, reStructuredText and Python text."""
    if suffix in MARKDOWN:
        fences = [match.span() for match in MARKDOWN_FENCE.finditer(text)]
        return [
            (match.start(), (match[2] or match[3]).strip())
            for match in MARKDOWN_HEADING.finditer(text)
            if not any(start <= match.start() < end for start, end in fences)
        ]
    if suffix in RST:
        return [(match.start(), match[1].strip()) for match in RST_HEADING.finditer(text)]
    if suffix in PYTHON:
        return [(match.start(), match[2]) for match in PYTHON_HEADING.finditer(text)]
    return []
