import json
import random
from pathlib import Path

import numpy as np
import pytest

from ragspec.errors import InputError, ModelError, StoreError
from ragspec.models.resolve import BUNDLED
from ragspec.retrievers.search import dense
from ragspec.retrievers.search.documents import Collection, Document
from ragspec.retrievers.search.fusion import STATIC, SearchMode
from ragspec.retrievers.search.passage_index import PassageIndex, searched_text
from ragspec.storage.manifest import Contents, sha256_file
from ragspec.storage.store import publish
from tests.support.damage import check_damage
from tests.support.toy_embedder import make_embedder

DOCUMENTS = [
    Document("pets.txt", "Pets", "The cat is a pet. The dog is an animal too.", "/x/pets.txt"),
    Document("rail.md", "Rail", "# Rail\nThe train has a wheel.", None, ((0, "Rail"),)),
    Document("spec.txt", "Drafts", "The draft model proposes a token tree."),
]


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
    index.save(tmp_path / "idx", replace=False)
    with pytest.raises(InputError, match="is an index already"):
        index.save(tmp_path / "idx", replace=False)
    again = PassageIndex.open(tmp_path / "idx")
    assert again.documents == index.documents
    assert again.passages == index.passages
    assert again.fusion == index.fusion == STATIC
    for query in ("cat pet", "token tree", "wheel"):
        assert again.search(query, 3) == index.search(query, 3)
    other = make_embedder(tmp_path / "other", seed=5)
    with pytest.raises(StoreError, match="another embedder"):
        PassageIndex.open(tmp_path / "idx", embedder=other)


def test_index_of_one_kind_only(embedder: Path, tmp_path: Path) -> None:
    words = PassageIndex.build(DOCUMENTS, embedder=None)
    assert words.search("train", 3)[0].document.name == "rail.md"
    words.save(tmp_path / "words")
    assert PassageIndex.open(tmp_path / "words").mode == "sparse"
    with pytest.raises(InputError, match="no dense part"):
        words.search("train", 3, "dense")
    PassageIndex.build(DOCUMENTS, embedder=embedder, sparse=False).save(tmp_path / "meaning")
    assert PassageIndex.open(tmp_path / "meaning").mode == "dense"


