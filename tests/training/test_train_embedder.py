import gzip
import importlib
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ragspec.retrievers.search.dense import DenseIndex, StaticEmbedder, load_embedder

SUBJECTS = ["whale", "compiler", "river", "violin", "socket", "garden", "kernel", "castle"]
VERBS = ["carries", "opens", "follows", "measures"]
THINGS = ["boats", "tables", "signals", "stones", "letters"]


@pytest.fixture
def script(training_path: None) -> ModuleType:
    return importlib.import_module("train_embedder")


def passages() -> list[tuple[str, str, list[str]]]:
    rng = random.Random(0)
    instance = []
    for number in range(240):
        subject = SUBJECTS[number % len(SUBJECTS)]
        lines = [f"The {subject} {rng.choice(VERBS)} the {rng.choice(THINGS)}." for _ in range(4)]
        questions = [f"What does the {subject} do?"] if number % 3 == 0 else []
        instance.append((f"About the {subject}", " ".join(lines), questions))
    return instance


def test_training_lowers_the_loss_and_finds_the_subject(script: ModuleType, tmp_path: Path) -> None:
    texts = passages()
    settings = script.Settings(vocabulary=240, dimensions=16, batch=48, steps=150, group=4)
    tokenizer = script.train_tokenizer([text for _, text, _ in texts], settings.vocabulary)
    sources = script.cut_sources(texts, tokenizer)
    words = script.Words(tokenizer)
    table = script.first_table(sources, words, settings)
    pairs = script.Pairs(sources, words, settings)
    losses = [loss for _, loss in script.train(pairs, table, settings)]
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.2
    script.save(tmp_path / "create", tokenizer, table)
    embedder = load_embedder(tmp_path / "create")
    assert isinstance(embedder, StaticEmbedder)
    index = DenseIndex.build([text for _, text, _ in texts], embedder)
    for subject in SUBJECTS:
        best, _ = index.search(subject, 1)[0]
        assert subject in texts[best][1]


def test_words_give_the_tokens_of_the_text(script: ModuleType) -> None:
    texts = [text for _, text, _ in passages()]
    tokenizer = script.train_tokenizer(texts, 120)
    (source,) = script.cut_sources([("A title", texts[0], [])], tokenizer)
    ids = script.Words(tokenizer).ids([word for s in source.sentences for word in s])
    assert ids == tokenizer.encode(texts[0], add_special_tokens=False).ids


def test_share_alike_records_are_left_out(script: ModuleType, tmp_path: Path) -> None:
    lines = '{"license": "CC-BY-SA-4.0", "n": 1}\n{"license": "MIT", "n": 2}\n{"n": 3}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert [record["n"] for record in script.read_permissive(tmp_path / "a.jsonl.gz")] == [2, 3]
