"""What a store asks of the file system: flush, link, and one writer at a time."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragspec.errors import StoreError

LOCK = "LOCK"
POLL_SECONDS = 0.02


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

    wait: seconds to wait while another process has it; StoreError after that, and where the folder
    may only be read.
    """
    deadline = time.monotonic() + wait
    try:
        opened = (root / LOCK).open("a+b")
    except OSError as error:
        raise StoreError(f"{root} cannot be written ({error.strerror}).") from error
    with opened as stream:
        while True:
            try:
                lock_stream(stream.fileno())
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"{root} is being written by another process; wait for it, then try again."
                    ) from error
            time.sleep(POLL_SECONDS)
        yield  # closing the file releases the lock, and so does the death of the process


def lock_stream(descriptor: int) -> None:
    """Lock an open file without waiting; raises OSError where it is locked."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
