"""kNN text equals a naive mixture with and without guesses; streams, interrupts and errors."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec import Engine, Generation, Sampling
from ragspec.errors import InputError, StoreError
from ragspec.pipelines.knn import knn_lm
from ragspec.pipelines.knn.knn_lm import KnnLM
from ragspec.retrievers.knn.datastore import Datastore, Neighbours
from ragspec.retrievers.knn.distributions import NeighbourCache
from ragspec.retrievers.speculation import os3
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.processors import build_processors
from tests.support import tiny
from tests.support.calls import StatefulProcessor

TEXTS = [
    "the tree drafts a token and the target walks it",
    "a rule keeps what it can",
    "so it goes",
]

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.2, top_k=20, min_p=0.01, min_new_tokens=9, seed=2),
    Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=8),
    Sampling(presence_penalty=0.6, no_repeat_ngram_size=3),
]


def engine(drafter: Any = None, **options: Any) -> Engine:
    return Engine(tiny.model(dtype=torch.float64), tiny.tokenizer(), drafter, budget=8, **options)


def to_length(tokens: int) -> dict[str, Any]:
    """Return the options of a text of exactly so many tokens."""
    return {"max_new_tokens": tokens, "ignore_eos": True}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    """Return a datastore of the model's texts, two of them twice, so that neighbours are close."""
    model, texts = engine(), list[list[int]]()
    for i in range(10):
        sampling = Sampling(temperature=0.8, seed=i)
        texts.append(model.generate(tiny.prompt(9, seed=i), sampling, **to_length(60)).tokens)
    path = tmp_path_factory.mktemp("knn") / "store"
    return Datastore.build([*texts, texts[2], texts[5]], model, path)


def naive(
    store: Datastore, lm: KnnLM, prompt: list[int], sampling: Sampling, new: int
) -> list[int]:
    """Return the tokens of the mixture, by full forwards of transformers and all distances."""
    model, tokens = tiny.model(dtype=torch.float64), list(prompt)
    keys = np.asarray(store.keys, np.float64)
    noise = NoiseStream(sampling.seed_of(0) or 0, 0)
    processors = build_processors(sampling, len(prompt), [tiny.VOCAB - 1])
    distribution = TokenDistribution(sampling, noise, len(prompt), processors)
    for index in range(new):
        with torch.no_grad():
            result = model(torch.tensor([tokens]), output_hidden_states=True)
        state = result.hidden_states[-1][0, -1].float().double().numpy()
        distances = ((keys - state) ** 2).sum(axis=1)
        order = np.lexsort((np.arange(len(keys)), distances))[: lm.knn.k]
        weights = np.exp(-(distances[order] - distances[order[0]]) / lm.knn.temperature)
        near = np.bincount(store.values[order], weights / weights.sum(), tiny.VOCAB)
        current = result.logits[0, -1].double().softmax(-1)
        mixed = (1 - lm.knn.weight) * current + lm.knn.weight * torch.from_numpy(near)
        scores = distribution.process(mixed.log()[None], tokens, [[]])
        tokens.append(int(distribution.select(scores, [index])))
        if tokens[-1] == tiny.VOCAB - 1:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", [None, "auto"])
def test_the_text_equals_that_of_a_naive_mixture(
    store: Datastore, drafter: Any, sampling: Sampling
) -> None:
    for k, weight in ((1, 0.3), (8, 0.5), (40, 0.9)):
        prompt = tiny.prompt(7, seed=k)
        lm = KnnLM(engine(drafter), store, k=k, weight=weight, speculate="off")
        result = lm.generate(prompt, sampling, max_new_tokens=20)
        assert result.tokens == naive(store, lm, prompt, sampling, 20)
        assert result.label == result.report.label == "exact-for(knn)"


@pytest.mark.parametrize("cases", [40, pytest.param(1500, marks=pytest.mark.slow)])
def test_speculation_does_not_change_the_text(store: Datastore, cases: int) -> None:
    sample, engines = random.Random(5), {name: engine(name) for name in (None, "context", "auto")}
    hits = wasted = 0
    for case in range(cases):
        sampling = sample.choice(SAMPLINGS)
        prompt = tiny.prompt(sample.randint(1, 24), seed=case)
        request = engines[sample.choice((None, "context", "auto"))]
        settings: dict[str, Any] = {
            "k": sample.choice((1, 2, 16, 64, len(store))),
            "weight": sample.choice((0.0, 0.25, 0.6, 1.0)),
            "temperature": sample.choice((None, 1.0, 50.0)),
        }
        options: dict[str, Any] = {
            "max_new_tokens": sample.randint(1, 40),
            "ignore_eos": sample.random() < 0.5,
            "logprobs": sample.choice((None, 0, 3)),
        }
        off = KnnLM(request, store, speculate="off", **settings)
        whole = off.generate(prompt, sampling, **options)
        if case % 3 == 0 and len(whole.tokens) > 6:
            options["stop"] = request.tokenizer.decode(whole.tokens[4:6]) or None
            whole = off.generate(prompt, sampling, **options)
        lm = KnnLM(request, store, speculate=sample.choice(("auto", 1, 2, 5, 16)), **settings)
        for _ in range(2):  # the second time with the learned schedule
            result = lm.generate(prompt, sampling, **options)
            assert result.tokens == whole.tokens and result.text == whole.text
            assert result.finish_reason == whole.finish_reason
            assert [t for step in result.steps for t in step.tokens] == whole.tokens
            assert (result.logprobs is None) == (whole.logprobs is None)
            for one, other in zip(result.logprobs or (), whole.logprobs or (), strict=True):
                assert one.token == other.token and abs(one.logprob - other.logprob) < 1e-9
                assert [t for t, _ in one.top] == [t for t, _ in other.top]
            message = result.report.retrieval
            assert message is not None and message.strides == len(whole.tokens)
            assert result.report.tokens == len(whole.tokens)
            hits, wasted = hits + message.hits, wasted + message.wasted
    assert hits > 2 * cases and wasted > 2 * cases  # many right and wrong guesses


