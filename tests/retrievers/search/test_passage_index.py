from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.fusion import STATIC, SearchMode
from ragspec.retrievers.search.passage_index import PassageIndex, searched_text
from ragspec.storage.store import publish
from tests.support.toy_embedder import make_embedder

DOCUMENTS = [
    Document("pets.txt", "Pets", "The cat is a pet. The dog is an animal too.", "/x/pets.txt"),
    Document("rail.md", "Rail", "# Rail\nThe train has a wheel.", None, ((0, "Rail"),)),
    Document("spec.txt", "Drafts", "The draft model proposes a token tree."),
]


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    return make_embedder(tmp_path / "embedder")


@pytest.fixture
def index(embedder: Path) -> PassageIndex:
    return PassageIndex.build(DOCUMENTS, embedder=embedder)


@pytest.mark.parametrize("mode", ["dense", "sparse", "fused", None])
def test_each_mode_finds_the_passage(index: PassageIndex, mode: str | None) -> None:
    hits = index.search("train wheel rail", 2, mode)
    assert hits[0].document.name == "rail.md"
    assert hits[0].passage.text == DOCUMENTS[1].text
    expected = {"dense", "sparse"} if mode in ("fused", None) else {mode}
    assert set(hits[0].ranks) == expected


def test_saved_index_opens_with_equal_results(index: PassageIndex, tmp_path: Path) -> None:
    index.save(tmp_path / "idx")
    again = PassageIndex.open(tmp_path / "idx")
    assert again.documents == index.documents
    assert again.passages == index.passages
    assert again.fusion == index.fusion == STATIC
    for query in ("cat pet", "token tree", "wheel"):
        assert again.search(query, 3) == index.search(query, 3)


def test_index_of_one_kind_only(embedder: Path, tmp_path: Path) -> None:
    words = PassageIndex.build(DOCUMENTS, embedder=None)
    assert words.search("train", 3)[0].document.name == "rail.md"
    words.save(tmp_path / "words")
    assert PassageIndex.open(tmp_path / "words").mode == "sparse"
    with pytest.raises(InputError, match="no dense part"):
        words.search("train", 3, "dense")
    meaning = PassageIndex.build(DOCUMENTS, embedder=embedder, sparse=False)
    meaning.save(tmp_path / "meaning")
    assert PassageIndex.open(tmp_path / "meaning").mode == "dense"


def test_bad_requests_are_refused(index: PassageIndex) -> None:
    with pytest.raises(InputError, match="empty"):
        index.search("  ")
    with pytest.raises(InputError, match="at least 1"):
        index.search("cat", 0)
    with pytest.raises(InputError, match="neither"):
        PassageIndex.build(DOCUMENTS, embedder=None, sparse=False)
    with pytest.raises(InputError, match="at least one passage"):
        PassageIndex([], [], dense=None, sparse=index.sparse)


def test_another_embedder_is_refused(index: PassageIndex, tmp_path: Path) -> None:
    index.save(tmp_path / "idx")
    other = make_embedder(tmp_path / "other", seed=5)
    with pytest.raises(StoreError, match="another embedder"):
        PassageIndex.open(tmp_path / "idx", embedder=other)


