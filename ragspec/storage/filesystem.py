"""File system operations: read and write files, flush them, and lock out other writers."""

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragspec.errors import InputError, StoreError

LOCK = "LOCK"
POLL_SECONDS = 0.02


def unreadable(path: Path, error: OSError) -> StoreError:
    """Return the error for an unreadable file. Only a missing file calls for a new store."""
    if isinstance(error, FileNotFoundError):
        return StoreError(f"{path} is missing; make its folder again.")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StoreError(
            f"{path} cannot be opened: this process has too many open files; raise the limit "
            "(ulimit -n), then open it again."
        )
    return StoreError(
        f"{path} cannot be read ({error.strerror or error}); check its permissions and the disk."
    )


def expect_path(path: object, what: str, expected: str = "a path") -> Path:
    """Return a path; raise InputError for a value of another type."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"got {path!r} as {what}; expected {expected}.")
    return Path(path)


def read_file(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        StoreError: The file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def read_input(path: Path, what: str) -> str:
    """Return the text of a file that the user named; raise InputError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{what} {path} cannot be read ({error}); expected a text file in UTF-8. Check it."
        ) from error


def write_output(path: Path, what: str, text: str) -> None:
    """Write a file that the user named; raise InputError and leave an earlier one if that fails.

    Characters that UTF-8 cannot hold become "?".
    """
    file = Path(os.path.realpath(path))  # a link stays
    part = file.parent / f".{os.urandom(8).hex()}.part"
    old = os.path.isfile(path) and not str(path).startswith(("/dev/std", "/dev/fd/"))
    if os.path.exists(path) and not (old and os.access(file.parent, os.W_OK)):  # or a pipe
        file = part = path
    try:
        if old:
            path.open("ab").close()  # refused for a protected file, which could be replaced
        part.write_text(text, encoding="utf-8", errors="replace")
        if part != file:
            if old:
                shutil.copymode(file, part)
            os.replace(part, file)
    except OSError as error:
        raise InputError(
            f"{what} cannot be written to {str(path)!r} ({error.strerror}); expected a file in an "
            "existing, writable folder on a disk with room. Choose another path."
        ) from error
    finally:
        if part != file:
            with suppress(OSError):
                part.unlink()


def check_folder(folder: Path) -> None:
    """Raise InputError if a folder, or the nearest path above it that exists, is not writable."""
    nearest = next(filter(os.path.exists, (folder, *folder.absolute().parents)))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise InputError(
            f"Expected a folder that this user may write, got {nearest}. Name another for {folder}."
        )


def sync(path: Path) -> None:
    """Flush a file or a folder to disk. Windows cannot flush folders: they are skipped."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writer_lock(root: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the writer lock of a store inside the block.

    Args:
        root: The folder of the store.
        wait: Seconds to wait while another process holds the lock.

    Raises:
        StoreError: Another process holds the lock, or the folder is read-only.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(root / LOCK, timeout=wait, poll_interval=POLL_SECONDS)
    try:
        lock.acquire()
    except Timeout as error:
        raise StoreError(f"{root} is being written by another process; try again later.") from error
    except OSError as error:
        raise StoreError(f"{root} cannot be written ({error.strerror}); name another.") from error
    try:
        yield
    finally:
        lock.release()


def cache_directory() -> Path:
    """Return the user's cache folder: $XDG_CACHE_HOME/ragspec or the platform's equivalent.

    Without a home folder it is a private one among the temporary files, or InputError is raised.
    Only this function of the core reads the environment. All others take a directory.
    """
    from platformdirs import user_cache_path

    try:
        return user_cache_path("ragspec", appauthor=False)
    except RuntimeError:
        folder = Path(tempfile.gettempdir(), f"ragspec-{os.getuid()}")
    folder.mkdir(0o700, exist_ok=True)
    state = folder.lstat()  # of a link, which is for all
    if state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise InputError(
            f"Expected a private folder of this user, got {folder}. Set XDG_CACHE_HOME to another."
        )
    return folder
