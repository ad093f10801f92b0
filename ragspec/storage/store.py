"""Folders of arrays and JSON that are written atomically: complete or absent.

    root/
      CURRENT          the name of a generation and the SHA-256 of its manifest
      LOCK             held by the only writer
      gen-000002/      the data files and manifest.json (written last)
      .build-.../      a build in progress, or the leftovers of a killed writer

A new generation is built beside the current one, flushed to disk and renamed into place. Only then
does the pointer file switch, so that readers always find a complete generation, old or new.
Opening checks the manifest and every file against their SHA-256. This module handles files and
hashes and does not interpret the contents.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ragspec.errors import InputError, RagspecError, StoreError
from ragspec.storage import manifest as manifests
from ragspec.storage.filesystem import LOCK, read_file, sync, writer_lock

T = TypeVar("T")
POINTER = "CURRENT"
BUILD_PREFIX = ".build-"
REQUEST = "request"  # the scope of text that is never stored
GENERATION = re.compile(r"gen-(\d{6,})")
OURS = re.compile(
    rf"{GENERATION.pattern}|{POINTER}(\..*)?|{LOCK}|{re.escape(BUILD_PREFIX)}.*", re.DOTALL
)
POINTED = re.compile(r"(gen-\d{6,}) ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A checked generation: the folder `path` with the files of `manifest`.

    A writer may publish newer generations meanwhile. The newest generation and the one before it
    stay on disk, and files that are already mapped into memory stay valid.
    """

    path: Path
    manifest: manifests.Manifest

    def record(self, name: str) -> manifests.FileRecord:
        """Return the record of a file; raise StoreError if the manifest does not list it."""
        if name not in self.manifest.files:
            raise StoreError(f"{self.path} holds no file {name!r}; make its folder again.")
        return self.manifest.files[name]

    def file(self, name: str) -> Path:
        """Return the path of a file; raise StoreError if the manifest does not list it."""
        self.record(name)
        return self.path / name


Writer = Callable[[Path], manifests.Contents | None]


def publish(
    root: Path, kind: str, write: Writer, *, wait: float = 0.0, replace: bool = True
) -> OpenStore:
    """Let `write(folder)` fill a new folder, then make it the store's current generation.

    Args:
        root: Created if missing.
        write: Fills the new folder while the writer lock is held. It may read the current
            generation, `carry` files over, and return the `Contents`.
        wait: Seconds to wait for another writer.
        replace: Whether a current generation may be there.

    Raises:
        InputError: There is one that may not.
        StoreError: `root` is no store or cannot be written, or another process writes to it. Other
            errors of `write` pass through. If the first generation fails, no folder is left.
    """
    new = not root.exists()
    check_writable(root, kind)
    with writer_lock(root, wait):
        if not replace:
            expect_none(root, kind)
        remove_leftovers(root)
        build = root / f"{BUILD_PREFIX}{os.getpid()}"
        try:
            build.mkdir()
            manifest = seal(build, kind, write(build) or manifests.Contents())
            names = generations(root)  # published or left over
            number = 1 + int(names[-1].split("-")[1]) if names else 1
            target = root / f"gen-{number:06d}"
            os.rename(build, target)
        except BaseException as error:
            shutil.rmtree(build, ignore_errors=True)
            if new:
                remove_empty(root)
            from safetensors import SafetensorError

            if isinstance(error, OSError | SafetensorError) and not isinstance(error, StoreError):
                raise StoreError(
                    f"{root} cannot be written ({error}); free some room, or name another folder."
                ) from error
            raise
        sync(root)  # a crash leaves the old store up to here
        switch(root, target.name, manifest)  # and the new one from here on
        for name in generations(root)[:-2]:  # readers may be opening the older of these two
            shutil.rmtree(root / name, ignore_errors=True)
    return OpenStore(target, manifest)


