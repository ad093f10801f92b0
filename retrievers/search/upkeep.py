"""Changes of a saved index: add and remove documents, and read changed files again.

Every change is computed with the writers' lock held and published as a whole: if a process ends, an
index is either unchanged or completely changed. A changed index equals a newly built one, but only
new passages are embedded.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragspec.errors import DocumentError, InputError, pluralize
from ragspec.registry import did_you_mean
from ragspec.retrievers.formats.encodings import clean_path
from ragspec.retrievers.search import documents as files
from ragspec.retrievers.search.dense import EmbedderSpec
from ragspec.retrievers.search.nearest import FLAT
from ragspec.retrievers.search.passage_index import (
    KIND,
    IndexOrigin,
    PassageIndex,
    open_index,
    read_lines,
)
from ragspec.storage.manifest import Contents
from ragspec.storage.store import parsing, publish


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The documents and origin of a changed index, and the files that could not be read."""

    documents: Sequence[files.Document]
    origin: IndexOrigin
    skipped: Sequence[files.Skipped] = ()
    missing: Sequence[files.Skipped] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of a change, by the documents' names.

    Attributes:
        skipped: Files without usable text.
        missing: Paths of the index that could not be read; their documents stay.
        notes: The notes of each new and changed document.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: int
    skipped: tuple[files.Skipped, ...] = ()
    missing: tuple[files.Skipped, ...] = ()
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def add(
    path: str | os.PathLike[str],
    paths: files.Paths,
    *,
    embedder: EmbedderSpec = None,
    on_progress: files.ProgressCallback = lambda what, done, total: None,
) -> Change:
    """Read files and folders into an index; a file of the index is read again.

    Raises:
        StoreError: There is no index at `path`.
        DocumentError: A path holds no text.
    """
    new = [os.path.abspath(each) for each in files.path_list(paths)]

    def plan(index: PassageIndex) -> IndexPlan:
        loaded = files.load_documents(new, known=_known(index), on_progress=on_progress)
        read = {_place(document) for document in loaded.documents}
        stay = [each for each in index.documents if _place(each) not in read]
        origin = index.origin
        removed = [each for each in origin.removed if not _within(each, map(clean_path, new))]
        every = dict.fromkeys((*origin.paths, *new))
        outer = {each for each in every if not _within(each, every.keys() - {each})}
        paths = tuple(e for e in every if e in outer or _within(clean_path(e), removed))
        origin = replace(origin, paths=paths, removed=tuple(removed))
        documents = [*stay, *_as_before(index, loaded.documents)]
        return IndexPlan(files.with_unique_names(documents), origin, loaded.skipped)

    return _change(path, plan, embedder, on_progress)


def remove(
    path: str | os.PathLike[str],
    names: files.Paths,
    *,
    embedder: EmbedderSpec = None,
    on_progress: files.ProgressCallback = lambda what, done, total: None,
) -> Change:
    """Remove documents from an index, by name, file or folder; `refresh` leaves them out too.

    Raises:
        StoreError: There is no index at `path`.
        InputError: A name is empty or matches no document, or no document would be left.
    """
    inputs = files.path_list(names)

    def plan(index: PassageIndex) -> IndexPlan:
        gone = {name for each in inputs for name in _named(index, each)}
        stay = [each for each in index.documents if each.name not in gone]
        if not stay:
            raise InputError(
                f"removing {pluralize(len(gone), 'document')} would leave nothing to search in; "
                "delete the folder of the index instead."
            )
        folders = [os.path.abspath(each) for each in inputs]
        paths = tuple(each for each in index.origin.paths if not _within(each, folders))
        places = [_place(each) for each in index.documents if each.name in gone and each.path]
        above = {str(parent) for each in places for parent in Path(each).parents}
        places += [each for each in map(clean_path, folders) if each in above]
        every = dict.fromkeys((*index.origin.removed, *places))
        removed = tuple(each for each in every if _within(each, map(clean_path, paths)))
        return IndexPlan(stay, replace(index.origin, paths=paths, removed=removed))

    return _change(path, plan, embedder, on_progress)


