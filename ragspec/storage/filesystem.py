"""File system operations of a store: read, flush, and lock out other writers."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragspec.errors import StoreError

LOCK = "LOCK"
POLL_SECONDS = 0.02


def unreadable(path: Path, error: OSError) -> StoreError:
    """Return the error for an unreadable file. Only a missing file calls for a new store."""
    if isinstance(error, FileNotFoundError):
        return StoreError(f"{path} is missing; build the store again.")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StoreError(
            f"{path} cannot be opened: this process has too many open files; raise the limit "
            "(ulimit -n), then open the store again."
        )
    return StoreError(
        f"{path} cannot be read ({error.strerror or error}); check its permissions and the disk."
    )


def read_file(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        StoreError: The file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


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
        raise StoreError(
            f"{root} is being written by another process; wait for it, then try again."
        ) from error
    except OSError as error:
        raise StoreError(f"{root} cannot be written ({error.strerror}).") from error
    try:
        yield
    finally:
        lock.release()


def cache_directory() -> Path:
    """Return the user's cache folder: $XDG_CACHE_HOME/ragspec or the platform's equivalent.

    Only this function of the core reads the environment. All others take a directory.
    """
    from platformdirs import user_cache_path

    return user_cache_path("ragspec", appauthor=False)
