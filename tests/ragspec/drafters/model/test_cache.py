"""The draft model's cache gives the logits of a fresh run over the same tokens, whatever came
before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ragspec.drafters.model.cache import DraftCache
from ragspec.verification.causal import CausalTarget
from ragspec.verification.tree_attention import lease
from tests.support import tiny

ROOT = -1


def afresh(architecture: str, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after the last token, by the model as it is: [V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(architecture)(torch.tensor([tokens])).logits
    return logits[0, -1]


def model(architecture: str = "llama") -> torch.nn.Module:
    instance: torch.nn.Module = tiny.model(architecture, dtype=torch.float64)
    return instance


def opened(architecture: str = "llama", vocab_size: int = tiny.VOCAB) -> DraftCache:
    return DraftCache(CausalTarget(model(architecture)), vocab_size)


def check(logits: torch.Tensor, architecture: str, texts: Sequence[Sequence[int]]) -> None:
    expected = torch.stack([afresh(architecture, text) for text in texts])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "olmo3"])
def test_a_draft_grows_forward_by_forward(architecture: str) -> None:
    text, cache = tiny.prompt(20), opened(architecture)
    with lease(model(architecture)):
        check(cache.read(text), architecture, [text])
        check(cache.extend([3, 4], [ROOT, ROOT]), architecture, [[*text, 3], [*text, 4]])
        # One query that must not see the sibling of its parent, then nodes of several depths.
        check(cache.extend([5], [1]), architecture, [[*text, 4, 5]])
        first = cache.drafted
        logits = cache.extend([6, 7, 8], [first - 1, 0, ROOT])
        check(logits, architecture, [[*text, 4, 5, 6], [*text, 3, 7], [*text, 8]])
        check(cache.extend([9], [first]), architecture, [[*text, 4, 5, 6, 9]])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_accepted_nodes_stay_and_are_not_read_again(architecture: str) -> None:
    text, cache = tiny.prompt(20), opened(architecture)
    with lease(model(architecture)):
        for emitted in [(4, 5, 11), (3, 12), (13,), (4, 6, 5, 14)]:
            before = cache.read(text)
            check(before, architecture, [text])
            cache.extend([3, 4], [ROOT, ROOT])
            cache.extend([5, 6], [1, 1])
            cache.extend([5], [3])
            cache.commit(emitted)
            text = [*text, *emitted]
            # The last token is the next root, which is read for its logits.
            assert len(cache) == len(text) - 1
        check(cache.read(text), architecture, [text])


def test_what_the_draft_lacks_is_read_at_the_next_turn() -> None:
    text, cache = tiny.prompt(20), opened()
    with lease(model()):
        cache.read(text)
        cache.extend([3, 4], [ROOT, ROOT])
        cache.commit((4, 9, 9, 8))  # the second token was another drafter's
        assert len(cache) == len(text) + 1
        cache.commit((7, 7))  # a step without a draft of ours
        text = [*text, 4, 9, 9, 8, 7, 7]
        check(cache.read(text), "llama", [text])


def test_an_unfinished_draft_is_dropped() -> None:
    text, cache = tiny.prompt(20), opened()
    with lease(model()):
        for _ in range(2):
            check(cache.read(text), "llama", [text])
            check(cache.extend([3, 4], [ROOT, ROOT]), "llama", [[*text, 3], [*text, 4]])
            check(cache.extend([5, 5], [0, 1]), "llama", [[*text, 3, 5], [*text, 4, 5]])


def test_many_nodes_outgrow_the_first_mask() -> None:
    text, cache = tiny.prompt(8), opened()
    with lease(model()):
        cache.read(text)
        path: list[int] = []
        for slot in range(70):
            logits = cache.extend([slot, slot + 1], [2 * slot - 2 if slot else ROOT] * 2)
            path.append(slot)
        check(logits[:1], "llama", [[*text, *path]])


@pytest.mark.parametrize("size", [tiny.VOCAB - 7, tiny.VOCAB + 9])
def test_distributions_are_over_the_vocabulary_of_the_target(size: int) -> None:
    text, cache = tiny.prompt(8), opened(vocab_size=size)
    with lease(model()):
        logits = cache.read(text)
    shared = min(size, tiny.VOCAB)
    torch.testing.assert_close(logits[0, :shared], afresh("llama", text)[:shared])
    assert logits.shape == (1, size)
    assert (logits[0, shared:] == float("-inf")).all()


def test_text_beyond_the_model_is_reported() -> None:
    cache = opened()
    assert cache.readable([1] * 512)
    assert cache.room([1] * 512) == 1  # a candidate below the root needs no place of its own
    assert not cache.readable([1] * 513)
    assert not cache.readable([1, tiny.VOCAB, 2])
    cache.model.input_size += 1  # an id that can be read and has no logits
    assert cache.readable([1, tiny.VOCAB, 2])