@pytest.mark.parametrize("name", ["documents.jsonl", "passages.npy", "titles.jsonl", "vectors.npy"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damaged_index_is_refused(
    index: PassageIndex, tmp_path: Path, name: str, damage: str
) -> None:
    index.save(tmp_path / "idx")
    (path,) = (tmp_path / "idx").glob(f"gen-*/{name}")
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[:-3])
    elif damage == "remove":
        path.unlink()
    else:
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with pytest.raises(StoreError):
        PassageIndex.open(tmp_path / "idx")


def test_file_created_by_somebody_else_under_a_right_manifest_is_refused(
    index: PassageIndex, tmp_path: Path
) -> None:
    from ragspec.storage.store import publish

    def write(folder: Path) -> None:
        index.write(folder)
        (folder / "documents.jsonl").write_text(json.dumps({"name": "x"}) + "\n")

    parameters: dict[str, object] = {"embedder": None, "sparse": True, "fusion": {}}
    publish(tmp_path / "idx", "passages", write, parameters=parameters)
    with pytest.raises(StoreError, match="build it again"):
        PassageIndex.open(tmp_path / "idx")


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_no_flipped_byte_of_an_approximate_index_is_served(
    kind: str, embedder: Path, tmp_path: Path
) -> None:
    """faiss reads most flipped files without a word; the store's hashes do not."""
    pytest.importorskip("faiss")
    index = PassageIndex.build(DOCUMENTS, embedder=embedder, dense=kind)
    index.save(tmp_path / "idx")
    again = PassageIndex.open(tmp_path / "idx")
    assert again.search("train wheel", 2, "dense") == index.search("train wheel", 2, "dense")
    assert again.dense is not None and again.dense.nearest.kind == kind
    (file,) = (tmp_path / "idx").rglob("nearest.faiss")
    whole, sample = file.read_bytes(), random.Random(1)
    for case in range(200):
        data = bytearray(whole)
        data[sample.randrange(len(data))] ^= 1 << sample.randrange(8)
        file.write_bytes(data[: sample.randrange(len(data))] if case % 10 == 0 else data)
        with pytest.raises(StoreError):
            PassageIndex.open(tmp_path / "idx")
    file.unlink()
    with pytest.raises(StoreError):
        PassageIndex.open(tmp_path / "idx")


def test_an_index_of_before_is_searched_exactly(index: PassageIndex, tmp_path: Path) -> None:
    contents = index.contents()
    parameters = {name: value for name, value in contents.parameters.items() if name != "dense"}
    prints = contents.fingerprints
    publish(tmp_path / "old", "passages", index.write, parameters=parameters, fingerprints=prints)
    again = PassageIndex.open(tmp_path / "old")
    assert again.dense is not None and again.dense.nearest.kind == "exact"
    assert again.search("train wheel", 2) == index.search("train wheel", 2)


def test_what_is_detected_hangs_on_the_query_alone(embedder: Path) -> None:
    sample, words = (
        random.Random(4),
        ["cat", "dog", "train", "wheel", "draft", "token", "tree", "pet", "rail", "model"],
    )
    texts = [" ".join(sample.choices(words, k=6)) for _ in range(60)]
    texts[7], texts[31], texts[50] = texts[3], texts[3], texts[3]
    instance = [Document(f"{i}.txt", f"{i % 3}", text) for i, text in enumerate(texts)]
    index = PassageIndex.build(instance, embedder=embedder)
    requests = [" ".join(sample.choices(words, k=4)) for _ in range(64)]
    for mode in SearchMode:
        queries = [index.query(text, mode) for text in requests]
        alone = [index.ranked([query], 60, mode)[0] for query in queries]
        for batch in (2, 7, 64):
            assert index.ranked(queries[:batch], 60, mode) == alone[:batch]
        for k in (1, 2, 5, 17):
            assert index.ranked(queries, k, mode) == [match[:k] for match in alone]
        for query, result in zip(queries, alone, strict=True):
            assert index.best_of(query, range(60), mode) == result[0][0]


def test_titles_are_searched_once(index: PassageIndex) -> None:
    texts = [searched_text(index.documents[p.document], p) for p in index.passages]
    assert texts[0].startswith("Pets\nThe cat")
    assert texts[1].startswith("Rail\n# Rail")


def test_importing_the_room_is_light() -> None:
    code = (
        "import sys, ragspec.retrievers, ragspec.pipelines\n"
        "import ragspec.retrievers.search.passage_index, ragspec.pipelines.docqa.docqa\n"
        "heavy = {'bm25s', 'pypdf', 'sentence_transformers', 'transformers', 'faiss', 'datasets'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
