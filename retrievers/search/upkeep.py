"""An index that grows: documents added, removed and read again where their files have changed.

Every change is worked out with the writers' lock held and published as a whole, so that an index
is what it was or what it should be, whenever a process ends. A changed index equals one that is
built afresh; only passages that are new are embedded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragspec.errors import InputError
from ragspec.registry import did_you_mean
from ragspec.retrievers.search.dense import Embedder
from ragspec.retrievers.search.documents import (
    Document,
    Skipped,
    Told,
    load_documents,
    with_unique_names,
)
from ragspec.retrievers.search.passage_index import KIND, Origin, PassageIndex, read_lines
from ragspec.storage.manifest import Contents
from ragspec.storage.store import open_store, publish

Paths = Iterable[str | os.PathLike[str]]
Plan = Callable[[PassageIndex], tuple[Sequence[Document], Origin, Sequence[Skipped]]]


@dataclass(frozen=True, slots=True)
class Change:
    """What a change did, by the documents' names; unchanged: how many stayed as they were."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: int
    skipped: tuple[Skipped, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def add(
    path: str | os.PathLike[str],
    paths: Paths,
    *,
    embedder: str | Path | Embedder | None = None,
    told: Told = lambda what, done, total: None,
) -> Change:
    """Read files and folders into an index; a file that it holds is read again.

    embedder: see `PassageIndex.open`. Raises StoreError for no index, DocumentError for paths that
    hold no text.
    """
    new = [os.path.abspath(each) for each in paths]

    def plan(index: PassageIndex) -> tuple[Sequence[Document], Origin, Sequence[Skipped]]:
        found = load_documents(new, known=_known(index), told=told)
        read = {_place(document) for document in found.documents}
        kept = [each for each in index.documents if _place(each) not in read]
        origin = index.origin
        removed = [each for each in origin.removed if not _within(each, new)]
        paths = tuple(dict.fromkeys((*origin.paths, *new)))
        origin = replace(origin, paths=paths, removed=tuple(removed))
        return with_unique_names([*kept, *found.documents]), origin, found.skipped

    return _change(path, plan, embedder, told)


def remove(
    path: str | os.PathLike[str],
    names: Iterable[str | os.PathLike[str]],
    *,
    embedder: str | Path | Embedder | None = None,
    told: Told = lambda what, done, total: None,
) -> Change:
    """Take documents out of an index, by name, file or folder; `refresh` leaves them out too.

    Raises StoreError for no index, InputError for a name that leads to no document, and where none
    would be left.
    """
    given = [os.fspath(name) for name in names]

    def plan(index: PassageIndex) -> tuple[Sequence[Document], Origin, Sequence[Skipped]]:
        gone = {name for each in given for name in _named(index, each)}
        kept = [each for each in index.documents if each.name not in gone]
        if not kept:
            raise InputError(
                f"removing all {len(gone)} documents would leave nothing to search in; delete the "
                "folder of the index instead."
            )
        places = [_place(each) for each in index.documents if each.name in gone and each.path]
        removed = tuple(dict.fromkeys((*index.origin.removed, *places)))
        return kept, replace(index.origin, removed=removed), ()

    return _change(path, plan, embedder, told)


def refresh(
    path: str | os.PathLike[str],
    *,
    embedder: str | Path | Embedder | None = None,
    told: Told = lambda what, done, total: None,
) -> Change:
    """Read the files of an index again: new ones come, changed ones are replaced, lost ones leave.

    A file counts as changed by its SHA-256. Documents that came from no file stay. Raises
    StoreError for no index, DocumentError where a path that was indexed is missing or holds no
    text any more: nothing is taken out then.
    """

    def plan(index: PassageIndex) -> tuple[Sequence[Document], Origin, Sequence[Skipped]]:
        origin = index.origin
        paths = origin.paths or tuple(_place(each) for each in index.documents if each.path)
        found = load_documents(paths, known=_known(index), told=told)
        gone = set(origin.removed)
        read = [each for each in found.documents if _place(each) not in gone]
        pathless = [each for each in index.documents if each.path is None]
        return with_unique_names([*pathless, *read]), origin, found.skipped

    return _change(path, plan, embedder, told)


def described(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a saved index holds, as JSON types; no embedder is loaded for it.

    Raises StoreError where it is missing or damaged.
    """
    store = open_store(Path(path), KIND, verify="size")
    parameters = store.manifest.parameters
    spans = np.load(store.file("passages.npy"), allow_pickle=False)
    counts = np.bincount(spans[:, 0], minlength=int(parameters["documents"])).tolist()
    origin = Origin.of(parameters.get("origin", {}))
    records = read_lines(store.file("documents.jsonl"))
    return {
        "documents": [
            {
                "name": record["name"],
                "title": record["title"],
                "path": record["path"],
                "passages": n,
            }
            for record, n in zip(records, counts, strict=True)
        ],
        "passages": len(spans),
        "words": origin.words,
        "embedder": parameters["embedder"],
        "sparse": parameters["sparse"],
        "paths": list(origin.paths),
        "removed": list(origin.removed),
        "bytes": sum(record.size for record in store.manifest.files.values()),
    }


def _change(
    path: str | os.PathLike[str], plan: Plan, embedder: str | Path | Embedder | None, told: Told
) -> Change:
    """Change an index as a plan says; where it says nothing new, nothing is written."""
    root = Path(path)
    open_store(root, KIND, verify="size")  # before a lock is made in a folder that is no index
    changes: list[Change] = []

    def write(folder: Path) -> Contents:
        index = PassageIndex.open(root, embedder=embedder)
        documents, origin, skipped = plan(index)
        changes.append(_compared(index.documents, documents, skipped))
        if not changes[0] and origin == index.origin:
            raise _Unchanged
        new = index.rebuilt(documents, origin, told)
        new.write(folder)
        return new.contents()

    with suppress(_Unchanged):
        publish(root, KIND, write)
    return changes[0]


class _Unchanged(Exception):
    """Nothing is to be written."""


def _compared(
    before: Sequence[Document], after: Sequence[Document], skipped: Sequence[Skipped]
) -> Change:
    old, new = ({each.name: each for each in some} for some in (before, after))
    both = [name for name in new if name in old]
    changed = [name for name in both if new[name].text != old[name].text]
    return Change(
        added=tuple(name for name in new if name not in old),
        changed=tuple(changed),
        removed=tuple(name for name in old if name not in new),
        unchanged=len(both) - len(changed),
        skipped=tuple(skipped),
    )


def _place(document: Document) -> str:
    """Return where a document was read from, absolute; "" where it was not."""
    return os.path.abspath(document.path) if document.path else ""


def _known(index: PassageIndex) -> dict[str, Document]:
    return {_place(each): each for each in index.documents if each.path}


def _within(path: str, folders: Iterable[str]) -> bool:
    return any(path == each or path.startswith(each.rstrip(os.sep) + os.sep) for each in folders)


def _named(index: PassageIndex, given: str) -> list[str]:
    """Return the names of the documents that a name, a file or a folder stands for."""
    names = [each.name for each in index.documents]
    if given in names:
        return [given]
    place = os.path.abspath(given)
    found = [each.name for each in index.documents if each.path and _within(_place(each), [place])]
    found += [name for name in names if name.startswith(given.rstrip("/") + "/")]
    if not found:
        raise InputError(
            f"got {given!r}, which is no document of the index; expected a name, a file or a "
            f"folder of it.{did_you_mean(given, names)} `ragspec index info` lists them."
        )
    return found
