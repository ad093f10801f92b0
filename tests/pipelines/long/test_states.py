"""States that are kept with a document: a head hears of chunks, and moves no token."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.drafters.eagle.cache import HeadCache
from ragspec.drafters.eagle.drafter import HeadDrafter
from ragspec.engine.engine import Engine
from ragspec.errors import RagspecError, StoreError
from ragspec.pipelines import LongDocument
from ragspec.pipelines.long.saved import STATES
from ragspec.retrievers import Document
from ragspec.sampling.settings import Sampling
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny
from tests.support.damage import DAMAGES

INPUTS: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
QUESTION = "Who keeps the rule?"
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=3)]


def document() -> Document:
    sample = random.Random(3)
    said = [
        f"Part {i} speaks of {sample.choice(('rivers', 'trees', 'birds'))}. " * 4 for i in range(24)
    ]
    said[7] = "The rule is kept by the target alone, word for word, and by nobody else. "
    return Document("d", "Parts", "\n\n".join(said))


def engine(head: bool = True, beside: tuple[str, ...] = ()) -> Engine:
    target = CausalTarget(tiny.model(dtype=torch.float64, max_position_embeddings=4096))
    if not head:
        return Engine(target, tiny.tokenizer(), None)
    instance = HeadDrafter(heads.fresh(target), target, min_expected_gain=0.0)
    return Engine(target, tiny.tokenizer(), [instance, *beside], budget=5)


@pytest.fixture(scope="module")
def opened() -> LongDocument:
    return LongDocument.open(document(), engine())


@pytest.fixture(scope="module")
def selected(opened: LongDocument, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states") / "prefix_cache"
    opened.save(folder)
    return folder


def pairs_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many pairs each head holds when it reads a text, as that happens."""
    result, read = list[int](), HeadCache.read

    def watched(self: HeadCache, tokens: Any) -> torch.Tensor:
        logits = read(self, tokens)
        result.append(len(self))
        return logits

    monkeypatch.setattr(HeadCache, "read", watched)
    return result


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("beside", [(), ("context",)])
def test_answers_are_those_of_the_target_alone(
    opened: LongDocument, selected: Path, sampling: Sampling, beside: tuple[str, ...]
) -> None:
    current = opened.engine
    plain = opened.over(Engine(current.target, current.tokenizer, None)).ask(
        QUESTION, sampling, **INPUTS
    )
    beside_it = Engine(
        current.target,
        current.tokenizer,
        [*current.drafter.drafters, *beside],  # type: ignore[union-attr]
        budget=5,
    )
    again = LongDocument.open(selected, engine(beside=beside))
    for request in (opened.over(beside_it), again):
        result = request.ask(QUESTION, sampling, **INPUTS)
        assert result.generation.tokens == plain.generation.tokens
        assert result.report.drafted_by_source["head"] > 0 and not result.report.faults


def test_states_are_the_targets_its(opened: LongDocument) -> None:
    states = opened._about.states
    assert states is not None and states.shape[1] == opened.tokens
    expected = heads.states(opened.engine.target, opened.prefix.token_ids)
    torch.testing.assert_close(states, expected)
    without = LongDocument.open(document(), engine(head=False))
    assert without._about.states is None
    assert opened.bytes == without.bytes + states.nbytes


def test_a_head_hears_of_the_chunks_that_the_question_finds(
    opened: LongDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = opened.chunks.spans(QUESTION, opened.prefix)
    message = "".join(
        opened.engine.tokenizer.decode(list(opened.prefix.token_ids[start:end]))
        for start, end in spans
    )
    assert "The rule is kept by the target alone" in message
    assert all(start < end for start, end in spans)
    heard = sum(end - start for start, end in spans)
    assert heard == opened.chunks.room < opened.tokens // 7
    assert spans == sorted(spans)
    result = pairs_read(monkeypatch)
    opened.over(opened.engine).ask(QUESTION, **INPUTS)
    with_chunks = result[0]
    result.clear()
    opened.over(opened.engine).ask(QUESTION, known_states=(), **INPUTS)
    assert with_chunks == result[0] + heard


def test_a_document_that_was_preserved_without_states_is_read_without(
    selected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LongDocument.open(document(), engine(head=False))
    plain.save(tmp_path / "plain")
    result = pairs_read(monkeypatch)
    request = LongDocument.open(tmp_path / "plain", engine())
    expected = plain.ask(QUESTION, **INPUTS).generation.tokens
    assert request.ask(QUESTION, **INPUTS).generation.tokens == expected
    assert result[0] < 60
    # The other way round they are kept, though nobody asks for them.
    LongDocument.open(selected, engine(head=False)).save(tmp_path / "again")
    assert LongDocument.open(tmp_path / "again", engine())._about.states is not None


def test_damage_to_the_states_is_a_typed_error(selected: Path, tmp_path: Path) -> None:
    sample, request = random.Random(5), engine()
    (file,) = selected.rglob(STATES)
    hurt = 0
    for time in range(40):
        twin = tmp_path / f"twin{time}"
        shutil.copytree(selected, twin)
        before = file.read_bytes()
        after = DAMAGES[time % len(DAMAGES)](before, sample)
        (twin / file.relative_to(selected)).write_bytes(after)
        if after != before:
            hurt += 1
            with pytest.raises(RagspecError):
                LongDocument.open(twin, request)
        shutil.rmtree(twin)
    assert hurt > 20
    twin = tmp_path / "none"
    shutil.copytree(selected, twin)
    (twin / file.relative_to(selected)).unlink()
    with pytest.raises(StoreError):
        LongDocument.open(twin, request)


def test_stores_of_before_are_opened(selected: Path, tmp_path: Path) -> None:
    """They say nothing of states; the manifest is written as it was, with its own hash."""
    from ragspec.storage.manifest import sha256_file
    from ragspec.storage.store import POINTER

    plain = LongDocument.open(document(), engine(head=False))
    plain.save(tmp_path / "old")
    (manifest,) = (tmp_path / "old").rglob("manifest.json")
    said = json.loads(manifest.read_text())
    assert said["parameters"].pop("states") == []
    manifest.write_text(json.dumps(said))
    pointer = tmp_path / "old" / POINTER
    current = json.loads(pointer.read_text()) | {"manifest_sha256": sha256_file(manifest)}
    pointer.write_text(json.dumps(current))
    assert LongDocument.open(tmp_path / "old", engine())._about.states is None
