"""The prefix cache: cached tokens are not read again, and no text changes."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from ragspec import Engine, Sampling
from ragspec.errors import InputError
from ragspec.reports.report import joined
from ragspec.verification.prefix_cache import PrefixCache
from ragspec.verification.sequence_cache import SequenceCache, slot_bytes
from ragspec.verification.tree_session import TreeSession
from tests.ragspec.engine.test_pause import SETTINGS
from tests.ragspec.verification.test_causal import build_longrope
from tests.support import tiny
from tests.support.calls import failing, noted
from tests.support.noisy import NoisyTrees

FLOAT64 = torch.float64


def engine(architecture: str = "llama", drafter: Any = None, **options: Any) -> Engine:
    return Engine(tiny.model(architecture, dtype=FLOAT64), tiny.tokenizer(), drafter, **options)


def fresh(architecture: str = "llama", drafter: Any = None) -> Engine:
    """Return an engine that caches nothing."""
    other = engine(architecture, drafter)
    other.prefix_cache.max_bytes = 0
    return other


@pytest.mark.parametrize("sampling", [*SETTINGS[:2], SETTINGS[3]])
@pytest.mark.parametrize("drafter", [None, "context", "auto"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_turns_with_and_without_the_cache_are_equal(
    architecture: str, drafter: str | None, sampling: Sampling
) -> None:
    caching, reading = engine(architecture, drafter), fresh(architecture)
    text = tiny.prompt(20, seed=1)
    for turn in range(6):
        expected = reading.generate(text, sampling, max_new_tokens=12)
        result = caching.generate(text, sampling, max_new_tokens=12)
        assert result.tokens == expected.tokens
        assert result.report.prompt_tokens == len(text)
        assert expected.report.cached_tokens == 0
        assert (result.report.cached_tokens > 0) is (turn not in (0, 5))
        # The next turn continues, or the last one is repeated, or the beginning is cut.
        text = [*text, *result.tokens, *tiny.prompt(7, seed=turn)]
        text = text[:-19] if turn == 2 else text[4:] if turn == 4 else text


def test_the_same_prompt_again_reads_its_last_token() -> None:
    request = engine()
    results = [request.generate(tiny.prompt(30), max_new_tokens=8) for _ in range(3)]
    assert [each.report.cached_tokens for each in results] == [0, 29, 29]
    assert results[0].tokens == results[1].tokens == results[2].tokens
    assert len(request.prefix_cache) == 1
    together = request.generate([tiny.prompt(30)] * 3, max_new_tokens=8)
    assert [each.report.cached_tokens for each in together] == [29] * 3


@pytest.mark.parametrize("speculates", [False, True])
def test_an_interrupt_within_a_forward_keeps_committed_tokens(speculates: bool) -> None:
    reading, text = fresh(), tiny.prompt(25)
    drafter = NoisyTrees({tuple(text): reading.generate(text, max_new_tokens=40).tokens})
    request = engine("llama", drafter if speculates else None, budget=6)
    interrupt = failing(KeyboardInterrupt, (5,))  # in the second layer, some steps into the text
    hook = request.model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        request.generate(text, max_new_tokens=40)
    assert request.scheduler.open_requests == 0
    expected = reading.generate([*text, 4, 5], max_new_tokens=20)
    result = request.generate([*text, 4, 5], max_new_tokens=20)
    hook.remove()
    assert result.tokens == expected.tokens
    assert result.report.cached_tokens == len(text)


def test_the_tokens_of_a_closed_stream_are_cached() -> None:
    request = engine()
    stream = request.stream(tiny.prompt(25), max_new_tokens=40, ignore_eos=True)
    next(stream)
    next(stream)
    beside = request.generate(tiny.prompt(25), max_new_tokens=4)
    assert beside.report.cached_tokens == 24, "copied from the running text"
    stream.close()
    written = stream.result.tokens
    text = [*tiny.prompt(25), *written, 5]
    assert request.generate(text, max_new_tokens=4).report.cached_tokens == len(text) - 2


CHANGES: dict[str, Callable[[Any], object]] = {
    "weight": lambda layer: layer.mlp.up_proj.base_layer.weight.detach().mul_(1.5),
    "data": lambda layer: layer.mlp.up_proj.base_layer.weight.data.mul_(1.5),
    "attribute": lambda layer: setattr(layer.self_attn, "scaling", 0.05),
    "hook": lambda layer: layer.register_forward_hook(lambda *_: 1.5 * _[2]),
    "adapter": lambda layer: layer.mlp.up_proj.set_adapter("two"),
    "buffer": lambda layer: layer.scale.mul_(2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_uses_no_cached_tokens(change: str) -> None:
    settings = LoraConfig(target_modules=["up_proj"], init_lora_weights=False, lora_alpha=64)
    torch.manual_seed(0)
    model: Any = get_peft_model(copy.deepcopy(tiny.model()), settings, "one").eval()
    model.add_adapter("two", settings)
    layer = model.base_model.model.model.layers[0]
    layer.register_buffer("scale", torch.ones(3))
    request, text = Engine(model, None, None), tiny.prompt(25)
    for _ in range(2):
        request.generate(text, max_new_tokens=5)
    CHANGES[change](layer)
    result = request.generate(text, max_new_tokens=5)
    assert result.report.cached_tokens == 0
    assert result.tokens == Engine(model, None, None).generate(text, max_new_tokens=5).tokens


def test_caches_that_cannot_be_cut_are_read_again() -> None:
    text = tiny.prompt(70)
    for model in (
        build_longrope("llama"),  # its rotary tables depend on the length of the prompt
        tiny.model("qwen3_next"),  # a recurrent state
    ):
        request = Engine(model, None, None)
        for length in (40, 66):
            first = request.generate(text[:length], max_new_tokens=5)
            again = request.generate(text[:length], max_new_tokens=5)
            assert first.tokens == again.tokens
            assert again.report.cached_tokens == 0


def test_a_session_is_entered_once_for_many_calls() -> None:
    request, entered = engine(), list[str]()
    options: dict[str, Any] = {"max_new_tokens": 12, "stop_after": 4, "ignore_eos": True}
    prompt = tiny.prompt(20)
    with pytest.MonkeyPatch.context() as patched:
        for name, word in ("__enter__", "enter"), ("__exit__", "leave"):
            noting = noted(getattr(TreeSession, name), entered, lambda *_, word=word: word)
            patched.setattr(TreeSession, name, noting)
        with request.scheduler.hold():
            result = request.generate(prompt, **options)
            while result.finish_reason == "paused":
                result = request.generate(prompt, resume_from=result.tokens, **options)
            assert entered == ["enter"]
        assert entered == ["enter", "leave"]
    assert result.tokens == fresh().generate(prompt, max_new_tokens=12, ignore_eos=True).tokens


def test_a_resumed_text_needs_no_prefill() -> None:
    request = engine(drafter="context")
    prompt = tiny.prompt(40)[:20] * 3
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    first = request.generate(prompt, stop_after=8, **options)
    second = request.generate(prompt, resume_from=first.tokens, **options)
    assert (first.report.prefill_forwards, second.report.prefill_forwards) == (1, 0)
    assert second.report.prefill_tokens == 0
    whole = joined([first.report, second.report], second.tokens, 1.0, None)
    assert (second.report.cached_tokens, whole.cached_tokens) == (len(prompt), 0)
    assert second.report.steps == second.report.forward_passes


def test_tenants_share_no_cached_tokens() -> None:
    request, prompt = engine(), tiny.prompt(40)
    whole = [
        [request.generate(prompt, max_new_tokens=4, tenant=tenant) for _ in range(2)]
        for tenant in ("", "one", "two")
    ]
    assert [[each.report.cached_tokens for each in pair] for pair in whole] == [[0, 39]] * 3
    go, going = threading.Event(), threading.Event()

    def on_step(*inputs: Any) -> None:
        going.set()
        assert go.wait(20)

    handle = request.submit(
        tiny.prompt(40, seed=8), max_new_tokens=9, ignore_eos=True, tenant="one", on_step=on_step
    )
    going.wait(20)
    other = request.submit(tiny.prompt(40, seed=8), max_new_tokens=3, tenant="two")
    same = request.submit(tiny.prompt(40, seed=8), max_new_tokens=3, tenant="one")
    go.set()
    assert other.result().report.cached_tokens == 0
    assert same.result().report.cached_tokens == 39
    assert handle.result().tokens[:3] == other.result().tokens == same.result().tokens


def test_memory_is_proportional_to_the_tokens_of_running_texts() -> None:
    model = tiny.model("llama", dtype=FLOAT64, max_position_embeddings=6000)
    request = Engine(model, None, None, max_batch_size=8)
    request.generate([tiny.prompt(20, seed=n) for n in range(8)], max_new_tokens=8)
    prompt, sizes = tiny.prompt(4760), list[int]()

    def on_step(number: int, step: Any) -> None:
        session = request.scheduler.session
        if session is not None:  # not after the last step
            sizes.append(sum(cache.bytes for cache in session.caches.values()))

    request.generate(prompt, max_new_tokens=8, ignore_eos=True, on_step=on_step)
    needed = (4760 + 8) * slot_bytes(model.config, FLOAT64)
    assert needed <= max(sizes) <= 1.3 * needed
    assert request.scheduler.session is None
    assert request.prefix_cache.bytes <= 1.3 * needed
    request.prefix_cache.max_bytes = 0
    request.generate(tiny.prompt(5), max_new_tokens=2)
    request.prefix_cache.clear()
    assert request.prefix_cache.bytes == 0


def filled(length: int) -> SequenceCache:
    cache, part = SequenceCache(length), torch.zeros(1, 2, length, 4)
    cache.write(0, part, part)
    cache.pending = length
    cache.commit(range(length))
    return cache


def test_the_least_recently_used_texts_are_evicted_first() -> None:
    texts = [[name] * 20 for name in range(5)]
    cache = PrefixCache(3 * filled(20).bytes)
    for text in texts[:3]:
        cache.keep(text, "", filled(20))
    assert (reused := cache.take([*texts[0][:16], 9, 9, 9], "", 30, ())) and reused.length == 16
    cache.keep(texts[0], "", filled(20))
    cache.keep(texts[3], "", filled(20))
    assert [cache.export(text) is not None for text in texts] == [True, False, True, True, False]
    pin = cache.pin(texts[2])
    for text in (texts[4], texts[1]):
        cache.keep(text, "", filled(20))
    assert cache.export(texts[2]) is not None
    cache.unpin(pin)
    cache.keep(texts[0], "", filled(20))
    assert cache.export(texts[2]) is None
    assert cache.bytes <= cache.max_bytes
    cache.keep([7] * 200, "", filled(200))  # does not fit at all
    assert cache.export([7] * 200) is None


@pytest.mark.parametrize("tokens", ["a text of some length", None, [[1] * 20], torch.ones(20)])
def test_a_pin_takes_token_ids_alone(tokens: Any) -> None:
    with pytest.raises(InputError, match="expected token ids"):
        PrefixCache().pin(tokens)


@pytest.mark.parametrize("length", [1, 15, 16, 40])
def test_texts_that_begin_with_a_pin_stay_within_the_limit(length: int) -> None:
    cache = PrefixCache(max_bytes=20_000)
    cache.pin(range(length))
    for number in range(20):
        size = 1, 1, length + 60, 8
        text = [*range(length), *range(1000 * number, 1000 * number + 60)]
        cache.insert(text, {0: (torch.zeros(size), torch.zeros(size))})
        assert cache.bytes <= 20_000


def test_a_pinned_text_stays_cached_for_all_its_questions() -> None:
    request, document = engine(), tiny.prompt(60)
    request.prefix_cache.max_bytes = 0
    pin = request.prefix_cache.pin(document)
    request.prefill(document)
    for seed in range(3):
        question = tiny.prompt(6, seed=seed)
        result = request.generate([*document, *question], max_new_tokens=5)
        assert result.report.cached_tokens >= 60
        assert result.tokens == fresh().generate([*document, *question], max_new_tokens=5).tokens
        assert request.prefix_cache.export(document) is not None
    assert request.generate(document[:30], max_new_tokens=5).report.cached_tokens == 29
    assert request.prefix_cache.export(document) is not None
    layers = request.prefix_cache.export(document)
    assert layers is not None
    other = engine()
    other.prefix_cache.insert(document, layers)
    assert other.generate([*document, 5], max_new_tokens=5).report.cached_tokens == 60
    request.prefix_cache.unpin(pin)
    assert request.prefix_cache.export(document) is None


def test_a_pinned_text_is_evicted_for_one_that_has_no_other_memory() -> None:
    limit, sizes = 500 * slot_bytes(tiny.model().config, FLOAT64), list[int]()
    request, texts = engine().with_limits(8, kv_memory=limit), [[5] * 120, [6] * 150, [7] * 300]

    def on_step(*_: object) -> None:
        session, held = request.scheduler.session, request.prefix_cache.bytes
        sizes.append(held + sum(each.bytes for each in session.caches.values()) if session else 0)

    pins = [request.prefix_cache.pin(text) for text in texts[:2]]
    turns = [[*texts[n], *[9 + k] * 6] for k, n in enumerate([0, 1, 0, 1, 2, 0])]
    results = [request.generate(text, max_new_tokens=3, on_step=on_step) for text in turns]
    assert [each.report.cached_tokens for each in results] == [0, 0, 120, 150, 0, 0]
    assert 300 * 1024 < max(sizes) <= limit and request.prefix_cache.export(pins[0][1])
