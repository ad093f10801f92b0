"""What a user of `KnnLM` sees: streaming, interrupts, listeners, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, StoreError
from ragspec.pipelines import KnnLM
from ragspec.reports.generation import Generation
from ragspec.retrievers import Datastore
from ragspec.retrievers.knn.distributions import NeighbourCache
from ragspec.retrievers.knn.neighbours import Neighbours
from ragspec.sampling.settings import Sampling
from tests.support import tiny

TEXTS = [
    "the tree drafts a token and the target walks it",
    "a rule keeps what it can",
    "so it goes",
]


def engine(drafter: Any = None, **options: Any) -> Engine:
    return Engine(tiny.model(dtype=torch.float64), tiny.tokenizer(), drafter, **options)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    return Datastore.build(TEXTS * 3, engine(), tmp_path_factory.mktemp("knn") / "store")


@pytest.mark.parametrize("speculate", ["off", "auto", 3])
def test_chunks_are_the_text(store: Datastore, speculate: Any) -> None:
    lm = KnnLM(engine(), store, k=8, speculate=speculate)
    inputs: list[dict[str, Any]] = [{}, {"stop": ["e"]}]
    for options in inputs:
        chunks: list[str] = []
        result = lm.generate("the tree", max_new_tokens=40, stream=chunks.append, **options)
        assert "".join(chunks) == result.text
        assert result.text == lm.generate("the tree", max_new_tokens=40, **options).text
    assert len(chunks) > 0


@pytest.mark.parametrize(
    ("speculate", "after"), [("auto", 1), ("auto", 2), (4, 1), (4, 2), (4, 5), (4, 9)]
)
def test_an_interrupt_keeps_what_was_displayed(
    store: Datastore, speculate: Any, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = Neighbours(np.asarray([0]), np.zeros(1))  # so that guesses are wrong, and replaced
    monkeypatch.setattr(NeighbourCache, "nearest", lambda self, state, k: blind)
    lm, chunks = KnnLM(engine(), store, k=8, weight=0.95, speculate=speculate), list[str]()

    def take(piece: str) -> None:
        chunks.append(piece)
        if len(chunks) == after:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}
    result = lm.generate("the tree", stream=take, **options)
    whole = lm.generate("the tree", **options)
    assert result.finish_reason == result.report.finish_reason == "cancelled"
    assert 0 < len(result.tokens) < 60 and result.text.rstrip("\ufffd") == "".join(chunks)
    assert result.tokens == whole.tokens[: len(result.tokens)]
    assert whole.text.startswith(result.text[:-1])


def test_listeners_receive_the_text_that_stays(store: Datastore) -> None:
    request, heard = engine(), list[Generation]()
    request.on_finish(heard.append)
    lm = KnnLM(request, store, k=8, speculate=6)
    result = lm.generate("the tree", Sampling(temperature=1.5, seed=2), max_new_tokens=50)
    assert [each.tokens for each in heard] == [result.tokens]


def test_chat_messages_and_ids_are_prompts_too(store: Datastore) -> None:
    lm = KnnLM(engine(), store, k=8)
    ids = tiny.tokenizer()("the tree")["input_ids"]
    assert (
        lm.generate(ids, max_new_tokens=9).tokens
        == lm.generate("the tree", max_new_tokens=9).tokens
    )


def test_no_seed_draws_one_and_says_it(store: Datastore) -> None:
    lm = KnnLM(engine(), store, k=8)
    first = lm.generate("the tree", Sampling(temperature=1.0), max_new_tokens=20)
    again = lm.generate(
        "the tree", Sampling(temperature=1.0, seed=first.report.seed), max_new_tokens=20
    )
    assert first.tokens == again.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is 0; expected 1 to"),
        ({"k": 10**6}, "k is 1000000; expected 1 to"),
        ({"weight": 1.5}, "weight is 1.5"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"speculate": 99}, "speculate is 99"),
        ({"speculate": "on"}, "speculate is 'on'"),
    ],
)
def test_settings_outside_their_range_are_refused(
    store: Datastore, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        KnnLM(engine(), store, **options)


def test_what_it_cannot_serve_is_refused(store: Datastore) -> None:
    lm = KnnLM(engine(), store, k=8)
    with pytest.raises(InputError, match="got resume_from="):
        lm.generate("the tree", resume_from=[4])
    with pytest.raises(InputError, match="unknown option 'max_tokens'"):
        lm.generate("the tree", max_tokens=4)
    with pytest.raises(InputError, match="got 2 prompts"):
        lm.generate(["one", "two"])
    with pytest.raises(InputError, match="gives one text, got n=2"):
        lm.generate("the tree", Sampling(temperature=1.0, n=2))
    with pytest.raises(InputError, match="rule is 'typical'"):
        KnnLM(engine(rule="typical"), store)
    bare = KnnLM(Engine(tiny.model(dtype=torch.float64), None, None), store, k=8)
    with pytest.raises(InputError, match="no tokenizer"):
        bare.generate([4, 5], stream=print)


def test_a_datastore_of_another_model_is_refused(store: Datastore) -> None:
    with pytest.raises(StoreError, match="another model"):
        KnnLM(Engine(tiny.model(seed=5), tiny.tokenizer(), None), store)


def test_a_file_that_is_gone_is_said(store: Datastore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        Datastore.open(tmp_path / "nothing")
