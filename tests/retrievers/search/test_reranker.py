"""Reranking in Python and on the command line, and models that are no cross-encoders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, ModelError
from ragspec.pipelines.answering.iterative import IterativeRag, IterativeSearch
from ragspec.pipelines.cli.app import main
from ragspec.retrievers.search.dense import DenseIndex, load_embedder
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.reranker import RERANKED, CrossEncoder
from tests.support import tiny

QUERY = "what do tokens of a tree follow?"
TEXTS = [f"Tokens of a tree follow a path {'of nodes ' * n}to leaf {n}." for n in range(40)]


@pytest.fixture
def index() -> PassageIndex:
    documents = [Document(f"{n}.txt", f"{n}", text) for n, text in enumerate(TEXTS)]
    return PassageIndex.build(documents, embedder=None)


def save_classifier(folder: Path, labels: int = 1) -> str:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 32)
    config = BertConfig(vocab_size=320, num_hidden_layers=1, num_attention_heads=2, **sizes)
    config.num_labels, config.pad_token_id = labels, 0
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer = tiny.bpe_tokenizer()
    tokenizer.add_special_tokens({"pad_token": tokenizer.convert_ids_to_tokens(0)})
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_first_hits_are_ordered_by_the_model(index: PassageIndex, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = save_classifier(tmp_path)
    before = index.search(QUERY, 40)
    model = sentence_transformers.CrossEncoder(folder, local_files_only=True)
    scores = model.predict([(QUERY, hit.passage.text) for hit in before[:RERANKED]]).tolist()
    expected = sorted(zip(scores, before, strict=False), key=lambda pair: -pair[0])
    index.reranker = CrossEncoder(folder)
    hits = index.search(QUERY, 5)
    assert [hit.passage for hit in hits] == [hit.passage for _, hit in expected[:5]]
    assert [hit.passage for hit in hits] != [hit.passage for hit in before[:5]]
    assert [hit.score for hit in hits] == pytest.approx([s for s, _ in expected[:5]], abs=1e-6)
    assert len(index.search(QUERY, 40)) == 40


def test_a_question_is_answered_over_reranked_passages(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("sentence_transformers")
    folder, docs = save_classifier(tmp_path / "model"), tmp_path / "docs"
    docs.mkdir()
    for n, text in enumerate(TEXTS[:12]):
        (docs / f"{n}.txt").write_text(text)
    ask = ["ask", QUERY, "--docs", str(docs), "-s", "prompt=extract", "--json"]
    results = []
    for more in ([], ["-s", f"reranker={folder}"]):
        assert main([*ask, *more]) == 0
        results.append(
            [each["document"] for each in json.loads(capsys.readouterr().out)["passages"]]
        )
    assert results[0] != results[1]
    assert main([*ask, "-s", f"reranker={tiny.save(tmp_path / 'causal')}"]) == 4
    assert "expected a cross-encoder" in capsys.readouterr().err


class Constant:
    def __init__(self, scores: Sequence[float]) -> None:
        self._scores = scores

    def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        return self._scores[: len(texts)] or [0.0] * len(texts)


def test_equal_scores_preserve_the_order_and_invalid_ones_are_refused(index: PassageIndex) -> None:
    before = [hit.passage for hit in index.search(QUERY, 7)]
    index.reranker = Constant([])
    assert [hit.passage for hit in index.search(QUERY, 7)] == before
    for scores in ([1.0], [float("nan")] * RERANKED):
        index.reranker = Constant(scores)
        with pytest.raises(InputError, match="expected a number for each"):
            index.search(QUERY, 7)


def test_iterative_search_uses_the_reranker(index: PassageIndex) -> None:
    index.reranker = Constant([float(n) for n in range(RERANKED)])
    engine = Engine(tiny.model(vocab_size=320), tiny.bpe_tokenizer())
    answer = IterativeRag(engine, index).ask(QUERY, max_new_tokens=4, refuse=False)
    assert answer.passages[0].passage == index.search(QUERY, 1)[0].passage
    with pytest.raises(InputError, match="leave one of them out"):
        IterativeRag(engine, index, IterativeSearch(search="sparse"))


def test_models_that_do_not_fit_are_refused(index: PassageIndex, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    index.reranker = CrossEncoder(save_classifier(tmp_path, labels=3))
    with pytest.raises(ModelError, match="gives 3 scores for a pair; expected one"):
        index.search(QUERY, 2)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "new"}
    config["auto_map"] = {"AutoConfig": "code.New", "AutoModel": "code.New"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    models: list[Any] = [CrossEncoder(tmp_path), load_embedder(tmp_path)]
    for model in models:
        with pytest.raises(ModelError, match="needs code of its folder, which ragspec does not"):
            _ = model.model


def test_passages_that_an_embedder_cuts_off_are_counted(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    embedder: Any = load_embedder(save_classifier(tmp_path))
    embedder.model.max_seq_length = 32
    with pytest.warns(UserWarning, match="reads 32 tokens of a passage, and 1 of 2 have more"):
        DenseIndex.build(["tree " * 8, "tree " * 80], embedder)