class Oracle(NeighbourCache):
    """A cache whose neighbours are always right, or always wrong."""

    knows = True

    def nearest(self, state: Any, k: int) -> Neighbours:
        result = self._store.near.search(state[None], k)[0]
        return result if self.knows else Neighbours(np.asarray([0]), np.zeros(1))


@pytest.mark.parametrize("knows", [True, False])
def test_right_and_wrong_guesses_do_not_change_the_text(
    store: Datastore, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Oracle, "knows", knows)
    monkeypatch.setattr(knn_lm, "NeighbourCache", Oracle)
    guessed = 0
    for sampling in SAMPLINGS:
        settings: dict[str, Any] = {"k": 16, "weight": 0.95, "temperature": 40.0}
        off = KnnLM(engine(), store, speculate="off", **settings)
        whole = off.generate(tiny.prompt(), sampling, **to_length(30))
        lm = KnnLM(engine(), store, speculate=5, **settings)
        result = lm.generate(tiny.prompt(), sampling, **to_length(30))
        assert result.tokens == whole.tokens
        message = result.report.retrieval
        assert message is not None
        if message.gated == message.rounds:  # a stateful processor, which is called once a token
            continue
        guessed += 1
        if knows:
            assert message.rollbacks == 0 and message.hits == 29 and message.calls == 1 + 6
        else:
            assert message.rollbacks > 10
    assert guessed >= 3


def test_a_stateful_processor_is_called_once_for_each_token(store: Datastore) -> None:
    texts, prompt, inputs = list[list[int]](), tiny.prompt(), list[Any](("off", "auto", 4))
    for speculate in inputs:
        lm, processor = KnnLM(engine("auto"), store, speculate=speculate), StatefulProcessor()
        result = lm.generate(prompt, logits_processor=[processor], **to_length(25))
        texts.append(result.tokens)
        lengths = [len(ids) for (ids,) in processor.calls]
        assert lengths == list(range(len(prompt), len(prompt) + 25))
    assert texts[0] == texts[1] == texts[2]


def test_tokens_wait_for_searches_if_guessing_does_not_pay(store: Datastore) -> None:
    lm = KnnLM(engine(), store)
    for _ in range(2):
        result = lm.generate(tiny.prompt(), **to_length(40))
    message = result.report.retrieval
    assert message is not None and message.gated > 0
    assert message.queries < 80


def test_waiting_rounds_still_measure_the_guesses(
    store: Datastore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knn_lm, "WAITED", 2)
    lm = KnnLM(engine(), store)
    monkeypatch.setattr(os3, "LEAST_GAIN", float("inf"))
    lm.generate(tiny.prompt(), **to_length(60))
    assert lm.schedule.guesses > 0


def test_logprobs_true_returns_no_alternatives(small: Datastore) -> None:
    result = KnnLM(engine(), small, k=8, speculate=4).generate("the", logprobs=True)
    assert result.logprobs and not any(token.top for token in result.logprobs)
    assert result.report.retrieval is not None and result.report.retrieval.hits


def test_a_prediction_is_accepted_in_knn_text(store: Datastore) -> None:
    lm = KnnLM(engine("context"), store, weight=1.0, k=1, speculate="off")
    plain = lm.generate(tiny.prompt(), **to_length(30))
    result = lm.generate(tiny.prompt(), prediction=plain.tokens, **to_length(30))
    assert result.tokens == plain.tokens
    assert result.report.accepted_prediction_tokens > 15


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Datastore:
    return Datastore.build(TEXTS * 3, engine(), tmp_path_factory.mktemp("knn") / "store")


