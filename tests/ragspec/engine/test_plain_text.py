"""Texts that spell out special tokens are tokenized as plain text, and come out as they are."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from ragspec import Engine, Sampling
from ragspec.engine.plain_text import encode_text, mark_special_tokens
from ragspec.pipelines.answering.prompt import build_prompt
from ragspec.retrievers import Document, Hit, Passage
from tests.ragspec.sampling.test_text_output import KINDS, tokenizer
from tests.support import tiny

ROLE = "<|role|>"  # special, and not one of `all_special_tokens`
PARTS = st.lists(st.sampled_from(["<eos>", "<", "eos>", "a draft ", "the", ".", " "]), max_size=8)


def with_role() -> Any:
    """Return a byte-level tokenizer with a role token."""
    tokens = copy.deepcopy(tiny.bpe_tokenizer())
    tokens.add_tokens([AddedToken(ROLE, special=True)], special_tokens=True)
    assert ROLE not in tokens.all_special_tokens
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@given(before=PARTS, inside=PARTS, after=PARTS)
@settings(max_examples=60, deadline=None)
def test_only_the_special_tokens_around_a_text_count(
    kind: str, before: list[str], inside: list[str], after: list[str]
) -> None:
    """Texts of a template stand before and after a text that may spell out special tokens."""
    tokens = tokenizer(kind)
    name = tokens.eos_token
    first, plain, last = ("".join(part).replace("<eos>", name) for part in (before, inside, after))
    encoded = encode_text(tokens, first + mark_special_tokens(plain, tokens) + last)
    assert encoded.text == first + plain + last
    special = [at for at, token in enumerate(encoded.ids) if token == tokens.eos_token_id]
    if name not in first + plain[: len(name) - 1] and name not in plain[1 - len(name) :] + last:
        assert not special
    places = [encoded.offsets[at] for at in special]
    assert all(encoded.text[a:b].strip() == name for a, b in places)
    assert not [a for a, b in places if len(first) <= a and b <= len(first) + len(plain)]
    if kind == "byte-level":
        assert tokens.decode(encoded.ids) == encoded.text
        for token, (a, b) in zip(encoded.ids, encoded.offsets, strict=True):
            assert tokens.decode([token]) == encoded.text[a:b]


def test_texts_without_special_tokens_are_tokenized_as_ever() -> None:
    tokens = with_role()
    text = "a draft < role | >"
    assert mark_special_tokens(text, tokens) == text
    assert list(encode_text(tokens, text).ids) == tokens(text)["input_ids"]


def test_tokens_that_are_added_later_count() -> None:
    tokens = copy.deepcopy(tiny.bpe_tokenizer())
    assert mark_special_tokens("<|late|>", tokens) == "<|late|>"
    tokens.add_tokens([AddedToken("<|late|>", special=True)], special_tokens=True)
    assert mark_special_tokens("<|late|>", tokens) != "<|late|>"


@pytest.mark.parametrize("chat", [False, True])
def test_a_passage_with_control_tokens_is_quoted_as_it_stands(chat: bool) -> None:
    """Its tokens are those of its characters: it can be drafted from, and cited."""
    tokens = with_role()
    if chat:
        tokens.chat_template = tiny.tokenizer(chat=True).chat_template
    text = f"The draft ends with {tokens.eos_token} or {ROLE}user."
    hit = Hit(Document("d", "d", text), Passage(0, 0, len(text), "d", text), 1.0)
    prompt = build_prompt(tokens, f"What is {ROLE}?", [hit])
    assert f"What is {ROLE}?" in prompt.text and text in prompt.text
    start, end, _, _ = prompt.spans[0]
    assert prompt.chars[0][0][0] == 0 and prompt.chars[0][-1][1] == len(text)
    assert tokens.decode(prompt.token_ids[start:end]) == text
    assert tokens.convert_tokens_to_ids(ROLE) not in prompt.token_ids
    assert tokens.eos_token_id not in prompt.token_ids[start:end]


@pytest.mark.parametrize("drafter", [None, "context"])
def test_a_stop_of_special_tokens_ends_a_text_that_ignores_them(drafter: str | None) -> None:
    tokens = with_role()
    engine = Engine(tiny.model("llama", vocab_size=len(tokens), seed=4), tokens, drafter=drafter)
    bias = {tokens.convert_tokens_to_ids(ROLE): 9.0}
    settings = Sampling(temperature=1.0, seed=6, logit_bias=bias)
    free = engine.generate("A draft", settings, max_new_tokens=40, ignore_eos=True)
    at = free.tokens.index(tokens.convert_tokens_to_ids(ROLE))
    assert at + 1 < len(free.tokens) and ROLE not in free.text
    stopped = engine.generate("A draft", settings, max_new_tokens=40, ignore_eos=True, stop=[ROLE])
    assert stopped.tokens == free.tokens[: at + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.text == tokens.decode(free.tokens[:at])