def refresh(
    path: str | os.PathLike[str],
    *,
    embedder: EmbedderSpec = None,
    on_progress: files.ProgressCallback = lambda what, done, total: None,
) -> Change:
    """Read the files of an index again: add new files, replace changed ones, remove lost ones.

    A file has changed if its SHA-256 has. Documents of no file stay, and so do those of skipped
    files and folders, unless they hold no text. The documents of a path that is missing or has
    become empty stay too, since a disk may be unmounted: see `Change.missing`.

    Raises:
        StoreError: There is no index at `path`.
        DocumentError: None of its paths can be read.
    """

    def plan(index: PassageIndex) -> IndexPlan:
        origin = index.origin
        paths = origin.paths or tuple(_place(each) for each in index.documents if each.path)
        before, missing, skipped = _known(index), list[files.Skipped](), list[files.Skipped]()
        read, places = list[files.Document](), set[str]()
        for path in paths:
            try:
                loaded = files.load_documents(path, known=before, on_progress=on_progress)
            except DocumentError as error:
                missing.append(files.Skipped(path, str(error).removeprefix(f"{path} ")))
                continue
            root = clean_path(path)  # which may be in a removed folder, if it was added again
            gone = {each for each in origin.removed if root == each or not _within(root, [each])}
            new = [each for each in loaded.documents if _place(each) not in places]
            new = [e for e in new if _place(e) in before or not _within(_place(e), gone)]
            read += new
            places |= {_place(each) for each in new}
            skipped += loaded.skipped
        if len(missing) == len(paths) > 0:
            raise DocumentError(f"{missing[0].path} {missing[0].reason}")
        closed = [each for each in skipped if not each.reason.startswith("holds no text")]
        lost = {clean_path(e.path) for e in (*missing, *closed)}  # as the documents' paths are
        stay = [each for each in index.documents if not each.path or _within(_place(each), lost)]
        documents = files.with_unique_names([*stay, *_as_before(index, read)])
        return IndexPlan(documents, origin, skipped, missing)

    return _change(path, plan, embedder, on_progress)


def described(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return an index's contents as JSON types, without its embedder; or raise StoreError."""
    store = open_index(path, "size")
    with parsing(Path(path)):
        parameters = store.manifest.parameters
        spans = np.load(store.file("passages.npy"), allow_pickle=False)
        counts = np.bincount(spans[:, 0], minlength=int(parameters["documents"])).tolist()
        origin = IndexOrigin.of(parameters["origin"])
        return {
            "documents": [
                {key: record[key] for key in ("name", "title", "path", "notes")} | {"passages": n}
                for record, n in zip(read_lines(store.file("documents.jsonl")), counts, strict=True)
            ],
            "passages": len(spans),
            "words": origin.words,
            "embedder": parameters["embedder"],
            "dense": (parameters.get("dense") or {"kind": FLAT})["kind"],
            "sparse": parameters["sparse"],
            "paths": list(origin.paths),
            "removed": list(origin.removed),
            "bytes": sum(record.size for record in store.manifest.files.values()),
        }


def _change(
    path: str | os.PathLike[str],
    planned: Callable[[PassageIndex], IndexPlan],
    embedder: EmbedderSpec,
    on_progress: files.ProgressCallback,
) -> Change:
    """Change an index by a plan; write nothing if the plan changes nothing."""
    open_index(path, "size")  # before a lock is made in a folder that is no index
    root = Path(path)
    changes: list[Change] = []

    def write(folder: Path) -> Contents:
        index = PassageIndex.open(root, embedder=embedder)
        plan = planned(index)
        changes.append(_compared(index.documents, plan))
        if not changes[0] and plan.origin == index.origin:
            raise _Unchanged
        return index.rebuilt(plan.documents, plan.origin, on_progress).write(folder)

    with suppress(_Unchanged):
        publish(root, KIND, write)
    return changes[0]


class _Unchanged(Exception):
    """Nothing is to be written."""


def _compared(before: Sequence[files.Document], plan: IndexPlan) -> Change:
    old, new = ({each.name: each for each in some} for some in (before, plan.documents))
    changed = [name for name in new if name in old and new[name] != old[name]]
    return Change(
        added=tuple(name for name in new if name not in old),
        changed=tuple(changed),
        removed=tuple(name for name in old if name not in new),
        unchanged=len(new.keys() & old.keys()) - len(changed),
        skipped=tuple(plan.skipped),
        missing=tuple(plan.missing),
        notes={name: new[name].notes for name in new if name not in old or name in changed},
    )


def _place(document: files.Document) -> str:
    """Return the absolute path of a document's file, "" without one."""
    return os.path.abspath(document.path) if document.path else ""


def _known(index: PassageIndex) -> dict[str, files.Document]:
    return {_place(each): each for each in index.documents if each.path}


def _as_before(index: PassageIndex, documents: Iterable[files.Document]) -> list[files.Document]:
    """Return documents with the names that the index has for their files, if any."""
    names = {_place(each): each.name for each in index.documents}
    return [replace(each, name=names.get(_place(each), each.name)) for each in documents]


def _within(path: str, folders: Iterable[str]) -> bool:
    return not {path, *map(str, Path(path).parents)}.isdisjoint(folders)


def _named(index: PassageIndex, name: str) -> list[str]:
    """Return the names of the documents that a name, a file or a folder stands for."""
    names = [each.name for each in index.documents]
    place, name = clean_path(os.path.abspath(name)), clean_path(name)
    if name in names:
        return [name]
    within = [each.name for each in index.documents if each.path and _within(_place(each), [place])]
    within += [each for each in names if each.startswith(name.rstrip("/") + "/")]
    if not within:
        raise InputError(
            f"got {name!r}, which is no document of the index; expected a name, a file or a "
            f"folder of it.{did_you_mean(name, names)} `ragspec index info` lists them."
        )
    return within
