"""Generations and streams: their parts agree, and text arrives as soon as it is certain."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec import Engine, Sampling
from ragspec.engine.prompts import well_formed
from ragspec.errors import InputError
from ragspec.verification.tree_session import TreeSession
from tests.support import tiny
from tests.support.calls import failing, noted


def test_the_parts_of_a_generation_agree() -> None:
    engine = Engine(tiny.model("llama"), tiny.tokenizer(), drafter="context", budget=6)
    sampling = Sampling(temperature=1.0, seed=7)
    generation = engine.generate("ab ab ab", sampling, max_new_tokens=9, logprobs=2)
    assert generation.text == tiny.tokenizer().decode(generation.tokens, skip_special_tokens=True)
    assert generation.prompt_tokens == tiny.tokenizer()("ab ab ab")["input_ids"]
    assert generation.report.tokens == len(generation.tokens)
    assert generation.report.label == generation.label == "exact"
    assert generation.report.finish_reason == generation.finish_reason
    assert generation.report.seed == 7
    for token, scored in zip(generation.tokens, generation.logprobs, strict=True):
        assert scored.token == token
        assert scored.logprob <= scored.top[0][1] <= 0.0
        assert scored.top[0][1] >= scored.top[1][1]


def test_no_logprobs_unless_requested() -> None:
    engine = Engine(tiny.model("llama"), drafter=None)
    assert engine.generate([1, 2], max_new_tokens=2).logprobs is None
    bare = engine.generate([1, 2], max_new_tokens=2, logprobs=True)
    assert [scored.top for scored in bare.logprobs] == [(), ()]
    assert bare.text == ""


NEW = 24


@pytest.fixture(scope="module")
def bytewise() -> Engine:
    """Return an engine whose model writes random bytes, so with split and broken characters."""
    return Engine(tiny.model("llama", vocab_size=320), tiny.bpe_tokenizer(), drafter=None)


def test_pieces_of_a_stream_join_to_the_text_of_generate(plain: Engine, bytewise: Engine) -> None:
    for using in (plain, bytewise):
        for seed in range(3):
            sampling = Sampling(temperature=1.5, seed=seed)
            whole = using.generate("ab cd", sampling, max_new_tokens=NEW)
            stream = using.stream("ab cd", sampling, max_new_tokens=NEW)
            assert "".join(stream) == whole.text
            assert stream.result.tokens == whole.tokens
            assert stream.result.finish_reason == whole.finish_reason


def test_characters_that_tokens_split_come_out_whole(bytewise: Engine) -> None:
    """A processor forces a text whose characters have several bytes."""
    selection = "€ 漢字 😀."
    ids = bytewise.tokenizer(selection)["input_ids"]
    start = len(bytewise.tokenizer("ab")["input_ids"])

    def write(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, ids[input_ids.shape[1] - start]] = 0.0
        return forced

    stream = bytewise.stream("ab", max_new_tokens=len(ids), logits_processor=[write])
    chunks = list(stream)
    assert "".join(chunks) == selection == stream.result.text
    assert not any("�" in piece for piece in chunks)
    assert len(chunks) < len(ids)
    cut = bytewise.stream("ab", max_new_tokens=len(ids), logits_processor=[write], stop="字 😀")
    assert "".join(cut) == "€ 漢"
    assert cut.result.finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_at_the_end(plain: Engine) -> None:
    text = plain.generate("ab cd", max_new_tokens=NEW).text
    stream = plain.stream("ab cd", max_new_tokens=NEW, stop="absent text")
    assert "".join(stream) == text
    early = plain.stream("ab cd", max_new_tokens=NEW, stop="xyzzy")
    display = next(early)
    early.cancel()
    display += "".join(early)
    assert display == early.result.text
    assert early.result.finish_reason == "cancelled"


def test_a_stream_has_its_text_after_an_interrupt(plain: Engine) -> None:
    interrupt = failing(KeyboardInterrupt, (6,), lambda ids, scores: scores)
    whole = plain.generate("ab cd", max_new_tokens=NEW)
    before = plain.model.config._attn_implementation
    stream = plain.stream("ab cd", max_new_tokens=NEW, logits_processor=[interrupt])
    text = ""
    with pytest.raises(KeyboardInterrupt):
        for piece in stream:
            text += piece
    assert stream.result.text == text == whole.text[: len(text)]
    assert stream.result.tokens == whole.tokens[:5]
    assert stream.result.finish_reason == "cancelled"
    assert plain.model.config._attn_implementation == before
    assert list(stream) == []


def test_a_stream_may_be_closed_early_and_twice(plain: Engine) -> None:
    stream = plain.stream("ab cd", max_new_tokens=NEW)
    assert stream.result.tokens == []
    text = next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert stream.result.text == text
    assert stream.result.report.tokens == 1


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("steps", [0, 2, NEW])
def test_a_stream_that_is_dropped_frees_its_cache_at_once(
    steps: int, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    enter = noted(TreeSession.__enter__, opened, weakref.ref)
    monkeypatch.setattr(TreeSession, "__enter__", enter)
    before = plain.model.config._attn_implementation
    stream = plain.stream("ab cd", max_new_tokens=NEW)
    for _ in zip(range(steps), stream, strict=False):
        pass
    opened.append(weakref.ref(stream._handle))
    assert len(opened) == (2 if steps else 1)
    del stream
    assert [reference() for reference in opened] == [None] * len(opened)
    assert plain.model.config._attn_implementation == before


def test_streams_refuse_several_prompts_and_samples(plain: Engine) -> None:
    with pytest.raises(InputError, match="Use generate"):
        plain.stream(["a", "b"])
    with pytest.raises(InputError, match="n=2"):
        plain.stream("a", Sampling(temperature=1.0, n=2))
    with pytest.raises(InputError, match="tokenizer"):
        Engine(plain.model, drafter=None).stream([1, 2])


@pytest.mark.parametrize("wrong", [{"temperature": 1.0}, {}, 0, 0.7, "greedy"])
def test_a_sampling_of_another_kind_is_refused(plain: Engine, wrong: Any) -> None:
    for method in (plain.stream, plain.generate):
        with pytest.raises(InputError, match="expected a Sampling, such as"):
            method("a", wrong)


units = st.one_of(st.integers(0, 0xFF), st.integers(0xD7F0, 0x10010))


@given(st.lists(units))
def test_well_formed_text_changes_surrogates_alone(codes: list[int]) -> None:
    text = "".join(map(chr, codes))
    result = well_formed(text)
    result.encode()
    selected = [c for c in text if not 0xD800 <= ord(c) < 0xE000]
    pairs = len([c for c in result if ord(c) > 0xFFFF]) - len([c for c in text if ord(c) > 0xFFFF])
    assert len(result) == len(text) - pairs
    if len(selected) == len(text):
        assert result == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a \ud83d b", "a \ufffd b"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ufeff\ud800", "\ufeff\ufffd"),
    ],
)
def test_lone_surrogates_are_replaced_and_pairs_joined(text: str, expected: str) -> None:
    assert well_formed(text) == expected
