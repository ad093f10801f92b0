"""Text from tokens as they come: pieces join to the whole, by the fast way and by the plain one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragspec.sampling.text_output import TextOutput
from tests.support import tiny

TEXTS = st.text(alphabet="the dra ft.\nkê€é漢😀 ", min_size=1, max_size=24)
KINDS = ("byte-level", "metaspace", "byte-fallback")
SPECIAL = "<eos>"


@cache
def tokenizer(kind: str) -> Any:
    """Return a byte-level tokenizer, one of words, or one of letters that falls back to bytes."""
    if kind == "byte-level":
        return tiny.bpe_tokenizer()
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz.", "▁the", "▁draft", "▁a", "▁▁"]
    backend: Tokenizer
    if kind == "metaspace":
        vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
        backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
        backend.decoder = decoders.Metaspace()
    else:
        chunks_of_text = [f"<0x{byte:02X}>" for byte in range(256)] + words
        vocabulary = {piece: i for i, piece in enumerate(chunks_of_text)}
        backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL, clean_up_tokenization_spaces=False
    )


def slow(kind: str, skip: bool) -> TextOutput:
    """Return the output that decodes without the library's stream."""
    fast = tokenizer(kind)
    return TextOutput(lambda ids: str(fast.decode(ids, skip_special_tokens=skip)))


def encode(text: str, kind: str = "byte-level") -> list[int]:
    return list(tokenizer(kind)(text, add_special_tokens=False)["input_ids"])


def chunks(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(tokens[start : start + size])
        start += size
    return [*parts, tokens[start:]]


SIZES = st.lists(st.integers(0, 4), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, sizes=SIZES, skip=st.booleans(), ends=st.lists(st.integers(0, 24), max_size=3))
@settings(max_examples=60, deadline=None)
def test_chunks_join_to_the_whole_and_have_no_half_character(
    kind: str, text: str, sizes: list[int], skip: bool, ends: list[int]
) -> None:
    tokens = encode(text, kind)
    for place in ends if kind != "byte-fallback" else ():  # where it may cut a run of bytes
        tokens.insert(place, tokenizer(kind).eos_token_id)
    output = TextOutput(tokenizer(kind), skip_special_tokens=skip)
    parts = [output.push(part) for part in chunks(tokens, sizes)]
    whole = tokenizer(kind).decode(tokens, skip_special_tokens=skip)
    for count in range(len(parts)):
        assert whole.startswith("".join(parts[: count + 1]))
    assert "".join([*parts, output.flush()]) == whole == output.text
    if not ends:
        assert not any("�" in piece for piece in parts)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=SIZES, skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_both_ways_give_the_same_chunks_of_any_tokens(
    kind: str, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    """Also where bytes are no UTF-8. There byte fallback may change earlier text, so that the
    pieces do not join to the decoded whole; byte-level tokenizers never do."""
    ids = st.integers(0, len(tokenizer(kind)) - 1)
    tokens = data.draw(st.lists(ids, max_size=16))
    fast = TextOutput(tokenizer(kind), skip_special_tokens=skip)
    plain = slow(kind, skip)
    assert fast._backend is not None and plain._backend is None
    for part in chunks(tokens, sizes):
        assert fast.push(part) == plain.push(part)
    assert fast.flush() == plain.flush()
    if kind != "byte-fallback":
        assert fast.text == tokenizer(kind).decode(tokens, skip_special_tokens=skip)


def test_byte_fallback_that_changes_earlier_text_goes_on() -> None:
    output, plain = TextOutput(tokenizer("byte-fallback")), slow("byte-fallback", True)
    word = encode("a", "byte-fallback")
    for token in (0x41, 0xE4, *word, *word):
        assert output.push([token]) == plain.push([token])
    assert output.text.endswith("a")


def test_tokenizers_that_decode_otherwise_are_not_taken_for_fast() -> None:
    class current(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return "x" * len(args[0] if args else kwargs["token_ids"])

    local = current(tokenizer_object=tokenizer("metaspace").backend_tokenizer)
    assert TextOutput(local).push([1, 2]) == "xx"
    backend = Tokenizer(models.WordLevel({"do": 0, "n't": 1, "[U]": 2}, "[U]"))
    cleaning = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    output = TextOutput(cleaning)
    assert [output.push([0]), output.push([1])] == ["do", "n't"]


def test_characters_are_split_over_tokens_in_these_tests() -> None:
    assert len(encode("€")) == 3
    assert len(encode("😀")) == 4
    assert len(encode("token")) < 5


def test_what_was_held_back_comes_out_as_it_is() -> None:
    output = TextOutput(tokenizer("byte-level"))
    assert output.push(encode("a€")[:-1]) == ""
    assert output.flush() == "a�"
    assert output.flush() == ""


def test_a_broken_character_does_not_hold_the_text_for_ever() -> None:
    output = TextOutput(tokenizer("byte-level"))
    assert output.push(encode("€")[:1]) == ""
    assert output.push(encode("ok")) == "�ok"


def test_a_fork_does_not_disturb_its_origin() -> None:
    for output in (TextOutput(tokenizer("byte-level")), slow("byte-level", True)):
        output.push(encode("abc€")[:-1])
        fork = output.fork()
        assert fork.push([*encode("€")[-1:], *encode("xyz")]) == "abc€xyz"
        assert output.text == ""
        assert output.push([*encode("€")[-1:], *encode("def")]) == "abc€def"
        assert fork.text == "abc€xyz"
