"""A datastore: keys and values, ends of texts, refused input and damage, and exact search.

The nearest keys equal those of a full scan, also if several states are searched together.
"""

import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import DocumentError, InputError, StoreError
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.knn import datastore
from ragspec.retrievers.knn.datastore import Datastore, NearestKeys, Neighbours
from ragspec.retrievers.knn.distributions import AHEAD, Knn, NeighbourCache
from ragspec.retrievers.search import nearest
from tests.support import tiny
from tests.support.damage import check_damage, full_disk


def engine(**model: Any) -> Engine:
    return Engine(tiny.model(**model), tiny.tokenizer(), None)


def texts(count: int = 12, seed: int = 0) -> list[list[int]]:
    sample = random.Random(seed)
    return [[sample.randrange(4, 60) for _ in range(sample.randrange(2, 90))] for _ in range(count)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    return Datastore.build(texts(), engine(), tmp_path_factory.mktemp("knn") / "store")


def states(tokens: list[int]) -> Any:
    """Return the inputs of the tiny model's output head, computed by transformers: [T, H]."""
    with torch.no_grad():
        result = tiny.model()(torch.tensor([tokens]), output_hidden_states=True)
    return result.hidden_states[-1][0].numpy()


def close(keys: Any, expected: Any) -> bool:
    return np.allclose(keys.astype(np.float32), expected, atol=5e-3, rtol=5e-3)


def test_every_token_but_the_last_has_a_key_and_the_next_token(store: Datastore) -> None:
    at = 0
    for text, start in zip(texts(), store.starts, strict=False):
        assert start == at
        assert store.values[at : at + len(text) - 1].tolist() == text[1:]
        assert close(store.keys[at : at + len(text) - 1], states(text)[:-1])
        at += len(text) - 1
    assert len(store) == at == store.starts[-1]


def test_long_texts_are_read_in_windows_that_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datastore, "WINDOW", 16)
    text = [4 + i % 50 for i in range(75)]
    result = Datastore.build([text, [5, 6, 7]], engine(), tmp_path / "store")
    assert result.values.tolist() == [*text[1:], 6, 7]
    assert result.starts.tolist() == [0, 74, 76]
    # After the first window a key depends at least on the overlap before it.
    assert close(result.keys[20:29], states(text[14:30])[6:15])


def test_build_stops_at_max_tokens(tmp_path: Path) -> None:
    result = Datastore.build(texts(), engine(), tmp_path / "store", max_tokens=100)
    whole = [token for text in texts() for token in text[1:]]
    assert result.values.tolist() == whole[:100]
    assert result.starts[-1] == 100


def test_following_keys_end_with_their_text(store: Datastore) -> None:
    ends = store.starts[1:]
    last = np.asarray([ends[0] - 1, ends[3] - 2, 0])
    assert store.following(last, 3).tolist() == [ends[0] - 1, ends[3] - 2, ends[3] - 1, 0, 1, 2, 3]


def test_a_reopened_datastore_is_the_same(store: Datastore) -> None:
    again = Datastore.open(store.path)
    assert again.info() == store.info()
    request = np.asarray(store.keys[5:9], np.float32)
    for one, other in zip(
        store.near.search(request, 7), again.near.search(request, 7), strict=True
    ):
        assert np.array_equal(one.numbers, other.numbers)
        assert one.distances[0] == 0.0


