"""Iterative RAG: the text of searching every time, at every setting of speculation."""

import math
import random
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragspec import Engine, Sampling
from ragspec.errors import InputError, PromptTooLongError, pluralize
from ragspec.pipelines import Answer, IterativeRag, IterativeSearch
from ragspec.pipelines.answering.prompt import passage_first
from ragspec.retrievers import Document, Hit, PassageIndex, as_retriever
from ragspec.retrievers.speculation.passages import RetrieverSearcher
from ragspec.sampling.stopping import EndRepetition
from tests.support import tiny
from tests.support.calls import failing
from tests.support.toy_embedder import make_embedder

REQUESTS = ("walk", "tree", "token", "draft", "target", "rule")
WORDS = [*REQUESTS, *(f"{a}{b}" for a in "bdfglmnprst" for b in ("an", "or", "el", "ig", "um"))]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=8),
    Sampling(presence_penalty=0.5, no_repeat_ngram_size=4),
]


def words() -> Any:
    """Return a tokenizer of whole words, so that random text shares some with the documents."""
    vocabulary = {word: i for i, word in enumerate([*WORDS, "[unk]"])}
    vocabulary |= {f"z{i}": i for i in range(len(vocabulary), tiny.VOCAB - 1)}
    vocabulary[tiny.EOS] = tiny.VOCAB - 1
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tiny.EOS)


