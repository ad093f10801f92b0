"""An index that grows: documents added, removed and read again where their files have changed.

Every change is computed with the writers' lock held and published as a whole, so that an index
is what it was or what it should be, whenever a process ends. A changed index equals one that is
built afresh; only passages that are new are embedded.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragspec.errors import DocumentError, InputError
from ragspec.registry import did_you_mean
from ragspec.retrievers.search.dense import Embedder
from ragspec.retrievers.search.documents import (
    Document,
    ProgressCallback,
    Skipped,
    load_documents,
    with_unique_names,
)
from ragspec.retrievers.search.nearest import FLAT
from ragspec.retrievers.search.passage_index import (
    KIND,
    IndexOrigin,
    PassageIndex,
    open_index,
    read_lines,
)
from ragspec.storage.manifest import Contents
from ragspec.storage.store import publish

Paths = Iterable[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What an index is to become, and what could not be read on the way."""

    documents: Sequence[Document]
    origin: IndexOrigin
    skipped: Sequence[Skipped] = ()
    missing: Sequence[Skipped] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """What a change did, by the documents' names.

    unchanged: how many stayed as they were. skipped: files that hold no usable text. missing:
    paths of the index that could not be read; their documents stay.
    """

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: int
    skipped: tuple[Skipped, ...] = ()
    missing: tuple[Skipped, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)


def add(
    path: str | os.PathLike[str],
    paths: Paths,
    *,
    embedder: str | Path | Embedder | None = None,
    on_progress: ProgressCallback = lambda what, done, total: None,
) -> Change:
    """Read files and folders into an index; a file that it holds is read again.

    embedder: see `PassageIndex.open`. Raises StoreError for no index, DocumentError for paths that
    hold no text.
    """
    new = [os.path.abspath(each) for each in paths]

    def plan(index: PassageIndex) -> IndexPlan:
        result = load_documents(new, known=_known(index), on_progress=on_progress)
        read = {_place(document) for document in result.documents}
        stay = [each for each in index.documents if _place(each) not in read]
        origin = index.origin
        removed = [each for each in origin.removed if not _within(each, new)]
        paths = list(dict.fromkeys((*origin.paths, *new)))
        paths = [each for each in paths if not _within(each, {*paths} - {each})]
        origin = replace(origin, paths=tuple(paths), removed=tuple(removed))
        documents = [*stay, *_as_before(index, result.documents)]
        return IndexPlan(with_unique_names(documents), origin, result.skipped)

    return _change(path, plan, embedder, on_progress)


def remove(
    path: str | os.PathLike[str],
    names: Iterable[str | os.PathLike[str]],
    *,
    embedder: str | Path | Embedder | None = None,
    on_progress: ProgressCallback = lambda what, done, total: None,
) -> Change:
    """Take documents out of an index, by name, file or folder; `refresh` leaves them out too.

    Raises StoreError for no index, InputError for a name that leads to no document, and where none
    would be left.
    """
    inputs = [os.fspath(name) for name in names]

    def plan(index: PassageIndex) -> IndexPlan:
        gone = {name for each in inputs for name in _named(index, each)}
        stay = [each for each in index.documents if each.name not in gone]
        if not stay:
            raise InputError(
                f"removing all {len(gone)} documents would leave nothing to search in; delete the "
                "folder of the index instead."
            )
        folders = [os.path.abspath(each) for each in inputs]
        paths = tuple(each for each in index.origin.paths if not _within(each, folders))
        places = [_place(each) for each in index.documents if each.name in gone and each.path]
        places = [each for each in (*index.origin.removed, *places) if _within(each, paths)]
        removed = tuple(dict.fromkeys(places))
        return IndexPlan(stay, replace(index.origin, paths=paths, removed=removed))

    return _change(path, plan, embedder, on_progress)


