"""The table of file formats: which reader takes a suffix, and which suffixes are refused.

A reader is a function of a file's path and bytes that returns an `Extract`. It is imported on use.
"""

import gzip
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

from ragspec.errors import DocumentError, RagspecError
from ragspec.registry import optional_packages
from ragspec.retrievers.formats.encodings import Extract

MAX_BYTES = 64 * 2**20
_READERS = {
    ".md .markdown .mdown .mkd": "markup:read_markdown",
    ".rst .rest": "markup:read_rst",
    ".py .pyi": "markup:read_python",
    ".ics .ifb .vcf": "markup:read_calendar",
    ".html .htm .xhtml": "html:read_page",
    ".epub": "office:read_epub",
    ".pdf": "pdf:read_pdf",
    ".docx .docm .dotx .dotm": "office:read_docx",
    ".pptx .pptm .ppsx .ppsm .potx .potm": "office:read_pptx",
    ".xlsx .xlsm .xltx .xltm": "sheets:read_xlsx",
    ".csv .tsv .tab": "sheets:read_csv",
    ".json": "data:read_json",
    ".jsonl .ndjson": "data:read_json_lines",
    ".ipynb": "data:read_notebook",
    ".eml .mht .mhtml": "mail:read_message",
    ".mbox .mbx": "mail:read_mailbox",
    ".1 .2 .3 .4 .5 .6 .7 .8": "man:read_man",
}
READERS = {suffix: reader for names, reader in _READERS.items() for suffix in names.split()}
TEXT = "markup:read_text"  # for every other suffix
UNREAD = {
    ".doc .odt .rtf .pages": "word-processor file",
    ".xls .xlsb .ods .numbers": "spreadsheet",
    ".ppt .odp .key": "presentation",
    ".msg .pst": "mail of Outlook",
    ".mobi .azw3": "electronic book",
    ".zip .bz2 .xz .zst .7z .rar .tar .tgz .whl .jar": "archive",
    ".png .jpg .jpeg .gif .bmp .webp .tif .tiff .ico .heic": "picture",
    ".parquet .npy .npz .sqlite .db": "data file",
    ".mp3 .wav .flac .ogg .m4a .mp4 .mkv .mov .avi .webm": "recording",
}
MAX_UNPACKED = 2**29
MAILBOX = re.compile(rb"From [^\n]{,200}\d:\d\d[^\n]{,40} \d{4}\b[^\n]{,40}\n[!-9;-~]+:")
STRICT = b"http://purl.oclc.org/ooxml/"  # names of ISO 29500, which the packages do not read
# Parts that readers leave out -> their name in the archive of an office file or a book.
LEFT_OUT = {
    "pictures": re.compile(r"^(?!docProps/).*\.(png|jpe?g|gif|svg|emf|wmf|bmp|tiff?|webp)$", re.I),
    "charts and diagrams": re.compile(r"/(charts/chart|diagrams/data)[^/]*\.xml$"),
    "drawings": re.compile(r"^xl/drawings/[^/]*\.xml$"),
    "macros": re.compile(r"/vbaProject\.bin$"),
    "embedded files": re.compile(r"/embeddings/[^/]+$"),
    "files of comments": re.compile(r"/(threadedC|modernC|c)omments?[^/]*\.xml$"),
}
UNREAD_SUFFIXES = {suffix: kind for names, kind in UNREAD.items() for suffix in names.split()}


def format_of(path: Path) -> str:
    """Return the suffix that names the format of a file, in lower case, without ".gz"."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def check_format(path: Path) -> None:
    """Raise DocumentError for a file of a refused format."""
    suffix = format_of(path)
    if kind := UNREAD_SUFFIXES.get(suffix):
        raise DocumentError(f"{path} is a {suffix} file ({kind}); convert it to text first.")


def extract_text(path: Path, data: bytes) -> Extract:
    """Return the text of a file by the format that its suffix names.

    Raises:
        DocumentError: The file is damaged or holds no text of this format.
        MissingExtraError: The format's package is missing.
    """
    suffix = format_of(path)
    if path.suffix.lower() == ".gz":
        try:
            data = gzip.GzipFile(fileobj=BytesIO(data)).read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DocumentError(f"{path} is a broken gzip file ({error}).") from error
        if len(data) > MAX_BYTES:
            raise DocumentError(f"{path} unpacks to more than the limit of {MAX_BYTES} bytes.")
    section = suffix[:2] if suffix[1:2].isdigit() else suffix  # of a manual: .3pm is .3
    section = ".mbox" if not suffix and MAILBOX.match(data) else section
    module, _, reader = READERS.get(section, TEXT).partition(":")
    with optional_packages():
        read = getattr(import_module(f"ragspec.retrievers.formats.{module}"), reader)
        extract: Extract = read(path, data)
    return extract


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Raise DocumentError for the errors of a package that reads a file.

    The block holds nothing but calls of the package, so that faults of this library stay visible.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # they speak of saving the file again
            yield
    except RagspecError:
        raise
    except Exception as error:  # the packages share no class of errors
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        line = re.sub(r"<_io\.\w+ .*?>", lambda _: path.name, line)
        raise DocumentError(f"{path} is damaged, or no {format_of(path)} file ({line}).") from error


def left_out(path: Path, data: bytes) -> list[str]:
    """Return notes on the parts of an archive that have no text or are not read.

    Raises:
        DocumentError: It is no archive, is encrypted, or unpacks to too much.
    """
    if data.startswith(b"\xd0\xcf\x11\xe0"):  # OLE, in which Office stores files with a password
        raise DocumentError(f"{path} is encrypted or of an old format; save it without a password.")
    with parsing(path):
        archive = ZipFile(BytesIO(data))
        size, names = sum(file.file_size for file in archive.infolist()), archive.namelist()
        strict = "_rels/.rels" in names and STRICT in archive.read("_rels/.rels")
    if strict:
        raise DocumentError(
            f"{path} is Strict Open XML; save it as an ordinary {path.suffix} file."
        )
    if size > MAX_UNPACKED:
        raise DocumentError(f"{path} unpacks to {size} bytes, more than {MAX_UNPACKED}.")
    counts = {part: sum(map(bool, map(form.search, names))) for part, form in LEFT_OUT.items()}
    return [f"{count} {part} left out" for part, count in counts.items() if count]
