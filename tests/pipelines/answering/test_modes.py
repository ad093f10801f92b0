"""Answers whose law is moved by what the question finds, and drafters that read only that."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.pipelines import LongDocument
from ragspec.pipelines.answering.chunks import Chunks
from ragspec.retrievers import Document, Rapid
from ragspec.retrievers.methods.rapid import Steering
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny

SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=3)]
INPUTS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
QUESTION = "Who keeps the rule?"


def parts(count: int = 12) -> Document:
    sample, topics = random.Random(3), ("rivers", "trees", "birds")
    said = [f"Part {i} speaks of {sample.choice(topics)}. " * 4 for i in range(count)]
    said[7] = "The rule is kept by the target alone, word for word, and by nobody else. "
    return Document("d", "Parts", "\n\n".join(said))


def engine(drafter: Any = "auto", budget: Any = 4) -> Engine:
    model = tiny.model(dtype=torch.float64, max_position_embeddings=2048)
    return Engine(model, tiny.tokenizer(), drafter, budget=budget)


def reader() -> Any:
    """Return a smaller model, which reads the chunks."""
    return tiny.model(seed=1, dtype=torch.float64, max_position_embeddings=1024)


def with_rapid() -> Engine:
    """Return an engine whose target reads the chunks, too."""
    plain = engine(None)
    return plain.with_drafter(Rapid(plain.target), 4)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_steered_answers_do_not_hang_on_drafts_nor_on_where_it_was_preserved(
    sampling: Sampling, tmp_path: Path
) -> None:
    plain, rapid = engine(None), Rapid(reader(), eta=20.0)
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


def test_the_report_tells_bytes_and_what_a_draft_costs() -> None:
    opened = LongDocument.open(parts(), with_rapid())
    result = opened.ask(QUESTION, **INPUTS)
    length = len(result.prompt.token_ids) + len(result.generation.tokens)
    assert result.report.kv_bytes == opened.bytes // opened.tokens * length
    assert (result.report.draft_cost or 0.0) > 0.0
    assert result.report.to_dict()["draft_cost"] == result.report.draft_cost


def test_chunks_come_from_what_the_target_reads() -> None:
    opened = LongDocument.open(parts(), with_rapid(), token_range=(60, 260))
    result = opened.ask(QUESTION, **INPUTS)
    assert result.chunks and "The rule is kept" not in opened.text
    for chunk in result.chunks:
        assert chunk.passage.text == parts().text[chunk.passage.start : chunk.passage.end]
        assert chunk.passage.text in opened.text


class ByCosine:
    """Vectors whose cosine with every question is the one given."""

    name, fingerprint = "toy", "0"

    def __init__(self, cosine: float) -> None:
        self.cosine = cosine

    def encode(self, texts: Sequence[str], *, query: bool = False) -> Any:
        near = 1.0 if query else self.cosine
        return np.tile(np.array([[near, (1.0 - near**2) ** 0.5]], np.float32), (len(texts), 1))


@pytest.mark.parametrize(("cosine", "beginning"), [(0.29, True), (0.31, False)])
def test_what_is_too_far_is_left_out_and_the_beginning_read(cosine: float, beginning: bool) -> None:
    opened = LongDocument.open(parts(), with_rapid(), embedder=ByCosine(cosine))
    result = opened.ask(QUESTION, **INPUTS)
    text = " ".join(chunk.passage.text for chunk in result.chunks)
    assert (result.chunks[0].passage.start == 0) >= beginning
    assert ("The rule is kept" in text) != beginning
    expected = LongDocument.open(parts(), engine(None)).ask(QUESTION, **INPUTS)
    assert result.generation.tokens == expected.generation.tokens


SHORT: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}


def head_engine(beside: tuple[str, ...] = ()) -> Engine:
    target = CausalTarget(tiny.model(dtype=torch.float64, max_position_embeddings=4096))
    instance = HeadDrafter(heads.fresh(target), target, min_expected_gain=0.0)
    return Engine(target, tiny.tokenizer(), [instance, *beside], budget=5)


@pytest.fixture(scope="module")
def opened() -> LongDocument:
    return LongDocument.open(parts(24), head_engine())


@pytest.fixture(scope="module")
def selected(opened: LongDocument, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents") / "prefix_cache"
    opened.save(folder)
    return folder


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("beside", [(), ("context",)])
def test_answers_are_those_of_the_target_alone(
    opened: LongDocument, selected: Path, sampling: Sampling, beside: tuple[str, ...]
) -> None:
    current: Any = opened.engine
    alone = Engine(current.target, current.tokenizer, None)
    plain = opened.over(alone).ask(QUESTION, sampling, **SHORT)
    drafters = [*current.drafter.drafters, *beside]
    beside_it = Engine(current.target, current.tokenizer, drafters, budget=5)
    again = LongDocument.open(selected, head_engine(beside=beside))
    for request in (opened.over(beside_it), again):
        result = request.ask(QUESTION, sampling, **SHORT)
        assert result.generation.tokens == plain.generation.tokens
        assert result.report.drafted_by_source["head"] > 0 and not result.report.faults
