"""What a store asks of the file system: read, reserve, flush, link, and one writer at a time."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragspec.errors import StoreError

LOCK = "LOCK"
POLL_SECONDS = 0.02
_ZEROS = bytes(1 << 20)


def unreadable(path: Path, error: OSError) -> StoreError:
    """Return the error for a file that cannot be read: only one that is gone needs a new store."""
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
    """Return what a file holds; raises StoreError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def reserve(path: Path, size: int) -> None:
    """Make a file of `size` zeros that has its room on the disk, to be mapped and written.

    Writing to a mapped file that has not kills the process where the disk is full. Raises
    StoreError where there is no room.
    """
    try:
        with path.open("wb") as stream:
            if size and not _allocated(stream.fileno(), size):
                for at in range(0, size, len(_ZEROS)):
                    stream.write(_ZEROS[: size - at])
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror or error}): it takes {size} bytes; make "
            "room on the disk, then try again."
        ) from error


def _allocated(descriptor: int, size: int) -> bool:
    """Have the system reserve the room; say whether it can."""
    if not hasattr(os, "posix_fallocate"):
        return False
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            return False  # not on this file system
        raise
    return True


def sync(path: Path) -> None:
    """Flush a file or a folder to disk (folders only where the system can)."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or a second copy where the file system cannot link."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


@contextmanager
def writer_lock(root: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold the writers' lock of a store.

    Args:
        root: The folder of the store.
        wait: Seconds to wait while another process holds the lock.

    Raises:
        StoreError: If another process holds the lock, or the folder may only be read.
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
    """Return the user's cache folder: $XDG_CACHE_HOME/ragspec or what the platform has.

    The only place of the core that reads the environment; everything else takes a directory.
    """
    from platformdirs import user_cache_path

    return user_cache_path("ragspec", appauthor=False)


"""All that an answer is valid for."""
