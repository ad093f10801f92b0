"""The states that a head learns from are the target's own, read side by side and once."""

from __future__ import annotations

import copy

import pytest
import torch

from ragspec.drafters.eagle.batches import StateReader
from ragspec.verification.causal import CausalTarget
from tests.support import heads, image_models, tiny

MIXED = [tiny.prompt(n, vocab_size=heads.VOCAB, seed=n) for n in (9, 24, 5, 17)]


@pytest.fixture(scope="module")
def target() -> CausalTarget:
    return CausalTarget(heads.model(torch.float32))


def test_states_are_the_targets_its_and_padding_is_reported(target: CausalTarget) -> None:
    read = StateReader(target, MIXED).read([3, 1, 2])
    assert read.real.sum(1).tolist() == [17, 24, 5]
    for row, number in enumerate((3, 1, 2)):
        text = MIXED[number]
        real = read.real[row]
        assert real.tolist() == [True] * len(text) + [False] * (24 - len(text))
        rounded = heads.states(target, text)[0].bfloat16().float()
        torch.testing.assert_close(read.states[row, real], rounded, atol=1e-6, rtol=1e-2)
        embedded = target.embed(torch.tensor(text))
        torch.testing.assert_close(read.embedded[row, real], embedded)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_copies_are_rows_of_their_its(scale: float) -> None:
    instance = image_models.target(copy.deepcopy(image_models.model("class")).float(), scale)
    codes = [tiny.prompt(15, vocab_size=heads.VOCAB, seed=seed) for seed in range(3)]
    prompts = [[*instance.prompt(row), *some] for row, some in enumerate(codes)]
    read = StateReader(instance, prompts).read(range(3))
    assert len(read.states) == 3 * instance.copies
    for row, text in enumerate(prompts):
        here = slice(row * instance.copies, (row + 1) * instance.copies)
        rounded = heads.states(instance, text).bfloat16().float()
        torch.testing.assert_close(read.states[here], rounded, atol=1e-6, rtol=1e-2)
        torch.testing.assert_close(read.embedded[here], instance.embed(torch.tensor([text])))


def test_texts_with_too_many_logits_are_read_in_parts(
    target: CausalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(logits: int) -> None:
        monkeypatch.setattr("ragspec.verification.causal.MOST_LOGITS", logits * heads.VOCAB)
        monkeypatch.setattr("ragspec.drafters.eagle.batches.MOST_LOGITS", logits * heads.VOCAB)

    chunks = [tiny.prompt(24, vocab_size=heads.VOCAB, seed=seed) for seed in range(4)]
    whole = StateReader(target, chunks).read(range(4))
    limit(2 * 24)
    parts = StateReader(target, chunks).read(range(4))
    torch.testing.assert_close(parts.states, whole.states, atol=1e-6, rtol=1e-2)
    limit(6)
    ends = StateReader(target, chunks).read(range(4))
    torch.testing.assert_close(ends.states, whole.states[:, -6:], atol=1e-6, rtol=1e-2)
    torch.testing.assert_close(ends.embedded, whole.embedded[:, -6:])


@pytest.mark.parametrize("room", [0, 64 * 32, 1 << 20])
def test_states_are_read_once_while_they_fit(target: CausalTarget, room: int) -> None:
    reader = StateReader(target, MIXED, room)
    first, read = reader.read(range(4)), list[int]()
    states = reader._states
    reader._states = lambda numbers: read.extend(numbers) or states(numbers)  # type: ignore
    again = reader.read([2, 0])
    assert torch.equal(again.states[0, :5], first.states[2, :5])
    assert torch.equal(again.embedded[1], first.embedded[0, :9])
    assert bool(read) is (room == 0)
    assert reader._room >= 0
