"""Random settings of everything at once: the text of waiting for every search."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError
from ragspec.pipelines.iterative.rag import IterativeRag
from ragspec.retrievers.search.passage_index import PassageIndex
from tests.pipelines.iterative.test_rag import SAMPLINGS, WORDS, documents, engine
from tests.support.toy_embedder import make_embedder

FEW, MANY = 40, 1500


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return every kind of index and a bare function, some texts in them twice."""
    folder: Path = make_embedder(tmp_path_factory.mktemp("embedder"))
    pages = documents(24)
    exact = PassageIndex.build(pages, embedder=folder)
    instance: dict[str, Any] = {"exact": exact, "words": PassageIndex.build(pages, embedder=None)}
    try:
        import faiss  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        assert exact.dense is not None
        for kind in ("hnsw", "ivf"):
            instance[kind] = PassageIndex.build(pages, embedder=exact.dense.embedder, dense=kind)

    def function(query: str) -> list[tuple[str, float, dict[str, Any]]]:
        return [(hit.passage.text, hit.score, {}) for hit in instance["words"].search(query, 5)]

    instance["function"] = function
    return instance


def agree(indexes: dict[str, Any], cases: int, seed: int) -> Counter[str]:
    """Compare so many random answers with those of waiting; returns what happened."""
    sample = random.Random(seed)
    engines = [engine(drafter) for drafter in (None, "context", "auto")]
    known: Counter[str] = Counter()
    for case in range(cases):
        kind = sample.choice(sorted(indexes))
        options: dict[str, Any] = {
            "every": sample.choice((1, 2, 3, 5, 8)),
            "query_tokens": sample.choice((1, 5, 12, 32)),
            "flare": sample.choice((None, None, None, 0.3)),
        }
        if kind not in ("words", "function"):
            options["search"] = sample.choice(("dense", "sparse", "fused"))
        if sample.random() < 0.1:
            options |= {"rounds": sample.randint(1, 4), "flare": None}
        question = " ".join(sample.choices(WORDS, k=sample.randint(1, 6)))
        sampling = sample.choice(SAMPLINGS)
        inputs: dict[str, Any] = {
            "max_new_tokens": sample.randint(1, 30),
            "ignore_eos": sample.random() < 0.5,
            "refuse": False,
        }
        request = sample.choice(engines)
        off = IterativeRag(request, indexes[kind], speculate="off", **options)
        try:
            plain = off.ask(question, sampling, **inputs)
        except InputError as error:  # no word of it is in the documents
            assert "found nothing for the question" in str(error)
            known["none"] += 1
            continue
        if case % 4 == 0 and len(plain.text) > 9:
            inputs["stop"] = plain.text[5:9]
            plain = off.ask(question, sampling, **inputs)
        rag = IterativeRag(
            request,
            indexes[kind],
            speculate=sample.choice(("auto", 1, 2, 4, 9, 16)),
            overlap=sample.choice((None, False, True)),
            prefetch=sample.choice((1, 3, 20)),
            **options,
        )
        for _ in range(sample.choice((1, 2))):
            result = rag.ask(question, sampling, **inputs)
            assert result.generation.tokens == plain.generation.tokens, (case, kind, options)
            assert result.text == plain.text and result.passages == plain.passages
            assert result.generation.finish_reason == plain.generation.finish_reason
            message = result.report.retrieval
            assert message is not None
            known.update(hits=message.hits, wrong=message.rollbacks, wasted=message.wasted)
            known[kind] += 1
    return known


def test_some(indexes: dict[str, Any]) -> None:
    known = agree(indexes, FEW, seed=1)
    assert known["hits"] > 40 and known["wrong"] > 10 and known["wasted"] > 20


@pytest.mark.slow
def test_many(indexes: dict[str, Any]) -> None:
    known = agree(indexes, MANY, seed=2)
    assert known["hits"] > 1500 and known["wrong"] > 300
    assert min(known[kind] for kind in indexes) > 100 and known["none"] < MANY // 10