def documents(count: int = 14, twice: bool = True) -> list[Document]:
    """Return short documents of few words, some of them twice."""
    sample = random.Random(2)
    texts = [" ".join(sample.choices(WORDS, k=25)) + "." for _ in range(count)]
    if twice:
        texts[5], texts[9] = texts[1], texts[1]
    return [Document(f"d{i}.txt", f"d{i}", text) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PassageIndex:
    folder = make_embedder(tmp_path_factory.mktemp("embedder"))
    return PassageIndex.build(documents(), embedder=folder)


def engine(drafter: Any = "auto", **model: Any) -> Engine:
    return Engine(tiny.model(dtype=torch.float64, **model), words(), drafter)


def iterative(request: Engine, retriever: Any, **settings: Any) -> IterativeRag:
    return IterativeRag(request, retriever, IterativeSearch(**settings))


def searches(answer: Answer) -> Any:
    """Return the figures of the searches of an answer."""
    return answer.report.retrieval


QUESTION = "walk tree token target"


def test_strides_equal_those_of_plain_calls(index: PassageIndex) -> None:
    """Compare with plain calls that search before every stride."""
    request, sampling = engine(None), Sampling(temperature=0.9, seed=3)
    rag = iterative(request, index, stride=3, search="sparse", query_tokens=9)
    result = rag.ask(QUESTION, sampling, max_new_tokens=17, refuse=False)
    tokenizer, tokens, places = request.tokenizer, list[int](), list[int]()
    words = tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    hits: list[Hit] = []
    while len(tokens) < 17:
        query = tokenizer.decode([*words, *tokens][-9:], skip_special_tokens=True)
        hits = index.search(query, 1, "sparse") or hits
        places.append(hits[0].passage.document)
        text = f"Context:\n[1] {hits[0].passage.title}\n{hits[0].passage.text}"
        rest = f"\n\nQuestion: {QUESTION}\nEvidence:"
        prompt = [*tokenizer(text)["input_ids"]]
        prompt += tokenizer(rest, add_special_tokens=False)["input_ids"]
        tokens = request.generate(
            prompt, sampling, resume_from=tokens, stop_after=3, max_new_tokens=17
        ).tokens
    assert result.generation.tokens == tokens
    assert [hit.passage.document for hit in result.passages] == places


@pytest.mark.parametrize("sampling", SAMPLINGS[:2])
def test_flare_searches_only_at_improbable_tokens(index: PassageIndex, sampling: Sampling) -> None:
    request = engine()
    options: dict[str, Any] = {"stride": 2, "search": "dense", "query_tokens": 8}
    inputs: dict[str, Any] = {"max_new_tokens": 40, "refuse": False, "ignore_eos": True}
    probed = iterative(request, index, speculate="off", flare=1.0, **options)
    result = probed.ask(QUESTION, sampling, **inputs).generation.logprobs
    assert result is not None
    middle = sorted(math.exp(token.logprob) for token in result)[len(result) // 3]
    texts, queries = [], []
    for speculate, overlap in (("off", None), ("auto", None), (4, True)):
        settings: Any = {"speculate": speculate, "overlap": overlap, "flare": middle, **options}
        answer = iterative(request, index, **settings).ask(QUESTION, sampling, **inputs)
        texts.append(answer.generation.tokens)
        queries.append(searches(answer).queries)
    assert texts[0] == texts[1] == texts[2]
    assert 1 < queries[0] < 20
    every = iterative(request, index, speculate="off", **options).ask(QUESTION, sampling, **inputs)
    assert searches(every).queries == 20


def test_the_report_has_the_searches_and_the_stream_the_final_text(index: PassageIndex) -> None:
    rag = iterative(engine().with_drafter("auto", 4), index, speculate=3, search="sparse")
    chunks: list[str] = []
    result = rag.ask(QUESTION, max_new_tokens=30, stream=chunks.append, refuse=False, stop=None)
    assert isinstance(result, Answer)
    assert "".join(chunks) == result.text
    message = searches(result)
    assert len(result.passages) == message.strides
    assert result.report.tokens == len(result.generation.tokens) <= 30
    assert sum(len(s.tokens) for s in result.generation.steps) == result.report.tokens
    assert message.queries >= message.calls > 0
    named = {int(each) for step in result.generation.steps for each in step.tree.origin[:, 0]}
    assert len(named - {-1}) > 1
    assert max(named) < len(result.passages)
    assert {event.what for event in message.events} >= {"write", "search", "guess"}
    assert result.to_dict()["report"]["retrieval"]["strides"] == message.strides
    assert result.report.from_dict(result.report.to_dict()).retrieval == message
    assert result.report.milliseconds["retrieve"] > 0
    line = f"Looked up {pluralize(message.queries, 'query')} in "
    line += f"{pluralize(message.calls, 'search')} over {pluralize(message.strides, 'stride')}"
    assert line in result.report.summary()
    line = f"{message.hits} of {message.hits + message.rollbacks} guesses right"
    assert line in result.report.summary()


def test_a_function_is_searched_in_several_threads() -> None:
    pages = documents(twice=False)
    requests, running, together = list[str](), list[str](), list[int]()

    def search(query: str) -> list[tuple[str, float, dict[str, Any]]]:
        requests.append(query)
        running.append(query)
        together.append(len(running))
        time.sleep(0.002)
        running.remove(query)
        words = query.split()
        ranked = sorted(pages, key=lambda page: -sum(page.text.count(word) for word in words))
        return [(page.text, 1.0, {"name": page.name}) for page in ranked[:5]]

    texts = []
    for speculate in ("off", "auto", 6, 16):
        requests.clear()
        rag = iterative(engine(), search, speculate=speculate, query_tokens=12, stride=2)
        result = rag.ask(QUESTION, max_new_tokens=40, ignore_eos=True)
        texts.append(result.generation.tokens)
        assert searches(result).queries == len(requests)
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert 4 < max(together) <= 9  # the repeated query runs beside eight


def test_a_prefetched_passage_without_a_name_serves_as_a_guess() -> None:
    pages, counts = documents(twice=False), []
    for named in (True, False):
        requests: list[tuple[str, int]] = []

        def search(query: str, k: int) -> Any:
            requests.append((query, k))  # noqa: B023
            ranked = sorted(pages, key=lambda page: -sum(map(page.text.count, query.split())))
            names = [f"d{pages.index(page)}" if named else "" for page in ranked]  # noqa: B023
            meta = [{"title": "words", "name": name} for name in names]
            return [(page.text, 1.0, each) for page, each in zip(ranked, meta, strict=True)][:k]

        rag = iterative(engine(), search, speculate=4, query_tokens=12)
        message = searches(rag.ask(QUESTION, max_new_tokens=40, ignore_eos=True))
        assert message.queries == len(requests)
        assert requests[0] == (QUESTION, 20) and sum(k == 20 for _, k in requests) > 4
        counts.append((message.hits, message.rollbacks, message.queries))
    assert counts[0] == counts[1] and counts[0][0] > 1


def test_a_guess_is_the_best_of_the_known_passages() -> None:
    results: Any = [(page.text, 1.0, {}) for page in documents(6, twice=False)]
    searcher = RetrieverSearcher[Any](as_retriever(lambda query: results), lambda before: None)
    known = searcher.search(["any"], 6)[0]
    query = known[4].hit.passage.text
    assert searcher.guess(query, known[:2]) in known[:2]
    assert searcher.guess(query, known) == known[4]


@pytest.mark.parametrize("changes", ["rank", "k", "never"])
def test_changing_search_results_make_the_label_approximate(changes: str) -> None:
    pages, calls = documents(twice=False), list[int]()

    def search(query: str, k: int) -> Any:
        calls.append(k)
        first = {"rank": len(calls), "k": k, "never": 0}[changes]
        return [(page.text, 1.0, {}) for page in pages[first % 7 :]][:k]

    rag = iterative(engine(), search, speculate=4)
    for _ in range(3):
        calls.clear()
        result = rag.ask(QUESTION, max_new_tokens=40, ignore_eos=True)
        message = searches(result)
        assert message.queries == len(calls)
        assert (message.changed == 0) == (changes == "never")
        label = "exact" if changes == "never" else "approximate"
        assert result.label == result.report.label == label
        assert ("Repeated queries had other" in message.summary()) == (changes != "never")


@pytest.mark.parametrize("first", [1, 3])
def test_errors_of_the_retriever_are_raised(first: int) -> None:
    results = [(page.text, 1.0, dict[str, Any]()) for page in documents()[:2]]
    error = ConnectionError("the service is away")
    broken = failing(error, range(first, 99), lambda query: results)
    with pytest.raises(ConnectionError, match="the service is away"):
        iterative(engine(), broken).ask(QUESTION, max_new_tokens=30, ignore_eos=True)


def test_an_empty_search_does_not_change_the_passage() -> None:
    def search(query: str) -> list[tuple[str, float, dict[str, Any]]]:
        return [(documents()[0].text, 1.0, {})] if query == QUESTION else []

    inputs: Any = {"max_new_tokens": 20, "ignore_eos": True}
    off, ahead = (
        iterative(engine(), search, speculate=speculate).ask(QUESTION, **inputs)
        for speculate in ("off", 4)
    )
    assert off.text == ahead.text
    assert {hit.passage.text for hit in ahead.passages} == {documents()[0].text}
    with pytest.raises(InputError, match="found nothing for the question"):
        iterative(engine(), lambda query: []).ask(QUESTION)


def test_titles_that_depend_on_the_query_are_those_without_speculation() -> None:
    pages = documents(2, twice=False)

    def search(query: str, k: int) -> Any:
        is_first = query == QUESTION
        ranked = pages[::-1] if is_first else pages
        title = "tree draft token" if is_first else "token"
        return [(page.text, 1.0, {"name": page.name, "title": title}) for page in ranked][:k]

    for seed in range(4):
        answers = [
            iterative(engine(), search, speculate=speculate, stride=2).ask(
                QUESTION, Sampling(temperature=1.0, seed=seed), max_new_tokens=24, ignore_eos=True
            )
            for speculate in ("off", 4)
        ]
        assert answers[0].text == answers[1].text
        titles = [[hit.passage.title for hit in answer.passages] for answer in answers]
        assert titles[0] == titles[1]


def test_an_interrupt_ends_the_answer_with_the_streamed_text(index: PassageIndex) -> None:
    rag = iterative(engine(), index, speculate=3, search="sparse", overlap=False)
    whole = rag.ask(QUESTION, max_new_tokens=40, ignore_eos=True, refuse=False)
    show = failing(KeyboardInterrupt, (3,))
    result = rag.ask(QUESTION, max_new_tokens=40, ignore_eos=True, stream=show, refuse=False)
    assert 0 < len(result.generation.tokens) < 40
    assert whole.text.startswith(result.text)
    assert result.generation.finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stride": 0}, "stride is 0; expected a whole number, at least 1"),
        *(({"flare": n}, f"{n!r}; expected a probability above 0") for n in (0.0, "x", True)),
        *(({"speculate": n}, "'auto', 'off', or a number from 1 to 16") for n in ("on", 17)),
        ({"overlap": "x"}, "overlap is 'x'; expected True, False, or None"),
        ({"rounds": 0}, "rounds is 0"),
        ({"query_tokens": 2.5}, "query_tokens is 2.5"),
        ({"rounds": 2, "flare": 0.5}, "rounds and flare"),
        ({"search": "deep"}, "search is 'deep'; expected one of dense, sparse, fused"),
    ],
)
def test_bad_settings_are_refused(
    index: PassageIndex, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        iterative(engine(), index, **options)


def test_unsupported_searches_and_options_are_refused(index: PassageIndex) -> None:
    by_words = PassageIndex.build(documents(), embedder=None)
    with pytest.raises(InputError, match="no dense part"):
        iterative(engine(), by_words, search="dense")
    with pytest.raises(InputError, match="search='dense' with a FunctionRetriever"):
        iterative(engine(), lambda query: [], search="dense")
    with pytest.raises(InputError, match="no tokenizer"):
        iterative(Engine(tiny.model(), None), index)
    rag: Any = iterative(engine(), index)
    with pytest.raises(InputError, match="expected an IterativeSearch"):
        IterativeRag(engine(), index, {"stride": 3})  # type: ignore[arg-type]
    for name, expected in (("max_tokens", "unknown option"), ("stop_after", "IterativeRag sets")):
        with pytest.raises(InputError, match=expected):
            rag.ask(QUESTION, **{name: 3})
    long = [Document("long.txt", "long", " ".join(WORDS * 400))]
    whole = PassageIndex.build(long, embedder=None, words=5000)
    small = engine(max_position_embeddings=256)
    with pytest.raises(PromptTooLongError):
        iterative(small, whole).ask("walk the tree token", max_new_tokens=40)


def test_a_question_outside_the_documents_is_refused(index: PassageIndex) -> None:
    result = iterative(engine(), index).ask("zebra quagga okapi?")
    assert result.refused is not None
    assert result.generation.finish_reason == "refused"


def test_a_dense_index_is_searched_for_the_strides_alone(
    index: PassageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert index.dense is not None
    dense = PassageIndex.build(documents(), embedder=index.dense.embedder, sparse=False)
    assert dense.dense is not None
    search = Mock(wraps=dense.dense.search_vectors)
    monkeypatch.setattr(dense.dense, "search_vectors", search)
    result = iterative(engine(), dense, speculate="off").ask(QUESTION, max_new_tokens=12)
    assert search.call_count == searches(result).calls > 1


def in_rounds(
    request: Engine, index: PassageIndex, rounds: int, sampling: Sampling
) -> tuple[list[int], list[int]]:
    """Return the tokens of the last of some rounds, each after a search, and their passages."""
    rag = iterative(request, index, speculate="off", stride=200)
    query, places, tokens = QUESTION, [], list[int]()
    for _ in range(rounds):
        hit = index.search(query, 1)[0]
        places.append(hit.passage.document)
        ids = list(passage_first(request.tokenizer, QUESTION, hit, rag.template).token_ids)
        ends: Any = {"stop": rag.template.stop, "stopping_criteria": [EndRepetition(len(ids))]}
        result = request.generate(ids, sampling, max_new_tokens=30, **ends)
        tokens, query = result.tokens, f"{QUESTION} {result.text}"
    return tokens, places


@pytest.mark.parametrize("sampling", SAMPLINGS[:3])
@pytest.mark.parametrize("drafter", [None, "auto"])
def test_rounds_write_whole_answers_over_new_searches(
    index: PassageIndex, drafter: Any, sampling: Sampling
) -> None:
    request = engine(drafter)
    known = set()
    for rounds in (1, 2, 3):
        tokens, places = in_rounds(request, index, rounds, sampling)
        known.add(tuple(places))
        for speculate in ("off", "auto", 3):
            rag, chunks = iterative(request, index, rounds=rounds, speculate=speculate), list[str]()
            inputs: Any = {"max_new_tokens": 30, "refuse": False, "stream": chunks.append}
            result = rag.ask(QUESTION, sampling, **inputs)
            assert result.generation.tokens == tokens
            assert [hit.passage.document for hit in result.passages] == places
            assert "".join(chunks) == result.text
            assert result.report.tokens == len(tokens)
            assert [t for s in result.generation.steps for t in s.tokens] == tokens
    assert len(known) == 3


def test_a_round_over_a_known_passage_reuses_its_answer() -> None:
    only = PassageIndex.build(documents(1, twice=False), embedder=None)
    result = iterative(engine(), only, rounds=4).ask(QUESTION, max_new_tokens=20, refuse=False)
    assert len(result.passages) == 4
    assert result.report.prefill_forwards == 1
    assert result.report.forwards < 20


def test_callbacks_receive_the_final_answer_alone(index: PassageIndex) -> None:
    request, finished = engine(), list[Any]()
    request.on_finish(finished.append)
    for options in ({"speculate": 8}, {"rounds": 3}):
        finished.clear()
        rag = iterative(request, index, **options)
        result = rag.ask(QUESTION, SAMPLINGS[1], max_new_tokens=30, refuse=False)
        assert [each.tokens for each in finished] == [result.generation.tokens]


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return every kind of index and a bare function, some texts in them twice."""
    folder: Path = make_embedder(tmp_path_factory.mktemp("embedder"))
    pages = documents(24)
    exact = PassageIndex.build(pages, embedder=folder)
    instance: dict[str, Any] = {"exact": exact, "words": PassageIndex.build(pages, embedder=None)}
    if find_spec("faiss"):
        assert exact.dense is not None
        embedder = exact.dense.embedder
        instance["hnsw"] = PassageIndex.build(pages, embedder=embedder, dense="hnsw")

    def function(query: str) -> list[tuple[str, float, dict[str, Any]]]:
        return [(hit.passage.text, hit.score, {}) for hit in instance["words"].search(query, 5)]

    instance["function"] = function
    return instance


@pytest.mark.parametrize(
    ("cases", "seed", "hits", "wrong"),
    [(40, 1, 40, 10), pytest.param(1500, 2, 1500, 300, marks=pytest.mark.slow)],
)
def test_random_answers_equal_those_without_speculation(
    indexes: dict[str, Any], cases: int, seed: int, hits: int, wrong: int
) -> None:
    sample = random.Random(seed)
    engines = [engine(drafter) for drafter in (None, "context", "auto")]
    known: Counter[str] = Counter()
    for case in range(cases):
        kind = sample.choice(sorted(indexes))
        options: dict[str, Any] = {
            "stride": sample.choice((1, 2, 3, 5, 8)),
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
        off = iterative(request, indexes[kind], speculate="off", **options)
        try:
            plain = off.ask(question, sampling, **inputs)
        except InputError as error:  # no word of it is in the documents
            assert "found nothing for the question" in str(error)
            known["none"] += 1
            continue
        if case % 4 == 0 and len(plain.text) > 9:
            inputs["stop"] = plain.text[5:9]
            plain = off.ask(question, sampling, **inputs)
        rag = iterative(
            request,
            indexes[kind],
            speculate=sample.choice(("auto", 1, 2, 4, 9, 16)),
            overlap=sample.choice((None, False, True)),
            prefetch=sample.choice((1, 3, 20)),
            **options,
        )
        for _ in range(sample.choice((1, 2))):
            result = rag.ask(question, sampling, **inputs)
            assert result.generation.tokens == plain.generation.tokens, f"case {case}: {options}"
            assert result.passages == plain.passages, f"case {case}: {options}"
            assert result.text == plain.text
            assert result.generation.finish_reason == plain.generation.finish_reason
            message = searches(result)
            known.update(hits=message.hits, wrong=message.rollbacks, wasted=message.wasted)
            known[kind] += 1
    assert known["hits"] > hits and known["wrong"] > wrong and known["wasted"] > 20
    assert min(known[kind] for kind in indexes) > cases // 15 and known["none"] < cases // 10
