"""Load files and folders as documents: plain text with its title and headings.

All offsets count characters of a document's `text`. For text files it is the file's text with line
ends "\\n"; for other formats it is the text that a reader of `retrievers/formats` extracts.
"""

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ragspec.errors import DocumentError, InputError, MissingExtraError, StoreError
from ragspec.retrievers.formats.encodings import clean, clean_path
from ragspec.retrievers.formats.readers import MAX_BYTES, check_format, extract_text
from ragspec.storage.store import is_store, read_current

ProgressCallback = Callable[[str, int, int], None]  # the stage, items done, all items
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class Document:
    """One text that can be searched and cited.

    All text of a loaded document is valid UTF-8: a file name that is not has escapes in it.

    Attributes:
        name: Unique in a collection: the path inside the folder that was read.
        headings: (character offset, heading) in order of offset.
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

    def __post_init__(self) -> None:
        if not all(isinstance(each, str) for each in (self.name, self.title, self.text)):
            raise InputError(f"got {self!r:.80}; expected texts as its name, title and text.")

    def page_of(self, offset: int) -> int | None:
        """Return the page number of a character, from 1; None without pages."""
        return (bisect_right(self.pages, offset) or None) if self.unit == "page" else None

    def place(self, start: int, end: int) -> str:
        """Return where text[start:end] stands, such as "page 3" or "row 7 to row 9"."""
        if not self.unit:
            return f"characters {start} to {end}"
        first, last = (self._part_at(at) for at in (start, max(start, end - 1)))
        return first if first == last else f"{first} to {last}"

    def _part_at(self, offset: int) -> str:
        part = bisect_right(self.pages, offset)
        line = self.text.count("\n", self.pages[part - 1] if part else 0, offset) + 1
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


def path_list(paths: Paths) -> list[str]:
    """Return one path or several as a list; raise InputError for one that is none, or empty."""
    values = list(paths) if isinstance(paths, Iterable) and not isinstance(paths, str) else [paths]
    if not all(isinstance(path, str | os.PathLike) and path != "" for path in values):
        raise InputError(f"got {paths!r}; expected a path, or a list of paths, none of them empty.")
    return [os.fspath(path) for path in values]


def load_documents(
    paths: Paths,
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
    absolute = tuple(dict.fromkeys(map(os.path.abspath, path_list(paths))))
    if not absolute:
        raise DocumentError("No path was given; name at least one file or folder of documents.")
    documents, skipped, read = list[Document](), list[Skipped](), set[str]()
    for path in map(Path, absolute):
        if os.path.isdir(path):  # false, too, below a folder that may not be entered
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
    """Read every usable file below a folder; raise DocumentError if none is.

    Args:
        read: Paths that were read before and are left out; the new paths are added.
    """
    documents, skipped = list[Document](), list[Skipped]()
    files = list_files(folder)
    new = [path for path in files if str(path) not in read]
    read.update(map(str, new))
    for number, path in enumerate(new):
        on_progress("reading documents", number, len(new))
        try:
            name = path.relative_to(folder).as_posix()
            documents.append(load_document(path, name=name, known=known))
        except Exception as error:  # no single file stops a folder, whatever its reader does
            is_ours = isinstance(error, DocumentError | MissingExtraError)
            reason = str(error) if is_ours else f"cannot be read ({error!r})"
            skipped.append(Skipped(clean_path(str(path)), clean(reason.removeprefix(f"{path} "))))
    if not documents and len(new) == len(files):
        what = "".join(f"{each.path} {each.reason}".rstrip(".") for each in skipped[:1])
        first = f"; the first of {len(skipped)} skipped: {what}" if what else " (it holds no file)"
        raise DocumentError(
            f"{folder} holds no usable text{first}. "
            "Name a folder with text, Markdown, HTML, PDF, office or source files."
        )
    return Collection(tuple(documents), tuple(skipped))


def list_files(folder: Path) -> list[Path]:
    """List the files below a folder, sorted by path, without hidden files and ragspec's stores.

    Links to folders are listed but not followed: they may form a circle or leave the folder.
    Folders that cannot be read are listed, too.

    Raises:
        DocumentError: The folder is such a store itself.
    """
    if is_store(folder):
        raise DocumentError(f"{folder} is {_advice(folder)}.")
    results: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=lambda e: results.append(Path(e.filename))):
        if is_store(Path(root)):  # an index that was written among its own documents
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(root, name).is_symlink()]
        results.extend(Path(root, each) for each in (*names, *links) if not each.startswith("."))
    return sorted(results, key=lambda path: path.as_posix())


def _advice(folder: Path) -> str:
    """Describe a store that was passed instead of documents, and how to use it."""
    from ragspec.retrievers.corpus.catalogue import KIND

    with suppress(StoreError):  # a damaged one
        if read_current(folder)[1].kind == KIND:
            return "a store of text, expected documents; draft from it with --store"
    return "an index, expected documents; open it with `ragspec ask --docs`"


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
    """Read one file; raise DocumentError if it is missing or holds no usable text."""
    path = Path(path)
    name, place = clean_path(name or path.name), clean_path(str(path))
    data = read_bytes(path)
    digest = hashlib.sha256(data).hexdigest()
    before = known.get(place)
    if before is not None and before.digest == digest:
        return replace(before, name=name)
    extract = extract_text(path, data)
    if not extract.text.strip():
        raise DocumentError(f"{path} holds no text.")
    fields = asdict(replace(extract, title=extract.title or clean(path.name)))
    return Document(name, path=place, digest=digest, **fields)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file; raise DocumentError if it is missing, too large or refused."""
    is_link = os.path.islink(path)
    if is_link and os.path.isdir(path):
        raise DocumentError(f"{path} is a link to a folder, not followed; name that folder too.")
    try:
        status = path.stat()
        check_format(path)
        if stat.S_ISDIR(status.st_mode):
            os.listdir(path)  # fails if this is why the folder was not read
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError(f"{path} is not a regular file; name one.")
        if (size := status.st_size) > MAX_BYTES:
            raise DocumentError(f"{path} has {size} bytes, more than the limit of {MAX_BYTES}.")
        return path.read_bytes()
    except DocumentError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # the last for a NUL
        what = "a link to something that is missing; restore or remove it"
        what = what if is_link else "missing; check the path"
        raise DocumentError(f"{path} is {what}.") from error
    except OSError as error:
        raise DocumentError(f"{path} cannot be read ({error.strerror}).") from error