@pytest.mark.parametrize("speculate", ["off", "auto", 3])
def test_streamed_chunks_join_to_the_text(small: Datastore, speculate: Any) -> None:
    lm = KnnLM(engine(), small, k=8, speculate=speculate)
    whole = lm.generate("the tree", max_new_tokens=40).text
    for stop in (None, whole[5:7]):
        text, chunks = whole.partition(stop)[0] if stop else whole, list[str]()
        result = lm.generate("the tree", max_new_tokens=40, stream=chunks.append, stop=stop)
        assert "".join(chunks) == result.text == text
        assert len(chunks) > 1


@pytest.mark.parametrize(
    ("speculate", "after"), [("auto", 1), ("auto", 2), (4, 1), (4, 2), (4, 5), (4, 9)]
)
def test_an_interrupt_returns_the_streamed_text(
    small: Datastore, speculate: Any, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = Neighbours(np.asarray([0]), np.zeros(1))  # so that guesses are wrong, and replaced
    monkeypatch.setattr(NeighbourCache, "nearest", lambda self, state, k: blind)
    lm, chunks = KnnLM(engine(), small, k=8, weight=0.95, speculate=speculate), list[str]()

    def take(piece: str) -> None:
        chunks.append(piece)
        if len(chunks) == after:
            raise KeyboardInterrupt

    result = lm.generate("the tree", stream=take, **to_length(60))
    whole = lm.generate("the tree", **to_length(60))
    assert result.finish_reason == result.report.finish_reason == "cancelled"
    assert 0 < len(result.tokens) < 60 and result.text.rstrip("\ufffd") == "".join(chunks)
    assert result.tokens == whole.tokens[: len(result.tokens)]
    assert whole.text.startswith(result.text[:-1])


def test_on_finish_receives_the_final_text(small: Datastore) -> None:
    base, finished = engine(), list[Generation]()
    base.on_finish(finished.append)
    lm = KnnLM(base, small, k=8, speculate=6)
    result = lm.generate("the tree", Sampling(temperature=1.5, seed=2), max_new_tokens=50)
    assert [each.tokens for each in finished] == [result.tokens]


def test_a_missing_seed_is_chosen_and_reported(small: Datastore) -> None:
    lm = KnnLM(engine(), small, k=8)
    first = lm.generate("the tree", Sampling(temperature=1.0), max_new_tokens=20)
    sampling = Sampling(temperature=1.0, seed=first.report.seed)
    assert lm.generate("the tree", sampling, max_new_tokens=20).tokens == first.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k is 0; expected 1 to"),
        ({"k": 10**6}, "k is 1000000; expected 1 to"),
        *(({"k": k}, f"k is {k!r}; expected 1 to") for k in ("8", None, 2.5, True)),
        *(({"weight": x}, f"weight is {x!r}; expected 0 to 1") for x in (1.5, "a", None, True)),
        *(({"temperature": t}, f"temperature is {t!r}; expected above 0") for t in (0.0, "x")),
        ({"engine": "starter"}, "got 'starter' as the engine; expected an Engine"),
        ({"store": "x"}, "got 'x' as the store; expected a Datastore"),
        ({"speculate": 99}, "speculate is 99"),
        ({"speculate": "on"}, "speculate is 'on'"),
    ],
)
def test_wrong_settings_of_knn_are_refused(
    small: Datastore, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        KnnLM(**{"engine": engine(), "store": small, **options})


def test_the_default_temperature_is_a_share_of_variance(small: Datastore, tmp_path: Path) -> None:
    keys = np.asarray(small.keys, np.float64)
    expected = np.square(keys - keys.mean(0)).sum(1).mean() / 15
    assert KnnLM(engine(), small, k=8).knn.temperature == float(f"{expected:.3g}")
    single = Datastore.build([[4, 5]], engine(), tmp_path / "single")  # a variance of 0
    assert KnnLM(engine(), single, k=1).knn.temperature == 1.0


def test_unsupported_prompts_options_and_engines_are_refused(small: Datastore) -> None:
    lm: Any = KnnLM(engine(), small, k=8)
    bare = KnnLM(Engine(tiny.model(dtype=torch.float64), None, None), small, k=8)
    for call, message in (
        (partial(lm.generate, "the tree", resume_from=[4]), "got resume_from="),
        (partial(lm.generate, "the tree", max_tokens=4), "unknown option 'max_tokens'"),
        (partial(lm.generate, ["one", "two"]), "got 2 prompts"),
        (partial(lm.generate, "the", Sampling(temperature=1.0, n=2)), "gives one text, got n=2"),
        (partial(lm.generate, "the", {"temperature": 1}), "expected a Sampling"),
        (partial(lm.generate, "the", stream=3), "stream is 3; expected a function"),
        (partial(KnnLM, engine(rule="typical"), small), "rule is 'typical'"),
        (partial(bare.generate, [4, 5], stream=print), "no tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_a_datastore_of_another_model_is_refused(small: Datastore) -> None:
    with pytest.raises(StoreError, match="another model"):
        KnnLM(Engine(tiny.model(seed=5), tiny.tokenizer(), None), small)
