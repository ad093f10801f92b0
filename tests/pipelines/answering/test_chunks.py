"""Chunks of a long document: RAPID drafts from them, or steers the answer."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.pipelines import LongDocument
from ragspec.pipelines.answering.chunks import Chunks, room_of
from ragspec.retrievers import Document, Rapid
from ragspec.retrievers.methods.rapid import Steering
from tests.support import tiny

SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=3)]
INPUTS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
QUESTION = "Who keeps the rule?"


def parts() -> Document:
    sample, topics = random.Random(3), ("rivers", "trees", "birds")
    texts = [f"Part {i} speaks of {sample.choice(topics)}. " * 4 for i in range(12)]
    texts[7] = "The rule is kept by the target alone, word for word, and by nobody else. "
    return Document("d", "Parts", "\n\n".join(texts))


def engine() -> Engine:
    model = tiny.model(dtype=torch.float64, max_position_embeddings=2048)
    return Engine(model, tiny.tokenizer(), None)


def reader() -> Any:
    """Return a smaller model, which reads the chunks."""
    return tiny.model(seed=1, dtype=torch.float64, max_position_embeddings=1024)


def with_rapid() -> Engine:
    """Return an engine whose target also drafts over the chunks."""
    plain = engine()
    return plain.with_drafter(Rapid(plain.target), 4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_steered_answers_depend_on_neither_drafter_nor_storage(
    sampling: Sampling, tmp_path: Path
) -> None:
    plain, rapid = engine(), Rapid(reader(), eta=20.0)
    opened = LongDocument.open(parts(), plain)
    opened.save(tmp_path / "prefix_cache")
    result = opened.over(Engine(plain.target, plain.tokenizer, None)).ask(
        QUESTION, sampling, transform=rapid.transform, **INPUTS
    )
    chunks = Chunks(opened.hit, opened.tokens)
    inputs: Any = {"stop": opened.template.stop, "transform": Steering(reader(), 20.0), **INPUTS}
    inputs["draft_prompt"] = chunks.find(plain.tokenizer, QUESTION, opened.template)[1]
    by_hand = plain.generate(list(result.prompt.token_ids), sampling, **inputs)
    tokens = result.generation.tokens
    assert by_hand.tokens[: len(tokens)] == tokens
    assert result.label == "exact-for(RAPID, eta 20)" and (result.report.drift or 0.0) > 0.0
    drafters: list[Any] = ["context", "auto", rapid, ["context", rapid]]
    for drafter in drafters:
        for budget in (0, 4, "auto"):
            request = Engine(plain.target, plain.tokenizer, drafter, budget=budget)
            again = LongDocument.open(tmp_path / "prefix_cache", request)
            more: Any = {"transform": rapid.transform} if isinstance(drafter, str) else {}
            other = again.ask(QUESTION, sampling, **more, **INPUTS)
            assert other.generation.tokens == tokens and other.label == result.label


@pytest.mark.parametrize("token_range", [None, (60, 260)])
def test_rapid_reads_chunks_of_the_part_that_the_target_reads(
    token_range: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = with_rapid()
    opened = LongDocument.open(parts(), request, token_range=token_range)
    generate = Mock(wraps=request.generate)
    monkeypatch.setattr(request, "generate", generate)
    result = opened.ask(QUESTION, **INPUTS)
    read = request.tokenizer.decode(list(generate.call_args.kwargs["draft_prompt"]))
    assert token_range is not None or 10 < len(read) < opened.tokens // 2
    assert ("The rule is kept" in read) is (token_range is None)
    starts = [chunk.passage.start for chunk in result.chunks]
    assert starts == sorted(starts) and result.to_dict()["chunks"][0]["start"] == starts[0]
    for chunk in result.chunks:
        assert chunk.passage.text == parts().text[chunk.passage.start : chunk.passage.end]
        assert chunk.passage.text in opened.text
    plain = opened.over(Engine(request.target, request.tokenizer, None)).ask(QUESTION, **INPUTS)
    assert result.generation.tokens == plain.generation.tokens
    assert result.report.drafted_by_source["rapid"] > 0
    length = len(result.prompt.token_ids) + len(result.generation.tokens)
    assert result.report.kv_bytes == opened.bytes // opened.tokens * length
    assert (result.report.draft_cost or 0.0) > 0.0
    assert result.report.to_dict()["draft_cost"] == result.report.draft_cost


def test_chunks_have_a_token_budget() -> None:
    assert room_of(7000) == 875 and room_of(1_000_000) == 41_666 and room_of(40_000) == 4096
    assert room_of(3) == 1


class ByCosine:
    """An embedder of one cosine for every question."""

    name, fingerprint = "toy", "0"

    def __init__(self, cosine: float) -> None:
        self.cosine = cosine

    def encode(self, texts: Sequence[str], *, query: bool = False) -> Any:
        near = 1.0 if query else self.cosine
        return np.tile(np.array([[near, (1.0 - near**2) ** 0.5]], np.float32), (len(texts), 1))


@pytest.mark.parametrize(("cosine", "beginning"), [(0.29, True), (0.31, False)])
def test_chunks_below_the_least_cosine_are_left_out(cosine: float, beginning: bool) -> None:
    opened = LongDocument.open(parts(), with_rapid(), embedder=ByCosine(cosine))
    result = opened.ask(QUESTION, **INPUTS)
    text = " ".join(chunk.passage.text for chunk in result.chunks)
    assert (result.chunks[0].passage.start == 0) >= beginning
    assert ("The rule is kept" in text) != beginning
    expected = LongDocument.open(parts(), engine()).ask(QUESTION, **INPUTS)
    assert result.generation.tokens == expected.generation.tokens
