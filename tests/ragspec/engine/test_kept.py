"""What was read is not read again, and the text is that of a fresh reading."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.engine.kept import KeptContext
from ragspec.errors import InputError
from ragspec.sampling.settings import Sampling
from ragspec.target.causal import TreeSession
from ragspec.target.constant_width import ConstantWidthTarget
from tests.ragspec.target.test_rotary_tables import build
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
def test_turns_that_are_kept_equal_turns_that_are_read_afresh(
    architecture: str, drafter: str | None, sampling: Sampling
) -> None:
    asked, kept = engine(architecture, drafter), KeptContext()
    text = tiny.prompt(20, seed=1)
    for turn in range(6):
        fresh = asked.generate(text, sampling, max_new_tokens=12)
        found = asked.generate(text, sampling, max_new_tokens=12, kept=kept)
        assert found.tokens == fresh.tokens
        assert found.report.prompt_tokens == len(text)
        assert (found.report.kept_tokens > 0) is (turn not in (0, 5))
        # The next turn goes on, or an earlier one is put otherwise, or the beginning leaves.
        text = [*text, *found.tokens, *tiny.prompt(7, seed=turn)]
        text = text[:-19] if turn == 2 else text[4:] if turn == 4 else text


def test_only_what_is_new_is_read() -> None:
    asked, kept = engine(), KeptContext()
    first = asked.generate(tiny.prompt(30), max_new_tokens=8, kept=kept)
    # The last token that was written has not been read by the model.
    assert kept.tokens == (*tiny.prompt(30), *first.tokens[:-1])
    text = [*tiny.prompt(30), *first.tokens, 5, 6]
    read: list[int] = []
    hook = asked.model.register_forward_pre_hook(
        lambda module, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    again = asked.generate(text, max_new_tokens=4, kept=kept)
    hook.remove()
    assert read[0] == 3
    assert again.report.kept_tokens == len(text) - 3
    assert again.report.to_dict()["kept_tokens"] == len(text) - 3


def test_the_same_prompt_again_reads_its_last_token() -> None:
    asked, kept = engine(), KeptContext()
    found = [asked.generate(tiny.prompt(30), max_new_tokens=8, kept=kept) for _ in range(3)]
    assert [each.report.kept_tokens for each in found] == [0, 29, 29]
    assert found[0].tokens == found[1].tokens == found[2].tokens


@pytest.mark.parametrize("speculates", [False, True])
def test_an_interrupt_within_a_forward_keeps_what_was_committed(speculates: bool) -> None:
    asked, kept, text = engine(), KeptContext(), tiny.prompt(25)
    drafter = NoisyTrees({tuple(text): asked.generate(text, max_new_tokens=40).tokens})
    interrupted = Engine(asked.target, tiny.tokenizer(), drafter if speculates else None, budget=6)
    calls = iter(range(100))

    def interrupt(*_: Any) -> None:
        if next(calls) == 4:  # in the second layer, some steps into the text
            raise KeyboardInterrupt

    hook = asked.model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted.generate(text, max_new_tokens=40, kept=kept)
    hook.remove()
    assert len(kept.tokens) > len(text)
    longer = [*kept.tokens, 4, 5]
    fresh = asked.generate(longer, max_new_tokens=20)
    found = asked.generate(longer, max_new_tokens=20, kept=kept)
    assert found.tokens == fresh.tokens
    assert found.report.kept_tokens == len(longer) - 2


def test_a_stream_that_is_left_keeps_what_was_written() -> None:
    asked, kept = engine(), KeptContext()
    stream = asked.stream(tiny.prompt(25), max_new_tokens=40, kept=kept)
    next(stream)
    next(stream)
    with pytest.raises(InputError, match="in use by another call"):
        asked.generate(tiny.prompt(25), max_new_tokens=4, kept=kept)
    stream.close()
    written = stream.result.tokens
    assert kept.tokens == (*tiny.prompt(25), *written[:-1])
    asked.generate(tiny.prompt(25), max_new_tokens=4, kept=kept)
    del stream
    gc.collect()


def test_another_model_begins_anew() -> None:
    kept, text = KeptContext(), tiny.prompt(25)
    one = engine()
    other = Engine(tiny.model("llama", dtype=FLOAT64, seed=5), tiny.tokenizer(), None)
    one.generate(text, max_new_tokens=5, kept=kept)
    fresh = other.generate(text, max_new_tokens=5)
    found = other.generate(text, max_new_tokens=5, kept=kept)
    assert found.tokens == fresh.tokens
    assert found.report.kept_tokens == 0
    kept.clear()
    assert kept.tokens == ()
    assert other.generate(text, max_new_tokens=5, kept=kept).report.kept_tokens == 0


def test_what_cannot_be_cut_short_is_read_again() -> None:
    text = tiny.prompt(70)
    for model in (
        build("llama"),  # its rotary tables depend on the length of the prompt
        tiny.model("qwen3_next"),  # a recurrent state
        ConstantWidthTarget(tiny.model("llama")),  # forwards of one shape alone
    ):
        kept, asked = KeptContext(), Engine(model, None, None)
        for length in (40, 66):
            fresh = asked.generate(text[:length], max_new_tokens=5)
            found = asked.generate(text[:length], max_new_tokens=5, kept=kept)
            assert found.tokens == fresh.tokens
            assert found.report.kept_tokens == 0


def test_a_kept_context_serves_one_text_at_a_time() -> None:
    asked, kept = engine(), KeptContext()
    for prompts, sampling in (([[1, 2], [3, 4]], Sampling()), ([1, 2], Sampling(n=2, seed=1))):
        with pytest.raises(InputError, match="expected one prompt and n=1"):
            asked.generate(prompts, sampling, max_new_tokens=2, kept=kept)
    with pytest.raises(InputError, match="expected a KeptContext"):
        asked.generate([1, 2], max_new_tokens=2, kept="yes")  # type: ignore[arg-type]
    failed: list[BaseException] = []

    def ask(seed: int) -> None:
        try:
            asked.generate(tiny.prompt(20, seed=seed), max_new_tokens=30, kept=kept)
        except InputError as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = asked.generate(tiny.prompt(20, seed=9), max_new_tokens=9)
    assert asked.generate(tiny.prompt(20, seed=9), max_new_tokens=9, kept=kept).tokens == (
        fresh.tokens
    )
    assert all("in use" in str(error) for error in failed)


def test_a_session_is_entered_once_for_many_calls_in_a_row() -> None:
    asked, kept = engine(), KeptContext()
    entered: list[str] = []
    prompt = tiny.prompt(20)
    with pytest.MonkeyPatch.context() as patched:
        enter, leave = TreeSession.__enter__, TreeSession.__exit__

        def entering(self: TreeSession) -> TreeSession:
            entered.append("enter")
            return enter(self)

        def leaving(self: TreeSession, *given: Any) -> None:
            entered.append("leave")
            leave(self, *given)

        patched.setattr(TreeSession, "__enter__", entering)
        patched.setattr(TreeSession, "__exit__", leaving)
        with kept.held():
            found = asked.generate(prompt, kept=kept, max_new_tokens=12, pause=4, ignore_eos=True)
            while found.finish_reason == "paused":
                options: dict[str, Any] = {"max_new_tokens": 12, "pause": 4, "ignore_eos": True}
                found = asked.generate(prompt, kept=kept, written=found.tokens, **options)
            assert entered == ["enter"]
        assert entered == ["enter", "leave"]
    assert found.tokens == asked.generate(prompt, max_new_tokens=12, ignore_eos=True).tokens
    again = asked.generate(prompt, kept=kept, max_new_tokens=12, ignore_eos=True)
    assert again.tokens == found.tokens


def test_a_text_that_goes_on_is_drafted_for_from_its_first_forward() -> None:
    asked, kept = engine(drafter="context"), KeptContext()
    prompt = tiny.prompt(40)[:20] * 3
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "kept": kept}
    first = asked.generate(prompt, pause=8, **options)
    second = asked.generate(prompt, written=first.tokens, **options)
    assert (first.report.prefill_forwards, second.report.prefill_forwards) == (1, 0)
    assert second.report.prefill_tokens == 0
    assert second.report.steps == second.report.forward_passes


def test_a_session_that_serves_one_call_is_left_with_it() -> None:
    """A recurrent state cannot be cut short: held ones would pile up, a cache for each call."""
    asked = Engine(tiny.model("qwen3_next"), tiny.tokenizer(), None)
    kept, opened = KeptContext(), list[weakref.ref[Any]]()
    with pytest.MonkeyPatch.context() as patched, kept.held():
        open_session = type(asked.target).open

        def opening(self: Any, *given: Any) -> Any:
            session = open_session(self, *given)
            opened.append(weakref.ref(session))
            return session

        patched.setattr(type(asked.target), "open", opening)
        for turn in range(3):
            asked.generate(tiny.prompt(12, seed=turn), kept=kept, max_new_tokens=4)
        gc.collect()
        assert len(opened) == 3
        assert all(session() is None for session in opened)
