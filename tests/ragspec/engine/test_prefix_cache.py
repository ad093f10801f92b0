"""What was read is not read again, and the text is that of a fresh reading."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.engine.prefix_cache import PrefixCache, SharedPrefixes
from ragspec.errors import InputError
from ragspec.sampling.settings import Sampling
from ragspec.verification.base import Beginning
from ragspec.verification.causal import TreeSession
from tests.ragspec.verification.test_causal import build_longrope as build
from tests.support import tiny
from tests.support.noisy import NoisyTrees

FLOAT64 = torch.float64
SETTINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=4),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, top_p=0.8, seed=9),
]


def engine(architecture: str = "llama", drafter: Any = None) -> Engine:
    return Engine(tiny.model(architecture, dtype=FLOAT64), tiny.tokenizer(), drafter)


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("drafter", [None, "context"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_turns_that_are_preserved_equal_turns_that_are_read_afresh(
    architecture: str, drafter: str | None, sampling: Sampling
) -> None:
    request, cache = engine(architecture, drafter), PrefixCache()
    text = tiny.prompt(20, seed=1)
    for turn in range(6):
        fresh = request.generate(text, sampling, max_new_tokens=12)
        result = request.generate(text, sampling, max_new_tokens=12, prefix_cache=cache)
        assert result.tokens == fresh.tokens
        assert result.report.prompt_tokens == len(text)
        assert (result.report.cached_tokens > 0) is (turn not in (0, 5))
        # The next turn goes on, or an earlier one is put otherwise, or the beginning leaves.
        text = [*text, *result.tokens, *tiny.prompt(7, seed=turn)]
        text = text[:-19] if turn == 2 else text[4:] if turn == 4 else text


def test_only_what_is_new_is_read() -> None:
    request, cache = engine(), PrefixCache()
    first = request.generate(tiny.prompt(30), max_new_tokens=8, prefix_cache=cache)
    # The last token that was written has not been read by the model.
    assert cache.tokens == (*tiny.prompt(30), *first.tokens[:-1])
    text = [*tiny.prompt(30), *first.tokens, 5, 6]
    read: list[int] = []
    hook = request.model.register_forward_pre_hook(
        lambda module, args, inputs: read.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    again = request.generate(text, max_new_tokens=4, prefix_cache=cache)
    hook.remove()
    assert read[0] == 3
    assert again.report.cached_tokens == len(text) - 3
    assert again.report.to_dict()["cached_tokens"] == len(text) - 3


def test_the_same_prompt_again_reads_its_last_token() -> None:
    request, cache = engine(), PrefixCache()
    results = [
        request.generate(tiny.prompt(30), max_new_tokens=8, prefix_cache=cache) for _ in range(3)
    ]
    assert [each.report.cached_tokens for each in results] == [0, 29, 29]
    assert results[0].tokens == results[1].tokens == results[2].tokens


@pytest.mark.parametrize("speculates", [False, True])
def test_an_interrupt_within_a_forward_keeps_what_was_committed(speculates: bool) -> None:
    request, cache, text = engine(), PrefixCache(), tiny.prompt(25)
    drafter = NoisyTrees({tuple(text): request.generate(text, max_new_tokens=40).tokens})
    interrupted = Engine(
        request.target, tiny.tokenizer(), drafter if speculates else None, budget=6
    )
    calls = iter(range(100))

    def interrupt(*_: Any) -> None:
        if next(calls) == 4:  # in the second layer, some steps into the text
            raise KeyboardInterrupt

    hook = request.model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.generate(text, max_new_tokens=40, prefix_cache=cache)
    hook.remove()
    assert len(cache.tokens) > len(text)
    longer = [*cache.tokens, 4, 5]
    fresh = request.generate(longer, max_new_tokens=20)
    result = request.generate(longer, max_new_tokens=20, prefix_cache=cache)
    assert result.tokens == fresh.tokens
    assert result.report.cached_tokens == len(longer) - 2


def test_a_stream_that_is_left_keeps_what_was_written() -> None:
    request, cache = engine(), PrefixCache()
    stream = request.stream(tiny.prompt(25), max_new_tokens=40, prefix_cache=cache)
    next(stream)
    next(stream)
    with pytest.raises(InputError, match="in use by another call"):
        request.generate(tiny.prompt(25), max_new_tokens=4, prefix_cache=cache)
    stream.close()
    written = stream.result.tokens
    assert cache.tokens == (*tiny.prompt(25), *written[:-1])
    request.generate(tiny.prompt(25), max_new_tokens=4, prefix_cache=cache)
    del stream
    gc.collect()


def test_another_model_begins_again() -> None:
    cache, text = PrefixCache(), tiny.prompt(25)
    one = engine()
    other = Engine(tiny.model("llama", dtype=FLOAT64, seed=5), tiny.tokenizer(), None)
    one.generate(text, max_new_tokens=5, prefix_cache=cache)
    fresh = other.generate(text, max_new_tokens=5)
    result = other.generate(text, max_new_tokens=5, prefix_cache=cache)
    assert result.tokens == fresh.tokens
    assert result.report.cached_tokens == 0
    cache.clear()
    assert cache.tokens == ()
    assert other.generate(text, max_new_tokens=5, prefix_cache=cache).report.cached_tokens == 0


def test_what_cannot_be_cut_short_is_read_again() -> None:
    text = tiny.prompt(70)
    for model in (
        build("llama"),  # its rotary tables depend on the length of the prompt
        tiny.model("qwen3_next"),  # a recurrent state
    ):
        cache, request = PrefixCache(), Engine(model, None, None)
        for length in (40, 66):
            fresh = request.generate(text[:length], max_new_tokens=5)
            result = request.generate(text[:length], max_new_tokens=5, prefix_cache=cache)
            assert result.tokens == fresh.tokens
            assert result.report.cached_tokens == 0


def test_a_preserved_context_serves_one_text_at_a_time() -> None:
    request, cache = engine(), PrefixCache()
    for prompts, sampling in (([[1, 2], [3, 4]], Sampling()), ([1, 2], Sampling(n=2, seed=1))):
        with pytest.raises(InputError, match="expected one prompt and n=1"):
            request.generate(prompts, sampling, max_new_tokens=2, prefix_cache=cache)
    with pytest.raises(InputError, match="expected a PrefixCache"):
        request.generate([1, 2], max_new_tokens=2, prefix_cache="yes")  # type: ignore[arg-type]
    failed: list[BaseException] = []

    def ask(seed: int) -> None:
        try:
            request.generate(tiny.prompt(20, seed=seed), max_new_tokens=30, prefix_cache=cache)
        except InputError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = request.generate(tiny.prompt(20, seed=9), max_new_tokens=9)
    assert request.generate(
        tiny.prompt(20, seed=9), max_new_tokens=9, prefix_cache=cache
    ).tokens == (fresh.tokens)
    assert all("in use" in str(error) for error in failed)


def test_a_session_is_entered_once_for_many_calls_in_a_row() -> None:
    request, cache = engine(), PrefixCache()
    entered: list[str] = []
    prompt = tiny.prompt(20)
    with pytest.MonkeyPatch.context() as patched:
        enter, leave = TreeSession.__enter__, TreeSession.__exit__

        def entering(self: TreeSession) -> TreeSession:
            entered.append("enter")
            return enter(self)

        def leaving(self: TreeSession, *inputs: Any) -> None:
            entered.append("leave")
            leave(self, *inputs)

        patched.setattr(TreeSession, "__enter__", entering)
        patched.setattr(TreeSession, "__exit__", leaving)
        with cache.held():
            result = request.generate(
                prompt, prefix_cache=cache, max_new_tokens=12, stop_after=4, ignore_eos=True
            )
            while result.finish_reason == "paused":
                options: dict[str, Any] = {
                    "max_new_tokens": 12,
                    "stop_after": 4,
                    "ignore_eos": True,
                }
                result = request.generate(
                    prompt, prefix_cache=cache, resume_from=result.tokens, **options
                )
            assert entered == ["enter"]
        assert entered == ["enter", "leave"]
    assert result.tokens == request.generate(prompt, max_new_tokens=12, ignore_eos=True).tokens
    again = request.generate(prompt, prefix_cache=cache, max_new_tokens=12, ignore_eos=True)
    assert again.tokens == result.tokens


def test_a_text_that_goes_on_is_drafted_for_from_its_first_forward() -> None:
    request, cache = engine(drafter="context"), PrefixCache()
    prompt = tiny.prompt(40)[:20] * 3
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "prefix_cache": cache}
    first = request.generate(prompt, stop_after=8, **options)
    second = request.generate(prompt, resume_from=first.tokens, **options)
    assert (first.report.prefill_forwards, second.report.prefill_forwards) == (1, 0)
    assert second.report.prefill_tokens == 0
    assert second.report.steps == second.report.forward_passes


def test_a_session_that_serves_one_call_is_left_with_it() -> None:
    """A recurrent state cannot be cut short: held ones would pile up, a cache for each call."""
    request = Engine(tiny.model("qwen3_next"), tiny.tokenizer(), None)
    cache, opened = PrefixCache(), list[weakref.ref[Any]]()
    with pytest.MonkeyPatch.context() as patched, cache.held():
        open_session = type(request.target).open

        def opening(self: Any, *inputs: Any) -> Any:
            session = open_session(self, *inputs)
            opened.append(weakref.ref(session))
            return session

        patched.setattr(type(request.target), "open", opening)
        for turn in range(3):
            request.generate(tiny.prompt(12, seed=turn), prefix_cache=cache, max_new_tokens=4)
        gc.collect()
        assert len(opened) == 3
        assert all(session() is None for session in opened)


def prefixes_engine(architecture: str = "llama", drafter: Any = None) -> Engine:
    return Engine(tiny.model(architecture, dtype=torch.float64), tiny.tokenizer(), drafter)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.1, seed=4)])
@pytest.mark.parametrize("drafter", [None, "auto"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_texts_over_preserved_beginnings_are_those_of_fresh_ones(
    architecture: str, drafter: str | None, sampling: Sampling
) -> None:
    request, prefixes = prefixes_engine(architecture, drafter), SharedPrefixes()
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
    request, cache = prefixes_engine(), PrefixCache(SharedPrefixes(0))
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
    request, cache = prefixes_engine(), PrefixCache()
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
        ({"prefix": 3}, "got prefix without prefix_cache"),
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
        prefixes_engine().generate(tiny.prompt(24), **options)