def check_writable(root: Path, kind: str) -> None:
    """Create the folder of a store if it is missing.

    Raises:
        StoreError: The folder holds other files or a store of another kind, or cannot be written.
    """
    if root.exists() and not root.is_dir():
        raise StoreError(f"{root} is a file; name a new folder for the store.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in root.iterdir()]
    except OSError as error:
        raise StoreError(f"{root} cannot be written ({error.strerror}).") from error
    foreign = [name for name in names if not OURS.fullmatch(name)]
    if foreign and not (POINTER in names and any(map(GENERATION.fullmatch, names))):
        raise StoreError(
            f"{root} holds other files ({', '.join(sorted(foreign)[:3])}) and no store; "
            "name a new or empty folder."
        )
    try:
        read_current(root)
    except StoreError:
        return  # there is none, or a damaged one, which may be replaced
    read_current(root, kind)


def expect_none(root: Path, kind: str) -> None:
    """Raise InputError if a folder is a store of any kind; `kind` is the one that was asked for."""
    if is_store(root):
        index = kind == "passages"
        more = f"; `ragspec index add {root} PATHS` adds to it" if index else ""
        raise InputError(
            f"{root} is {'an index' if index else 'a store'} already; expected a new place. "
            f"--replace puts the new one in its place{more}."
        )


def is_store(folder: Path) -> bool:
    """Return whether a folder has a generation and a pointer or lock file."""
    with suppress(OSError):
        names = {path.name for path in folder.iterdir()}
        return bool(names & {POINTER, LOCK}) and any(map(GENERATION.fullmatch, names))
    return False


def seal(build: Path, kind: str, contents: manifests.Contents) -> manifests.Manifest:
    """Flush the data files of a folder to disk, then write the manifest."""
    paths = sorted(path for path in build.rglob("*") if path.is_file())
    names = {path.relative_to(build).as_posix(): path for path in paths}
    records = {
        name: contents.carried.get(name)
        or manifests.FileRecord(path.stat().st_size, manifests.sha256_file(path))
        for name, path in names.items()
    }
    for name, record in contents.carried.items():
        manifests.check_file(build, name, record, "size")
    for path in build.rglob("*"):
        sync(path)
    about = dict(contents.parameters), dict(contents.fingerprints)
    manifest = manifests.Manifest(kind, *about, records)
    (build / manifests.MANIFEST).write_bytes(manifest.to_bytes())
    sync(build / manifests.MANIFEST)
    sync(build)
    return manifest


def carry(store: OpenStore, names: Iterable[str], folder: Path) -> dict[str, manifests.FileRecord]:
    """Hard-link files of an older generation into `folder`, or copy them if links fail.

    Returns:
        The records of the files, for `Contents.carried`.

    Raises:
        StoreError: A file is missing.
    """
    records: dict[str, manifests.FileRecord] = {}
    for name in names:
        source, target = store.file(name), folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with suppress(OSError):  # the file system may have no links
                os.link(source, target)
            if not target.exists():
                shutil.copyfile(source, target)
        except FileNotFoundError as error:
            raise StoreError(f"{source} is missing; make its folder again.") from error
        records[name] = store.record(name)
    return records


def switch(root: Path, generation: str, manifest: manifests.Manifest) -> None:
    """Point CURRENT at a generation, in one atomic step."""
    digest = hashlib.sha256(manifest.to_bytes()).hexdigest()
    beside = root / (POINTER + ".new")
    beside.write_bytes(f"{generation} {digest}".encode())
    sync(beside)
    os.replace(beside, root / POINTER)
    sync(root)


def generations(root: Path) -> list[str]:
    """Return the names of all generations in a folder, oldest first."""
    names = [path.name for path in root.iterdir() if GENERATION.fullmatch(path.name)]
    return sorted(names, key=lambda name: int(name.split("-")[1]))


def remove_leftovers(root: Path) -> None:
    """Remove builds and unpublished generations of killed writers. The caller holds the lock."""
    for path in root.glob(BUILD_PREFIX + "*"):
        shutil.rmtree(path, ignore_errors=True)
    names = generations(root)
    if (root / POINTER).exists():
        try:
            current, _ = read_pointer(root)
            names = names[names.index(current) + 1 :]
        except (StoreError, ValueError):
            return  # a damaged pointer, or no such generation: a person may look, so none goes
    for name in names:
        shutil.rmtree(root / name, ignore_errors=True)


def remove_empty(root: Path) -> None:
    """Remove the folder of a store if it only holds the lock. The caller holds the lock."""
    with suppress(OSError):  # the folder is in use, or the system keeps open files
        if [path.name for path in root.iterdir()] == [LOCK]:
            (root / LOCK).unlink()
            root.rmdir()


def open_store(root: Path, kind: str, *, verify: manifests.Verify = "full") -> OpenStore:
    """Check a store and return its current generation. A reader that writers overtake starts again.

    Args:
        verify: "full" hashes every file, "size" only compares sizes. The manifest is always hashed.

    Raises:
        InputError: `verify` is unknown.
        StoreError: The store is missing, damaged or of another kind.
    """
    if verify not in ("full", "size"):
        raise InputError(f"verify is {verify!r}; expected 'full' or 'size'.")

    def read() -> OpenStore:
        path, manifest = read_current(root, kind)
        for name, record in manifest.files.items():
            manifests.check_file(path, name, record, verify)
        return OpenStore(path, manifest)

    return read_newest(root, read)


def read_newest(root: Path, read: Callable[[], T]) -> T:
    """Return the result of `read`, repeated if it fails because a writer published meanwhile."""
    while True:
        pointer = pointer_bytes(root)
        try:
            return read()
        except StoreError:
            if pointer == pointer_bytes(root):
                raise


def pointer_bytes(root: Path) -> bytes:
    """Return the pointer file's bytes, empty if it cannot be read."""
    with suppress(OSError):
        return (root / POINTER).read_bytes()
    return b""


@contextmanager
def parsing(path: Path) -> Iterator[None]:
    """Raise StoreError if the contents of a store are not what its kind promises."""
    try:
        yield
    except RagspecError:
        raise
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StoreError(f"{path} cannot be read ({error}); build it again.") from error


def read_pointer(root: Path) -> tuple[str, str]:
    """Return the name of the current generation, and the SHA-256 of its manifest."""
    pointer = root / POINTER
    if not pointer.is_file():
        raise StoreError(f"{root} holds no store (no file {POINTER}); build it first.")
    match = POINTED.fullmatch(read_file(pointer).decode("ascii", "replace"))
    if match is None:
        raise StoreError(f"{pointer} is damaged; make its folder again.")
    return match[1], match[2]


def read_current(root: Path, kind: str | None = None) -> tuple[Path, manifests.Manifest]:
    """Follow the pointer file to a generation and its manifest, which may have to be of a kind."""
    generation, digest = read_pointer(root)
    path = root / generation / manifests.MANIFEST
    data = read_file(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(f"{path} is not the manifest that {POINTER} names; make its folder again.")
    manifest = manifests.Manifest.from_bytes(data, path)
    if kind not in (None, manifest.kind):
        raise StoreError(f"{root} holds {manifest.kind!r}, expected {kind!r}; name another store.")
    return path.parent, manifest


def checked_scope(scope: str) -> str:
    """Return the scope.

    Raises:
        InputError: It is empty, no string, or 'request', whose text is never stored.
    """
    if not isinstance(scope, str) or not scope.strip():
        raise InputError(f"scope is {scope!r}; expected 'global' or the name of a tenant.")
    if scope == REQUEST:
        raise InputError(
            "scope 'request' is text that stays with its request: it is drafted from by the "
            "context drafter and never stored; name a tenant, or 'global'."
        )
    return scope