def test_the_mixture_follows_its_equation(
    store: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(store, "values", np.asarray([3, 5]))
    distances = np.asarray([1.0, 2.0, 4.0])
    near = Neighbours(np.asarray([0, 1, 0]), distances)
    mixed = Knn(store, 3, 0.4, 2.0).logits(logits, near)[0].exp()
    shares = np.exp(-distances / 2.0)
    shares /= shares.sum()
    expected = 0.6 * logits[0].double().softmax(-1)
    expected[3] += 0.4 * (shares[0] + shares[2])
    expected[5] += 0.4 * shares[1]
    assert torch.allclose(mixed, expected, atol=1e-12)
    # With weight 1 the target's tokens remain possible if those of the neighbours are forbidden.
    alone = Knn(store, 3, 1.0, 2.0).logits(logits, near)[0]
    assert alone.isfinite().all() and alone.exp()[[3, 5]].sum() > 1 - 1e-9
    far = Knn(store, 2, 0.4, 2.0).shares(np.asarray([1e9, 1e9 + 2.0]))
    assert np.allclose(far, [1 / (1 + np.exp(-1)), 1 / (1 + np.e)])


def test_the_cache_drops_the_oldest_and_holds_the_following_keys(store: Datastore) -> None:
    cache = NeighbourCache(store, most=20)
    state = np.asarray(store.keys[3 + AHEAD], np.float32)
    for _ in range(2):  # no key is added twice
        cache.add(Neighbours(np.asarray([3]), np.zeros(1)))
        assert cache.size == AHEAD + 1
        assert cache.nearest(state, 1).numbers.tolist() == [3 + AHEAD]
    long = next(int(s) for s, e in pairwise(store.starts[1:]) if e - s > AHEAD)
    cache.add(Neighbours(np.asarray([long]), np.zeros(1)))
    assert cache.size == 20
    assert 3 not in cache.nearest(state, 20).numbers
    assert set(cache.nearest(state, 20).numbers) >= set(range(long, long + AHEAD + 1))


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([], {}, "no two tokens in a row"),
        ([[4], []], {}, "no two tokens in a row"),
        *((["a text"], {"max_tokens": n}, "max_tokens is") for n in (0, "5", None, 1.5, True)),
        (["a text"], {"engine": "starter"}, "as the engine"),
        (["a text"], {"out": None}, "got None as the datastore; expected a path"),
        (["a text"], {"progress": 3}, "progress is 3"),
        ("a text", {}, "got 'a text'; expected a list"),
        (None, {}, "got None; expected a list"),
        ([[4, 500]], {}, "document 0 holds ids from 4 to 500"),
    ],
)
def test_a_refused_build_leaves_no_folder(
    inputs: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((InputError, DocumentError), match=message):
        Datastore.build(inputs, **{"engine": engine(), "out": tmp_path / "store", **options})
    assert not (tmp_path / "store").exists()


def test_a_failed_build_leaves_the_older_one(store: Datastore, tmp_path: Path) -> None:
    shutil.copytree(store.path, tmp_path / "store")
    with pytest.raises(DocumentError):
        Datastore.build([], engine(), tmp_path / "store")
    assert len(Datastore.open(tmp_path / "store")) == len(store)


def test_another_model_or_tokenizer_or_kind_is_refused(store: Datastore, tmp_path: Path) -> None:
    store.check(engine(architectures=("LlamaForCausalLM",)))  # as once saved
    with pytest.raises(StoreError, match="another model"):
        store.check(engine(seed=4))
    with pytest.raises(StoreError, match="another config"):
        store.check(engine(rms_norm_eps=0.5))
    with pytest.raises(StoreError, match="holds no store"):
        Datastore.open(tmp_path)
    CorpusIndex.build([[4, 5, 6]], 97, tmp_path / "corpus").close()
    with pytest.raises(StoreError, match="expected 'datastore'"):
        Datastore.open(tmp_path / "corpus")


def test_a_model_that_overflows_has_no_datastore() -> None:
    with pytest.raises(InputError, match="not finite in float16"):
        datastore._halved(np.asarray([[1.0, 1e6]], np.float32))


def test_a_full_disk_raises_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datastore, "_states", full_disk)
    with pytest.raises(StoreError, match="cannot take the keys"):
        Datastore.build(texts(), engine(), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_damage_to_any_file_is_a_typed_error(store: Datastore, tmp_path: Path) -> None:
    check_damage(store.path, Datastore.open, tmp_path, 200)


def clustered(count: int, width: int, seed: int = 0) -> Any:
    """Return keys around a few centres far from zero, some of them twice."""
    sample = np.random.default_rng(seed)
    centres = sample.normal(size=(7, width)) * 3.0 + 5.0
    keys = centres[sample.integers(7, size=count)] + sample.normal(size=(count, width))
    if count > 40:
        keys[count // 2 : count // 2 + 9] = keys[:9]
    return keys.astype(np.float16)


def measured(keys: Any, query: Any, k: int) -> tuple[list[int], Any]:
    rows = keys.astype(np.float64) - query.astype(np.float64)
    distances = (rows * rows).sum(axis=1)
    order = np.lexsort((np.arange(len(keys)), distances))[:k]
    return order.tolist(), distances[order]


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("k", [1, 7, 300])
def test_the_nearest_keys_are_those_of_measuring_all(
    scanned: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scanned:
        pytest.importorskip("faiss")
    monkeypatch.setattr(nearest, "LARGE", 0 if scanned else 1 << 30)
    monkeypatch.setattr(nearest, "BLOCK", 256)
    keys = clustered(1100, 24)
    near = NearestKeys(keys)
    queries = clustered(64, 24, seed=3).astype(np.float32)
    queries[0], queries[1] = keys[3], keys[700]  # the first one is stored twice
    alone = [near.search(query[None], k)[0] for query in queries]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in (2, 5, 64):
            for one, many in zip(alone, near.search(queries[:size], k), strict=False):
                assert np.array_equal(one.numbers, many.numbers)
                assert np.array_equal(one.distances, many.distances)
    torch.set_num_threads(1)
    for query, result in zip(queries, alone, strict=True):
        numbers, distances = measured(keys, query, k)
        assert result.numbers.tolist() == numbers
        assert np.array_equal(result.distances, distances)


def test_k_above_the_number_of_keys_returns_all() -> None:
    near = NearestKeys(clustered(5, 8))
    assert len(near.search(np.zeros((1, 8), np.float32), 50)[0].numbers) == 5
