"""Beginnings that many prompts share are read once, and the text stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.engine.prefix_cache import PrefixCache, SharedPrefixes
from ragspec.errors import InputError
from ragspec.sampling.settings import Sampling
from ragspec.verification.base import Beginning
from tests.support import tiny


def engine(architecture: str = "llama", drafter: Any = None) -> Engine:
    return Engine(tiny.model(architecture, dtype=torch.float64), tiny.tokenizer(), drafter)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.1, seed=4)])
@pytest.mark.parametrize("drafter", [None, "auto"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_texts_over_preserved_beginnings_are_those_of_fresh_ones(
    architecture: str, drafter: str | None, sampling: Sampling
) -> None:
    request, prefixes = engine(architecture, drafter), SharedPrefixes()
    cache = PrefixCache(prefixes)
    passages = [tiny.prompt(30 + n, seed=n) for n in range(3)]
    known: set[int] = set()
    for turn, number in enumerate((0, 1, 0, 2, 1, 0, 0, 2)):
        prompt = [*passages[number], *tiny.prompt(6, seed=50 + turn)]
        options: dict[str, Any] = {"max_new_tokens": 10}
        result = request.generate(
            prompt, sampling, prefix_cache=cache, prefix=len(passages[number]), **options
        )
        assert result.tokens == request.generate(prompt, sampling, **options).tokens
        assert (result.report.cached_tokens >= len(passages[number])) is (number in known)
        known.add(number)
        if turn == 4:  # another conversation finds them, too
            cache = PrefixCache(prefixes)
    assert len(prefixes) == 3


def test_the_longest_unused_leave_first() -> None:
    part = torch.zeros(1, 2, 10, 4)
    size = 2 * part.nbytes
    cache, target = SharedPrefixes(3 * size), object()
    for name in range(3):
        cache.keep(target, [name], [(part, part)])
    assert cache.find(target, [0]) is not None
    cache.keep(target, [3], [(part, part)])
    assert [cache.find(target, [n]) is not None for n in range(4)] == [True, False, True, True]
    assert cache.bytes == 3 * size
    cache.keep(target, [3], [(part, part)])
    assert cache.bytes == 3 * size
    cache.keep(target, [9], [(part, part)] * 4)  # does not fit at all: the others stay
    assert len(cache) == 3
    other: Beginning | None = cache.find(object(), [0])
    assert other is None and len(cache) == cache.bytes == 0
    with pytest.raises(InputError, match="most_bytes is -1"):
        SharedPrefixes(-1)


def test_nothing_is_preserved_without_room_and_nothing_of_another_model_is_used() -> None:
    request, cache = engine(), PrefixCache(SharedPrefixes(0))
    prompt = tiny.prompt(30)
    for _ in range(2):
        request.generate(prompt, prefix_cache=cache, prefix=20, max_new_tokens=4)
    assert len(cache.prefixes) == 0
    cache = PrefixCache()
    request.generate(prompt, prefix_cache=cache, prefix=20, max_new_tokens=4)
    other = Engine(tiny.model(seed=5, dtype=torch.float64), tiny.tokenizer(), None)
    result = other.generate(prompt, prefix_cache=cache, prefix=20, max_new_tokens=4)
    assert result.report.cached_tokens == 0
    assert result.tokens == other.generate(prompt, max_new_tokens=4).tokens


def test_keys_of_another_text_would_be_visible() -> None:
    request, cache = engine(), PrefixCache()
    prompt, wrong = tiny.prompt(30), tiny.prompt(30, seed=9)
    request.generate(wrong, prefix_cache=cache, prefix=20, max_new_tokens=4)
    result = cache.prefixes.find(request.target, wrong[:20])
    assert result is not None
    cache.prefixes.keep(request.target, prompt[:20], result)
    message = request.generate(prompt, prefix_cache=cache, prefix=20, max_new_tokens=12).tokens
    assert message != request.generate(prompt, max_new_tokens=12).tokens


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prefix": 3}, "got prefix without kept"),
        (
            {"prefix": -1, "prefix_cache": PrefixCache()},
            "prefix is -1; expected a whole number below",
        ),
        (
            {"prefix": 24, "prefix_cache": PrefixCache()},
            "prefix is 24; expected a whole number below",
        ),
        ({"prefix": "all", "prefix_cache": PrefixCache()}, "prefix is 'all'"),
    ],
)
def test_bad_prefixes_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        engine().generate(tiny.prompt(24), **options)
