"""A head's cache returns the logits of the head without one, whatever was accepted or dropped."""

from typing import Any

import pytest
import torch

from ragspec.drafters.heads.cache import HeadCache, HeadModel
from ragspec.drafters.heads.head import DraftHead
from ragspec.trees.draft_tree import ROOT
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny

PICTURE = pytest.mark.parametrize("picture", [False, True], ids=["text", "guided pair"])


def setting(picture: bool) -> tuple[DraftHead, CausalTarget, list[int], list[int], HeadCache]:
    """Return a head, its target, a prompt, what follows, and a cache."""
    target: Any
    if picture:
        target = heads.picture_target()
        prompt = target.prompt(1)
    else:
        target = CausalTarget(heads.model())
        prompt = tiny.prompt(9, vocab_size=heads.VOCAB, seed=3)
    text = tiny.prompt(12, vocab_size=target.vocab_size, seed=4)
    head = heads.fresh(target)
    return head, target, prompt, text, opened(head, target)


def opened(head: DraftHead, target: CausalTarget) -> HeadCache:
    return HeadCache(HeadModel(head, target), target.vocab_size, 4)


@PICTURE
def test_distributions_of_a_tree_are_those_of_its_paths(picture: bool) -> None:
    head, target, prompt, text, cache = setting(picture)
    cache.notify(heads.states(target, prompt))
    tokens = [*prompt, text[0]]
    with cache.lease():
        root = cache.read(tokens)
        level = cache.extend([3, 4], [ROOT, ROOT])
        below = cache.extend([5, 3], [1, 0])
    expected = heads.distributions_below(head, target, tokens, [4, 5])
    other = heads.distributions_below(head, target, tokens, [3, 3])
    rows = torch.stack([root[0], level[1], *below])
    torch.testing.assert_close(rows, torch.cat([expected, other[2:]]).to(root))


@PICTURE
def test_accepted_tokens_are_read_again_with_the_targets_states(picture: bool) -> None:
    head, target, prompt, text, cache = setting(picture)
    cache.notify(heads.states(target, prompt))
    tokens = [*prompt, text[0]]
    for accepted in (3, 1, 2):
        before, after = len(tokens), [*tokens, *text[len(tokens) - len(prompt) :][:accepted]]
        with cache.lease():
            cache.read(tokens)
            for slot, token in enumerate(after[before:]):
                cache.extend([token], [slot - 1])
            cache.extend([1], [0])
        cache.commit(after[before:])
        cache.notify(heads.states(target, after)[:, before - 1 : len(after) - 1])
        tokens = after
        with cache.lease():
            root, node = cache.read(tokens), cache.extend([2], [ROOT])
        expected = heads.distributions_below(head, target, tokens, [2])
        torch.testing.assert_close(torch.cat([root, node]), expected.to(root))


def test_a_head_may_read_only_the_end_of_a_prompt() -> None:
    head, target, prompt, text, cache = setting(False)
    cache.notify(heads.states(target, prompt)[:, 5:], first=5)
    tokens = [*prompt, text[0]]
    with cache.lease():
        root, node = cache.read(tokens), cache.extend([2], [ROOT])
    expected = heads.distributions_below(head, target, tokens, [2], first=5)
    torch.testing.assert_close(torch.cat([root, node]), expected)


def test_a_text_can_be_read_twice_but_not_without_its_states() -> None:
    _, target, prompt, text, cache = setting(False)
    assert not cache.readable([*prompt, text[0]])
    cache.notify(heads.states(target, prompt))
    assert cache.readable([*prompt, text[0]])
    assert not cache.readable([*prompt, *text[:2]])
    assert not cache.readable([*prompt, heads.VOCAB])
    assert cache.room([*prompt, text[0]]) > 100
    with cache.lease():
        first, again = cache.read([*prompt, text[0]]), cache.read([*prompt, text[0]])
        other = cache.read([*prompt, text[1]])
    torch.testing.assert_close(first, again)
    assert not torch.allclose(first, other)
