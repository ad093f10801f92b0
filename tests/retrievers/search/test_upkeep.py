"""A changed index equals a new one, also if a process is killed."""

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragspec.errors import DocumentError, InputError, StoreError
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.retrievers.search.dense import StaticEmbedder
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.nearest import Floats
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.upkeep import add, described, refresh, remove
from tests.support.damage import check_kills
from tests.support.toy_embedder import WORDS
from tests.support.toy_pdf import pdf_of


def text(seed: int, sentences: int = 30) -> str:
    words = random.Random(seed)
    return " ".join(f"The {' '.join(words.choices(WORDS, k=9))}." for _ in range(sentences))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    instance = tmp_path / "docs"
    (instance / "sub").mkdir(parents=True)
    for number in range(4):
        (instance / f"{number}.txt").write_text(text(number))
    (instance / "sub" / "page.md").write_text(f"# Heading\n\n{text(9)}")
    (instance / "sub" / "paper.pdf").write_bytes(pdf_of("The cat and the dog.", "A train."))
    return instance


def built(paths: Sequence[Path], out: Path, embedder: Path) -> Path:
    DocQA.from_documents(paths, embedder=embedder).save(out)
    return out


def check_equal(grown: Path, fresh: Path) -> None:
    one, other = PassageIndex.open(grown), PassageIndex.open(fresh)
    assert one.documents == other.documents
    assert one.passages == other.passages
    assert one.dense is not None and other.dense is not None
    assert np.array_equal(one.dense.vectors, other.dense.vectors)
    for query in ("cat dog", "train wheel", "draft tree", "the model"):
        assert one.search(query, 20) == other.search(query, 20)


def test_refreshed_index_equals_a_new_one(folder: Path, embedder: Path, tmp_path: Path) -> None:
    generator, index = random.Random(7), built([folder], tmp_path / "idx", embedder)
    for turn in range(12):
        files = [path for path in folder.rglob("*") if path.is_file()]
        for _ in range(generator.randrange(3)):
            chosen = generator.choice(files)
            what = generator.randrange(4)
            if what == 0 and len(files) > 2 and chosen.exists():
                chosen.unlink()
            elif what == 1:
                (folder / f"new{turn}.txt").write_text(text(100 + turn, generator.randrange(1, 40)))
            elif what == 2 and chosen.suffix == ".txt" and chosen.exists():
                chosen.write_text(chosen.read_text() + " " + text(200 + turn, 3))
            elif chosen.exists():
                os.utime(chosen)  # the content is the same
        change = refresh(index)
        check_equal(index, built([folder], tmp_path / f"fresh{turn}", embedder))
        assert not refresh(index)
        assert change.unchanged + len(change.added) + len(change.changed) == len(
            PassageIndex.open(index).documents
        )


def test_a_refresh_reads_places_again_if_the_text_stays(embedder: Path, tmp_path: Path) -> None:
    path, index = tmp_path / "a.ipynb", tmp_path / "idx"
    for cells in (("A cat.", "A dog.", "A train."), ("A cat.\n\nA dog.", "A train.")):
        rows = [{"cell_type": "markdown", "source": each} for each in cells]
        path.write_text(json.dumps({"cells": rows}))
        change = refresh(index) if index.exists() else built([path], index, embedder)
    assert change and not refresh(index)
    assert PassageIndex.open(index).documents[0].place(16, 23) == "cell 2"


