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
    made: dict[str, Any] = {"exact": exact, "words": PassageIndex.build(pages, embedder=None)}
    try:
        import faiss  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        assert exact.dense is not None
        for kind in ("hnsw", "ivf"):
            made[kind] = PassageIndex.build(pages, embedder=exact.dense.embedder, dense=kind)

    def function(query: str) -> list[tuple[str, float, dict[str, Any]]]:
        return [(hit.passage.text, hit.score, {}) for hit in made["words"].search(query, 5)]

    made["function"] = function
    return made


def agree(indexes: dict[str, Any], cases: int, seed: int) -> Counter[str]:
    """Compare so many random answers with those of waiting; returns what happened."""
    drawn = random.Random(seed)
    engines = [engine(drafter) for drafter in (None, "context", "auto")]
    seen: Counter[str] = Counter()
    for case in range(cases):
        kind = drawn.choice(sorted(indexes))
        options: dict[str, Any] = {
            "every": drawn.choice((1, 2, 3, 5, 8)),
            "query_tokens": drawn.choice((1, 5, 12, 32)),
            "flare": drawn.choice((None, None, None, 0.3)),
        }
        if kind not in ("words", "function"):
            options["search"] = drawn.choice(("dense", "sparse", "fused"))
        if drawn.random() < 0.1:
            options |= {"rounds": drawn.randint(1, 4), "flare": None}
        question = " ".join(drawn.choices(WORDS, k=drawn.randint(1, 6)))
        sampling = drawn.choice(SAMPLINGS)
        given: dict[str, Any] = {
            "max_new_tokens": drawn.randint(1, 30),
            "ignore_eos": drawn.random() < 0.5,
            "refuse": False,
        }
        asked = drawn.choice(engines)
        off = IterativeRag(asked, indexes[kind], speculate="off", **options)
        try:
            plain = off.ask(question, sampling, **given)
        except InputError as error:  # no word of it is in the documents
            assert "found nothing for the question" in str(error)
            seen["none"] += 1
            continue
        if case % 4 == 0 and len(plain.text) > 9:
            given["stop"] = plain.text[5:9]
            plain = off.ask(question, sampling, **given)
        rag = IterativeRag(
            asked,
            indexes[kind],
            speculate=drawn.choice(("auto", 1, 2, 4, 9, 16)),
            overlap=drawn.choice((None, False, True)),
            prefetch=drawn.choice((1, 3, 20)),
            **options,
        )
        for _ in range(drawn.choice((1, 2))):
            found = rag.ask(question, sampling, **given)
            assert found.generation.tokens == plain.generation.tokens, (case, kind, options)
            assert found.text == plain.text and found.passages == plain.passages
            assert found.generation.finish_reason == plain.generation.finish_reason
            told = found.report.retrieval
            assert told is not None
            seen.update(hits=told.hits, wrong=told.rollbacks, wasted=told.wasted)
            seen[kind] += 1
    return seen


def test_some(indexes: dict[str, Any]) -> None:
    seen = agree(indexes, FEW, seed=1)
    assert seen["hits"] > 40 and seen["wrong"] > 10 and seen["wasted"] > 20


@pytest.mark.slow
def test_many(indexes: dict[str, Any]) -> None:
    seen = agree(indexes, MANY, seed=2)
    assert seen["hits"] > 1500 and seen["wrong"] > 300
    assert min(seen[kind] for kind in indexes) > 100 and seen["none"] < MANY // 10
