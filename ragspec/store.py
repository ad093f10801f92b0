"""Folders of plain arrays and JSON that are whole or absent, never half written.

    root/
      CURRENT          {"generation": "gen-000002", "manifest_sha256": "..."}
      LOCK             held by the one writer
      gen-000002/      the data files and manifest.json (written last)
      .build-.../      a build in progress, or what a killed writer left

A store is built beside the one that readers use, flushed to disk, renamed into place, and only
then does the pointer file switch: whatever happens, readers find the old store or the new one.
Opening checks the manifest and every file against their SHA-256. This module knows files and
hashes; it does not know what is in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.errors import StoreError
from ragspec.manifest import MANIFEST, FileRecord, Manifest, Verify, check_file, sha256_file

POINTER = "CURRENT"
LOCK = "LOCK"
BUILD_PREFIX = ".build-"
GENERATION = re.compile(r"gen-(\d{6,})")


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A checked generation: `path` is the folder that holds the files of `manifest`.

    A writer may publish newer generations meanwhile; the one before the newest is kept, and files
    that are already mapped into memory stay valid.
    """

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Return the path of a listed file; raises StoreError where the manifest lacks it."""
        if name not in self.manifest.files:
            raise StoreError(f"{self.path} holds no file {name!r}; build the store again.")
        return self.path / name

    def expect(self, name: str, fingerprint: str) -> None:
        """Raise StoreError unless the store was built with the thing of this fingerprint."""
        check_fingerprint(self.path.parent, name, self.manifest.fingerprints.get(name), fingerprint)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk (folders only where the system can)."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writer_lock(root: Path) -> Iterator[None]:
    """Hold the writers' lock of a store; raises StoreError at once if another process has it."""
    with (root / LOCK).open("a+b") as stream:
        try:
            lock_stream(stream.fileno())
        except OSError as error:
            raise StoreError(
                f"{root} is being written by another process; wait for it, then try again."
            ) from error
        yield  # closing the file releases the lock, and so does the death of the process


def lock_stream(descriptor: int) -> None:
    """Lock an open file without waiting; raises OSError where it is locked."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def publish(
    root: Path,
    kind: str,
    write: Callable[[Path], None],
    *,
    parameters: Mapping[str, Any] | None = None,
    fingerprints: Mapping[str, str] | None = None,
    stage: Callable[[str], None] = lambda name: None,
) -> OpenStore:
    """Let `write(folder)` fill a new folder, then make it the store's current generation.

    `stage` is called with the name of each point that was reached: "locked", "written", "synced",
    "manifest", "renamed", "switched", "cleaned". Up to "renamed" a crash leaves the old store,
    from "switched" on the new one. Raises StoreError where `root` is something else than a store
    or another process writes to it; whatever `write` raises passes through.
    """
    root = Path(root)
    check_writable(root)
    with writer_lock(root):
        remove_leftovers(root)
        stage("locked")
        build = root / f"{BUILD_PREFIX}{os.getpid()}"
        build.mkdir()
        try:
            manifest = fill(build, kind, write, parameters or {}, fingerprints or {}, stage)
            target = root / next_generation(root)
            os.rename(build, target)
        except BaseException:
            shutil.rmtree(build, ignore_errors=True)
            raise
        sync(root)
        stage("renamed")
        switch(root, target.name, manifest)
        stage("switched")
        remove_old(root, keep=target.name)
        stage("cleaned")
    return OpenStore(target, manifest)


def check_writable(root: Path) -> None:
    """Make the folder of a store; raises StoreError where it holds something else."""
    if root.exists() and not root.is_dir():
        raise StoreError(f"{root} is a file; name a new folder for the store.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in root.iterdir()]
    except OSError as error:
        raise StoreError(f"{root} cannot be written ({error.strerror}).") from error
    foreign = [name for name in names if not is_ours(name)]
    if foreign and POINTER not in names:
        raise StoreError(
            f"{root} holds other files ({', '.join(sorted(foreign)[:3])}) and no store; "
            "name a new or empty folder."
        )


def is_ours(name: str) -> bool:
    """Say whether a name at the top of a store's folder is one that this module gives."""
    known = name in {POINTER, LOCK} or name.startswith((BUILD_PREFIX, POINTER + "."))
    return known or GENERATION.fullmatch(name) is not None