def test_refresh_embeds_only_new_passages_and_writes_only_changes(
    folder: Path, embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = built([folder], tmp_path / "idx", embedder)
    embedded: list[str] = []
    encode = StaticEmbedder.encode

    def counted(self: StaticEmbedder, texts: Sequence[str], *, query: bool = False) -> Floats:
        embedded.extend(texts)
        return encode(self, texts, query=query)

    monkeypatch.setattr(StaticEmbedder, "encode", counted)
    before = (index / "CURRENT").read_bytes()
    change = refresh(index)
    assert not change and change.unchanged == 6
    assert not embedded and (index / "CURRENT").read_bytes() == before
    (folder / "1.txt").write_text(text(1) + " One more sentence of a cat.")
    (folder / "5.txt").write_text("A new animal.")
    change = refresh(index)
    assert change.changed == ("1.txt",) and change.added == ("5.txt",) and change.unchanged == 5
    assert 0 < len(embedded) <= 2 and not any("2.txt" in each for each in embedded)


def test_documents_are_added_and_removed(folder: Path, embedder: Path, tmp_path: Path) -> None:
    index = built([folder / "0.txt"], tmp_path / "idx", embedder)
    change = add(index, [folder / "sub", folder / "1.txt"])
    assert change.added == ("page.md", "paper.pdf", "1.txt") and change.unchanged == 1
    check_equal(
        index, built([folder / n for n in ("0.txt", "sub", "1.txt")], tmp_path / "a", embedder)
    )
    (folder / "1.txt").write_text("The dog alone.")
    assert add(index, [folder / "1.txt"]).changed == ("1.txt",)
    assert remove(index, ["page.md", folder / "1.txt"]).removed == ("page.md", "1.txt")
    assert not refresh(index), "removed documents stay out"
    assert described(index)["removed"] == [str(folder / "sub" / "page.md")]
    assert str(folder / "1.txt") not in described(index)["paths"]
    assert add(index, [folder / "sub"]).added == ("page.md",), "until it is added again"
    assert set(remove(index, [folder / "sub"]).removed) == {"page.md", "paper.pdf"}
    assert len(add(index, folder).added) == 5 and len(remove(index, folder / "sub").removed) == 2
    (folder / "sub" / "new.txt").write_text("A cat.")
    assert not refresh(index), "new files of a removed folder stay out"
    (folder / "sub" / "in").mkdir()
    (folder / "sub" / "in" / "4.txt").write_text("A dog.")
    again = [folder / "sub" / "in", folder / "sub" / "new.txt"]
    assert [add(index, each).added for each in again] == [("4.txt",), ("new.txt",)]
    (folder / "sub" / "in" / "5.txt").write_text("A hen.")
    assert refresh(index).added == ("5.txt",) and not refresh(index), "but for what was added again"
    remove(index, [f"{n}.txt" for n in (1, 2, 3, 4, 5)] + ["new.txt"])
    assert not refresh(index)
    with pytest.raises(InputError, match="nothing to search in"):
        remove(index, ["0.txt"])
    for call in (add, remove):
        with pytest.raises(InputError, match="none of them empty"):
            call(index, ["0.txt", ""])
    with pytest.raises(InputError, match=r"no document of the index.* Did you mean '0.txt'"):
        remove(index, ["0.tx"])


def test_missing_folder_removes_no_documents(folder: Path, embedder: Path, tmp_path: Path) -> None:
    index = built([folder], tmp_path / "idx", embedder)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(DocumentError, match="is missing"):
        refresh(index)
    assert len(PassageIndex.open(index).documents) == 6
    folder.mkdir()
    with pytest.raises(DocumentError, match="holds no usable text"):
        refresh(index)
    assert len(PassageIndex.open(index).documents) == 6
    for wrong in (tmp_path / "nowhere", tmp_path / "elsewhere"):
        with pytest.raises(StoreError):
            refresh(wrong)


def test_documents_of_files_and_folders_that_cannot_be_read_stay(
    folder: Path, embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, closed = built([folder], tmp_path / "idx", embedder), folder / "sub"

    def refusing(function: Any) -> Any:
        def call(path: Any) -> Any:
            if str(path) == str(closed):
                raise PermissionError(13, "Permission denied", str(closed))
            return function(path)

        return call

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    (folder / "0.txt").write_bytes(bytes(range(1, 32)))
    (folder / "1.txt").write_text(" ")
    change, skipped = refresh(index), [*map(str, (folder / "0.txt", folder / "1.txt", closed))]
    assert change.removed == ("1.txt",) and [each.path for each in change.skipped] == skipped
    assert len(PassageIndex.open(index).documents) == 5
    assert not (tmp_path / "nowhere").exists()


def test_documents_without_files_stay(embedder: Path, tmp_path: Path) -> None:
    documents = [Document("a", "A", text(1)), Document("b", "B", text(2))]
    PassageIndex.build(documents, embedder=embedder).save(tmp_path / "idx")
    (tmp_path / "c.txt").write_text(text(3))
    assert add(tmp_path / "idx", [tmp_path / "c.txt"]).added == ("c.txt",)
    assert not refresh(tmp_path / "idx"), "documents that came from no file stay"
    names = [each.name for each in PassageIndex.open(tmp_path / "idx").documents]
    assert names == ["a", "b", "c.txt"]


def test_an_index_without_a_dense_part_grows(folder: Path, tmp_path: Path) -> None:
    DocQA.from_documents([folder / "0.txt"], embedder=None).save(tmp_path / "idx")
    add(tmp_path / "idx", [folder / "1.txt"])
    index = PassageIndex.open(tmp_path / "idx")
    assert index.mode == "sparse" and len(index.documents) == 2
    DocQA.from_documents([folder / "0.txt"], embedder=None, words=40).save(tmp_path / "short")
    add(tmp_path / "short", [folder / "1.txt"])
    assert described(tmp_path / "short")["words"] == 40
    assert max([len(p.text.split()) for p in PassageIndex.open(tmp_path / "short").passages]) <= 40


def test_progress_is_reported_with_counts(folder: Path, embedder: Path, tmp_path: Path) -> None:
    message: list[tuple[str, int, int]] = []
    receive: Callable[[str, int, int], None] = lambda *inputs: message.append(inputs)  # noqa: E731
    DocQA.from_documents(folder, embedder=embedder, on_progress=receive).save(tmp_path / "idx")
    assert ("reading documents", 5, 6) in message
    last = [what for what, _, _ in message][-3:]
    assert last == ["embedding passages", "indexing vectors", "indexing words"]
    assert all(done <= total for _, done, total in message)


@pytest.mark.skipif(sys.platform == "win32", reason="no fork, no SIGKILL")
def test_a_refresh_that_is_killed_leaves_the_old_index_or_the_new(
    folder: Path, embedder: Path, tmp_path: Path
) -> None:
    index = built([folder], tmp_path / "idx", embedder)
    (folder / "0.txt").unlink()
    (folder / "grown.txt").write_text(text(5, 40))
    check_kills(index, tmp_path, refresh, lambda path: PassageIndex.open(path).documents)


def test_a_file_that_several_paths_lead_to_is_one_document(
    folder: Path, embedder: Path, tmp_path: Path
) -> None:
    index = built(
        [folder / "0.txt", folder / "0.txt", folder, folder / "sub"], tmp_path / "a", embedder
    )
    assert len(PassageIndex.open(index).documents) == 6
    index = built([folder / "sub"], tmp_path / "b", embedder)
    assert not add(index, [folder / "sub" / "page.md"])
    (folder / "sub" / "page.md").write_text("# Other\n\nThe wheel.")
    assert refresh(index).changed == ("page.md",)
    change = add(index, [folder])
    assert len(change.added) == 4 and not change.removed, "known documents have the names of before"
    assert described(index)["paths"] == [str(folder)]
    assert not refresh(index)


def test_documents_of_a_missing_path_stay_until_removed(
    folder: Path, embedder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "more.txt").write_text("A pet and a rail.")
    index = built([folder, other], tmp_path / "idx", embedder)
    folder.rename(tmp_path / "moved")
    (other / "new.txt").write_text("A token tree.")
    change = refresh(index)
    assert change.added == ("new.txt",) and not change.removed
    assert [each.path for each in change.missing] == [str(folder)]
    folder.mkdir()  # a disk that is not mounted looks empty
    assert refresh(index).missing and len(PassageIndex.open(index).documents) == 8
    assert len(remove(index, [folder]).removed) == 6
    assert described(index)["paths"] == [str(other)] and not described(index)["removed"]
    change = refresh(index)
    assert not change and not change.missing


def test_files_whose_names_are_no_utf_8_are_refreshed_separately(
    embedder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    try:
        for name, said in ((b"caf\xe9.txt", "A cat."), (b"caf\xea.txt", "A dog.")):
            Path(os.fsdecode(bytes(folder) + b"/" + name)).write_text(said)
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    index = built([folder], tmp_path / "idx", embedder)
    assert not refresh(index)
    (folder / "more.txt").write_text("A train.")
    assert refresh(index).added == ("more.txt",)
    texts = {each.text: each.name for each in PassageIndex.open(index).documents}
    assert texts.keys() == {"A cat.", "A dog.", "A train."}
    cat = os.fsdecode(bytes(folder) + b"/caf\xe9.txt")
    assert remove(index, cat).removed == (texts["A cat."],) and not refresh(index)
    assert remove(index, texts["A dog."]).removed == (texts["A dog."],) and not refresh(index)
    assert add(index, cat).added == (texts["A cat."],) and not refresh(index)
    foreign = folder.rename(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    index = built([foreign, embedder / "tokenizer.json"], tmp_path / "b", embedder)
    assert remove(index, foreign / "more.txt").removed == ("more.txt",) and not refresh(index)
    foreign.rename(folder)
    assert len(refresh(index).missing) == 1 and len(PassageIndex.open(index).documents) == 3
    (file,) = index.glob("gen-*2/documents.jsonl")
    file.write_bytes(b"\xff" + file.read_bytes()[1:])
    with pytest.raises(StoreError, match="cannot be read"):
        described(index)