def refresh(
    path: str | os.PathLike[str],
    *,
    embedder: str | Path | Embedder | None = None,
    on_progress: ProgressCallback = lambda what, done, total: None,
) -> Change:
    """Read the files of an index again: new ones come, changed ones are replaced, lost ones leave.

    A file counts as changed by its SHA-256. Documents that came from no file stay, and so do those
    of a path that is missing or has become empty, since a disk may not be there: see
    `Change.missing`. Raises StoreError for no index, DocumentError where no path can be read.
    """

    def plan(index: PassageIndex) -> IndexPlan:
        origin = index.origin
        paths = origin.paths or tuple(_place(each) for each in index.documents if each.path)
        known, missing, skipped = _known(index), list[Skipped](), list[Skipped]()
        read, visible = list[Document](), set[str]()
        for path in paths:
            try:
                result = load_documents(path, known=known, on_progress=on_progress)
            except DocumentError as error:
                missing.append(Skipped(path, str(error).removeprefix(f"{path} ")))
                continue
            read += [each for each in result.documents if _place(each) not in visible]
            visible |= {_place(each) for each in result.documents}
            skipped += result.skipped
        if len(missing) == len(paths) > 0:
            raise DocumentError(f"{missing[0].path} {missing[0].reason}")
        lost = [each.path for each in missing]
        stay = [each for each in index.documents if not each.path or _within(_place(each), lost)]
        new = [each for each in read if _place(each) not in origin.removed]
        documents = with_unique_names([*stay, *_as_before(index, new)])
        return IndexPlan(documents, origin, skipped, missing)

    return _change(path, plan, embedder, on_progress)


def described(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a saved index holds, as JSON types; no embedder is loaded for it.

    Raises StoreError where it is missing or damaged.
    """
    store = open_index(Path(path), "size")
    parameters = store.manifest.parameters
    spans = np.load(store.file("passages.npy"), allow_pickle=False)
    counts = np.bincount(spans[:, 0], minlength=int(parameters["documents"])).tolist()
    origin = IndexOrigin.of(parameters.get("origin", {}))
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
        "dense": (parameters.get("dense") or {"kind": FLAT})["kind"],
        "sparse": parameters["sparse"],
        "paths": list(origin.paths),
        "removed": list(origin.removed),
        "bytes": sum(record.size for record in store.manifest.files.values()),
    }


def _change(
    path: str | os.PathLike[str],
    planned: Callable[[PassageIndex], IndexPlan],
    embedder: str | Path | Embedder | None,
    on_progress: ProgressCallback,
) -> Change:
    """Change an index as a plan says; where it says nothing new, nothing is written."""
    root = Path(path)
    open_index(root, "size")  # before a lock is made in a folder that is no index
    changes: list[Change] = []

    def write(folder: Path) -> Contents:
        index = PassageIndex.open(root, embedder=embedder)
        plan = planned(index)
        changes.append(_compared(index.documents, plan))
        if not changes[0] and plan.origin == index.origin:
            raise _Unchanged
        new = index.rebuilt(plan.documents, plan.origin, on_progress)
        new.write(folder)
        return new.contents()

    with suppress(_Unchanged):
        publish(root, KIND, write)
    return changes[0]


class _Unchanged(Exception):
    """Nothing is to be written."""


def _compared(before: Sequence[Document], plan: IndexPlan) -> Change:
    old, new = ({each.name: each for each in some} for some in (before, plan.documents))
    both = [name for name in new if name in old]
    changed = [name for name in both if new[name].text != old[name].text]
    return Change(
        added=tuple(name for name in new if name not in old),
        changed=tuple(changed),
        removed=tuple(name for name in old if name not in new),
        unchanged=len(both) - len(changed),
        skipped=tuple(plan.skipped),
        missing=tuple(plan.missing),
    )


def _place(document: Document) -> str:
    """Return where a document was read from, absolute; "" where it was not."""
    return os.path.abspath(document.path) if document.path else ""


def _known(index: PassageIndex) -> dict[str, Document]:
    return {_place(each): each for each in index.documents if each.path}


def _as_before(index: PassageIndex, documents: Iterable[Document]) -> list[Document]:
    """Return documents under the names that the index has for their files, if it has.

    Files whose foreign names look alike when written as UTF-8 are named again.
    """
    alike = Counter(_place(each) for each in index.documents)
    names = {_place(each): each.name for each in index.documents if alike[_place(each)] == 1}
    return [replace(each, name=names.get(_place(each), each.name)) for each in documents]


def _within(path: str, folders: Iterable[str]) -> bool:
    return any(path == each or path.startswith(each.rstrip(os.sep) + os.sep) for each in folders)


def _named(index: PassageIndex, inputs: str) -> list[str]:
    """Return the names of the documents that a name, a file or a folder stands for."""
    names = [each.name for each in index.documents]
    if inputs in names:
        return [inputs]
    place = os.path.abspath(inputs)
    results = [
        each.name for each in index.documents if each.path and _within(_place(each), [place])
    ]
    results += [name for name in names if name.startswith(inputs.rstrip("/") + "/")]
    if not results:
        raise InputError(
            f"got {inputs!r}, which is no document of the index; expected a name, a file or a "
            f"folder of it.{did_you_mean(inputs, names)} `ragspec index info` lists them."
        )
    return results