def is_store(folder: Path) -> bool:
    """Say whether a folder is the root of a store: it has a pointer file, or what it points to."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        return False
    marks = names & {POINTER, LOCK}
    return bool(marks) and any(GENERATION.fullmatch(name) for name in names)


def fill(
    build: Path,
    kind: str,
    write: Callable[[Path], None],
    parameters: Mapping[str, Any],
    fingerprints: Mapping[str, str],
    stage: Callable[[str], None],
) -> Manifest:
    """Write the data files, flush them, and write the manifest last."""
    write(build)
    stage("written")
    paths = sorted(path for path in build.rglob("*") if path.is_file())
    records = {
        path.relative_to(build).as_posix(): FileRecord(path.stat().st_size, sha256_file(path))
        for path in paths
    }
    for path in [*paths, *(path for path in build.rglob("*") if path.is_dir())]:
        sync(path)
    stage("synced")
    manifest = Manifest(kind, dict(parameters), dict(fingerprints), records)
    (build / MANIFEST).write_bytes(manifest.to_bytes())
    sync(build / MANIFEST)
    sync(build)
    stage("manifest")
    return manifest


def switch(root: Path, generation: str, manifest: Manifest) -> None:
    """Point CURRENT at a generation, in one atomic step."""
    digest = hashlib.sha256(manifest.to_bytes()).hexdigest()
    beside = root / (POINTER + ".new")
    beside.write_text(json.dumps({"generation": generation, "manifest_sha256": digest}))
    sync(beside)
    os.replace(beside, root / POINTER)
    sync(root)


def generations(root: Path) -> list[str]:
    """Return the names of all generations in a folder, oldest first."""
    names = [path.name for path in root.iterdir() if GENERATION.fullmatch(path.name)]
    return sorted(names, key=lambda name: int(name.split("-")[1]))


def next_generation(root: Path) -> str:
    """Return the name of the generation after the newest one, used or left over."""
    names = generations(root)
    return f"gen-{int(names[-1].split('-')[1]) + 1 if names else 1:06d}"


def remove_leftovers(root: Path) -> None:
    """Remove what killed writers left, with the lock held: builds, and unswitched generations."""
    for path in root.glob(BUILD_PREFIX + "*"):
        shutil.rmtree(path, ignore_errors=True)
    try:
        current = str(json.loads((root / POINTER).read_bytes())["generation"])
    except FileNotFoundError:
        current = ""
    except (OSError, ValueError, KeyError, TypeError):
        return  # a damaged pointer: delete nothing that a person may want to look at
    names = generations(root)
    for name in names[names.index(current) + 1 if current in names else 0 :]:
        shutil.rmtree(root / name, ignore_errors=True)


def remove_old(root: Path, keep: str) -> None:
    """Remove all generations but `keep` and the newest before it, which readers may be opening."""
    for name in generations(root)[:-2]:
        if name != keep:
            shutil.rmtree(root / name, ignore_errors=True)


def open_store(
    root: Path,
    kind: str,
    *,
    verify: Verify = "full",
    fingerprints: Mapping[str, str] | None = None,
) -> OpenStore:
    """Check a store and return its current generation.

    verify: "full" hashes every file, "size" only compares sizes (the manifest itself is hashed
    always). fingerprints: what the store must have been built with. Raises StoreError where the
    store is missing, damaged, of another kind or made for something else.
    """
    root = Path(root)
    if verify not in ("full", "size"):
        raise ValueError(f"verify is {verify!r}, expected 'full' or 'size'.")
    path, manifest = read_current(root)
    if manifest.kind != kind:
        raise StoreError(f"{root} holds {manifest.kind!r}, expected {kind!r}; name another store.")
    for name, expected in (fingerprints or {}).items():
        check_fingerprint(root, name, manifest.fingerprints.get(name), expected)
    for name, record in manifest.files.items():
        check_file(path, name, record, verify)
    return OpenStore(path, manifest)


def read_current(root: Path) -> tuple[Path, Manifest]:
    """Follow the pointer file to a generation and its manifest."""
    pointer = root / POINTER
    if not pointer.is_file():
        raise StoreError(f"{root} holds no store (no file {POINTER}); build it first.")
    try:
        current = json.loads(pointer.read_bytes())
        generation, digest = str(current["generation"]), str(current["manifest_sha256"])
        if GENERATION.fullmatch(generation) is None:
            raise ValueError(f"generation {generation!r}")
        data = (root / generation / MANIFEST).read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{root} is damaged ({error}); build the store again.") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise StoreError(
            f"{root / generation / MANIFEST} is not the manifest that {POINTER} names; "
            "build the store again."
        )
    return root / generation, Manifest.from_bytes(data, root / generation / MANIFEST)


def check_fingerprint(root: Path, name: str, found: str | None, expected: str) -> None:
    """Raise StoreError unless the store was built with the expected thing."""
    if found != expected:
        raise StoreError(
            f"{root} was built with another {name} (fingerprint {str(found)[:12]}, expected "
            f"{expected[:12]}); build it again or use the {name} that it was built with."
        )