def test_bad_requests_are_refused(index: PassageIndex) -> None:
    for query in ("  ", None):
        with pytest.raises(InputError, match="empty"):
            index.search(query)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least 1"):
        index.search("cat", 0)
    with pytest.raises(InputError, match="got 'bm25' as the search mode; expected dense, sparse"):
        index.search("cat", 1, "bm25")
    with pytest.raises(InputError, match="neither"):
        PassageIndex.build(DOCUMENTS, embedder=None, sparse=False)
    with pytest.raises(InputError, match="dense is 'flat'; expected exact or hnsw"):
        PassageIndex.build(DOCUMENTS, dense="flat")
    for documents in (None, DOCUMENTS[0], ["abc"]):
        with pytest.raises(InputError, match="expected a list of Document"):
            PassageIndex.build(documents, embedder=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="expected texts as its name, title and text"):
        Document("n", "t", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least one passage"):
        PassageIndex([], [], dense=None, sparse=index.sparse)


def test_surrogates_are_searched_for_and_saved(embedder: Path, tmp_path: Path) -> None:
    document = Document("a\udce9", "t", "The cat \ud83d.")
    collection = Collection((document,), paths=("docs",))
    PassageIndex.build(collection, embedder=embedder).save(tmp_path / "idx")
    index = PassageIndex.open(tmp_path / "idx")
    assert index.search("cat \ud83d")[0].document == document
    assert index.origin.paths == (str(Path("docs").absolute()),)


def test_invalid_file_with_a_valid_manifest_is_refused(index: PassageIndex, tmp_path: Path) -> None:
    def write(folder: Path) -> Contents:
        index.write(folder)
        (folder / "documents.jsonl").write_text(json.dumps({"name": "x"}) + "\n")
        return Contents({"embedder": None, "sparse": True})

    publish(tmp_path / "idx", "passages", write)
    with pytest.raises(StoreError, match="build it again"):
        PassageIndex.open(tmp_path / "idx")


def test_damaged_index_is_refused(embedder: Path, tmp_path: Path) -> None:
    """faiss reads most damaged files without an error; the store's hashes detect them."""
    pytest.importorskip("faiss")
    index = PassageIndex.build(DOCUMENTS, embedder=embedder, dense="hnsw")
    index.save(tmp_path / "idx")
    again = PassageIndex.open(tmp_path / "idx")
    assert again.search("train wheel", 2, "dense") == index.search("train wheel", 2, "dense")
    assert again.dense is not None and again.dense.nearest.kind == "hnsw"
    check_damage(tmp_path / "idx", PassageIndex.open, tmp_path, 200, "nearest.faiss")
    check_damage(tmp_path / "idx", PassageIndex.open, tmp_path, 60)


def test_results_depend_on_the_query_alone(embedder: Path) -> None:
    sample = random.Random(4)
    words = ["cat", "dog", "train", "wheel", "draft", "token", "tree", "pet", "rail", "model"]
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


TEXTS = ["the cat is a pet animal", "the train of rail and wheel", "draft token tree model", ""]


def test_static_embedder_equals_sentence_transformers(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "toy")
    static = dense.load_embedder(folder)
    assert isinstance(static, dense.StaticEmbedder)
    reference = dense.SentenceEmbedder("toy", folder, "x")
    ours, theirs = static.encode(TEXTS), reference.encode(TEXTS)
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    np.testing.assert_allclose(static.encode(TEXTS[:1], query=True), ours[:1], atol=1e-6)
    assert reference.encode([]).shape == (0, 16)
    assert static.encode([]).shape == (0, 16)
    texts = [f"{a} {b}" for a in ("cat", "dog", "car") for b in ("tree", "token")] * 100
    together = static.encode(texts)
    np.testing.assert_allclose(together[:6], together[-6:], atol=1e-6)
    np.testing.assert_allclose(together[3:4], static.encode(texts[3:4]), atol=1e-6)
    for more in {"prompts": {"query": "about "}}, {"truncate_dim": 8}:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(more))
        assert isinstance(dense.load_embedder(folder), dense.SentenceEmbedder)


@pytest.mark.skipif(
    not (BUNDLED["starter-embedder"] / "modules.json").is_file(), reason="no bundled embedder here"
)
def test_bundled_embedder_is_small_and_ranks_related_texts_first() -> None:
    folder = BUNDLED["starter-embedder"]
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4_000_000
    embedder = dense.load_embedder()
    reference = dense.SentenceEmbedder("starter-embedder", folder, "x")
    texts = [
        "How do I merge two dictionaries?",
        "Use the update method to merge one dict into another dictionary.",
        "The whale rose slowly from the sea and the harpooner stood up in the boat.",
    ]
    vectors = embedder.encode(texts)
    np.testing.assert_allclose(vectors, reference.encode(texts), atol=5e-3)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2
    card = (folder / "README.md").read_text()
    assert sha256_file(folder / "model.safetensors") in card
    assert sha256_file(folder / "tokenizer.json") in card


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors"])
def test_a_damaged_embedder_is_refused(file: str, tmp_path: Path) -> None:
    (make_embedder(tmp_path) / file).write_text('{"damaged": 1}')
    with pytest.raises(ModelError, match=r"cannot be loaded|is damaged"):
        dense.load_embedder(tmp_path)


def test_fingerprints_identify_models_and_other_dimensions_are_refused(tmp_path: Path) -> None:
    first = dense.load_embedder(make_embedder(tmp_path / "a", seed=0))
    same = dense.load_embedder(make_embedder(tmp_path / "b", seed=0))
    other = dense.load_embedder(make_embedder(tmp_path / "c", seed=1))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    narrow = dense.load_embedder(make_embedder(tmp_path / "d", dimensions=8))
    index = dense.DenseIndex(first.encode(["cat"]), narrow)
    with pytest.raises(InputError, match="8 dimensions, the index has 16"):
        index.search("cat", 1)


def test_a_language_model_is_no_embedder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"causal language model .*with a modules\.json"):
        dense.load_embedder("starter")
    folder = make_embedder(tmp_path / "toy")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.chdir(tmp_path)
    name = dense.load_embedder(folder.name).name
    assert name == str(folder), "modules.json makes it an embedder, which indexes find anywhere"
