"""Text output: pieces join to the decoding of all tokens, up to the first stop string."""

import copy
import gc
import weakref
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragspec.pipelines.openai import OpenAIReply
from ragspec.sampling.decoding import decoder_of
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.text_output import PlacedToken, TextOutput
from tests.support import tiny

KINDS = ("byte-level", "metaspace", "byte-fallback", "word-piece")
SPECIAL = "<eos>"
PIECES = [*".?!,'ntmsver", "##s", "##t", "##n", "##'", "'s", "n't", "'ve", "'re", "it", "go"]


def word_piece() -> Any:
    """Return a tokenizer of words and punctuation that cleans up its spaces."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *dict.fromkeys(PIECES), "STOP"])}
    backend: Tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL, clean_up_tokenization_spaces=True
    )


@cache
def tokenizer(kind: str) -> Any:
    """Return a tokenizer of bytes, of words, of letters or bytes, or of parts of words."""
    if kind == "byte-level":
        return tiny.bpe_tokenizer()
    if kind == "word-piece":
        return word_piece()
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


def encode(text: str, kind: str = "byte-level") -> list[int]:
    return list(tokenizer(kind)(text, add_special_tokens=False)["input_ids"])


def ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Return any tokens of a tokenizer, special ones and broken characters among them."""
    return st.lists(st.integers(0, len(tokenizer(kind)) - 1), max_size=16)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_token_are_those_of_its_text(kind: str) -> None:
    decoder = decoder_of(tokenizer(kind))
    for token in range(len(tokenizer(kind))):
        raw = decoder.piece_bytes(token)
        assert raw is not None and raw.decode(errors="replace") == decoder.piece(token)
        assert kind != "byte-fallback" or token >= 256 or raw == bytes([token])
    backend = Tokenizer(models.WordLevel({"\ufffd": 0}, "\ufffd"))
    mark: Any = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert decoder_of(mark).piece_bytes(0) == " \ufffd".encode()


def test_a_byte_with_the_name_of_a_better_token_is_not_the_best() -> None:
    byte = PlacedToken(TokenLogprob(97, -5.0, ((257, -0.1),)), 0, "a")
    reply = OpenAIReply(False, "x", tokenizer("byte-fallback")).logprobs([byte])
    assert reply["top_logprobs"] == [{"a": -0.1}]


def parts(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in sizes:
        chunks.append(tokens[start : start + size])
        start += size
    return [*chunks, tokens[start:]]


def pieces(output: TextOutput, tokens: list[int]) -> list[str]:
    """Return the piece that each token gives, up to the one that completes a stop string."""
    result: list[str] = []
    for token in tokens:
        output.push([token])
        result.append(output.piece())
        if output.stopped:
            break
    return result


def decoded(kind: str, prompt: list[int], tokens: list[int], skip: bool = True) -> str:
    """Return the text of tokens after a prompt by its definition."""
    decode = partial(tokenizer(kind).decode, skip_special_tokens=skip)
    before = str(decode(prompt))
    assume(not before.endswith("\ufffd"))  # it may be half of a character
    return str(decode([*prompt, *tokens])[len(before) :])


SIZES = st.lists(st.integers(0, 4), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=SIZES)
@settings(max_examples=200, deadline=None)
def test_pieces_join_to_the_decoding_of_the_whole(
    kind: str, data: st.DataObject, sizes: list[int]
) -> None:
    """Any prompt, any tokens, in pieces of any size; no piece is ever taken back."""
    prompt, tokens = data.draw(ids(kind)), data.draw(ids(kind))
    output = TextOutput(tokenizer(kind), prompt)
    whole = decoded(kind, prompt, tokens)
    written = ""
    for part in parts(tokens, sizes):
        output.push(part)
        written += output.piece()
        assert whole.startswith(written)
        assert output.text.startswith(written)
    assert output.text == whole == written + output.piece(ends=True)
    assert output.piece(ends=True) == ""


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), sizes=SIZES)
@settings(max_examples=200, deadline=None)
def test_the_first_stop_cuts_the_text(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    """Stops are taken from the whole text; those that end inside a token or character too."""
    prompt, tokens = data.draw(ids(kind)), data.draw(ids(kind))
    whole = decoded(kind, prompt, tokens)
    stops = []
    for _ in range(data.draw(st.integers(1, 2))):
        start = data.draw(st.integers(0, max(0, len(whole) - 1)))
        stops.append(whole[start : start + data.draw(st.integers(1, 5))] or "never")
    stops = [stop for stop in stops if "\ufffd" not in stop] or ["never"]
    output = TextOutput(tokenizer(kind), prompt, stops)
    written = pieces(output, tokens)
    read = len(written)
    output.finish()
    whole = "".join([*written, output.piece(ends=True)])
    known = decoded(kind, prompt, tokens[:read])
    places = [place for stop in stops if (place := known.find(stop)) >= 0]
    assert output.stopped == bool(places)
    assert whole == output.text == known[: min(places, default=len(known))]
    other = TextOutput(tokenizer(kind), prompt, stops)  # the same by other pieces
    joined = ""
    for part in parts(tokens[:read], sizes):
        other.push(part)
        joined += other.piece()
    assert joined + other.piece(ends=True) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(
    data=st.data(), stop=st.sampled_from([SPECIAL, "t" + SPECIAL, SPECIAL + "a", "go" + SPECIAL])
)
@settings(max_examples=100, deadline=None)
def test_a_stop_may_be_made_of_special_tokens(kind: str, data: st.DataObject, stop: str) -> None:
    tokens = data.draw(ids(kind))
    eos = tokenizer(kind).eos_token
    stop = stop.replace(SPECIAL, eos)
    output = TextOutput(tokenizer(kind), (), [stop])
    read = len(pieces(output, tokens))
    output.finish()
    spelled = decoded(kind, [], tokens[:read], skip=False)
    assert output.stopped == (stop in spelled)
    if output.stopped and kind == "byte-level" and "\ufffd" not in spelled:
        assert output.text == spelled[: spelled.find(stop)].replace(eos, "")
    elif not output.stopped:
        assert output.text == decoded(kind, [], tokens[:read])


@pytest.mark.parametrize("ends", [[" draft", SPECIAL + "a"], [SPECIAL + "a", " draft"]])
def test_special_tokens_that_are_left_out_hide_no_other_stop(ends: list[str]) -> None:
    tokens, eos = encode("a dra"), tokenizer("byte-level").eos_token_id
    output, written = TextOutput(tokenizer("byte-level"), (), ends), []
    for token in [*tokens, eos, *encode("ft of")]:
        assert output.completes_stop([token]) == (output.stopped or token == encode("ft")[-1])
        output.push([token])
        written.append(output.piece())
    assert output.stopped and output.text == "".join(written) == "a"


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_tokens_begin_where_the_text_of_those_before_ends(kind: str, data: st.DataObject) -> None:
    prompt, tokens = data.draw(ids(kind)), data.draw(ids(kind))
    output = TextOutput(tokenizer(kind), prompt, placed=True)
    output.push(tokens)
    assert len(output.starts) == len(tokens) + 1
    assert output.starts == sorted(output.starts)
    if kind == "byte-level":
        befores = [decoded(kind, prompt, tokens[:at]) for at in range(len(tokens) + 1)]
        assert output.starts == [len(before.rstrip("\ufffd")) for before in befores]


def test_the_space_of_a_first_word_is_part_of_the_text() -> None:
    prompt, word = encode("a draft", "metaspace"), encode("the", "metaspace")
    output = TextOutput(tokenizer("metaspace"), prompt, [" the"])
    output.push(word)
    assert output.stopped and output.text == ""
    assert tokenizer("metaspace").decode([*prompt, *word]) == "a draft the"


def test_a_stop_that_a_token_of_the_next_character_completes_is_found() -> None:
    backend: Tokenizer = Tokenizer(models.BPE({"a": 0, "Ġâ": 1, ":": 2}, []))
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert fast.decode([2, 1]) == ": \ufffd"
    output = TextOutput(fast, (), [": "])
    output.push([0, 2])
    assert not output.stopped and output.piece() == "a"
    output.push([1])
    assert output.stopped and output.text == "a" and output.piece() == ""


def test_spaces_that_a_tokenizer_removes_are_held_back() -> None:
    words = ["it", "'s", "go", ".", "n't", "STOP", "it"]
    tokens = [tokenizer("word-piece").convert_tokens_to_ids(word) for word in words]
    output = TextOutput(tokenizer("word-piece"), (), ["STOP"])
    written = pieces(output, tokens)
    assert "".join([*written, output.piece(ends=True)]) == "it's go.n't "
    assert output.stopped and not any("STOP" in piece for piece in written)


def test_spaces_that_three_tokens_remove_are_held_back() -> None:
    tokens = tokenizer("word-piece").convert_tokens_to_ids(["go", "n", "'", "t"])
    output = TextOutput(tokenizer("word-piece"), tokens[:2])
    for token, piece in zip(tokens[2:], ("", "t"), strict=True):
        output.push([token])
        assert output.piece() == piece  # "go n" becomes "gon't"


def test_only_the_beginning_of_a_stop_is_held_back() -> None:
    output = TextOutput(tokenizer("byte-level"), (), ["\nAnswer", "dog"])
    output.push(encode("the cat\n"))
    assert output.piece() == "the cat"
    output.push(encode("An"))
    assert output.piece() == ""
    output.push(encode("d a d"))
    assert output.piece() == "\nAnd a "
    assert output.piece(ends=True) == "d"


def test_tokenizers_with_another_decode_are_called() -> None:
    class current(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return "x" * len(args[0] if args else kwargs["token_ids"])

    output = TextOutput(current(tokenizer_object=tokenizer("metaspace").backend_tokenizer))
    output.push([1, 2])
    assert output.piece() == "xx"
    letters = TextOutput(lambda tokens: bytes(tokens).decode("utf-8", "replace"))
    letters.push("€".encode()[:2])
    assert (letters.piece(), letters.text) == ("", "\ufffd")
    letters.push("€".encode()[2:])
    assert letters.piece() == "€"


@pytest.mark.parametrize("kind", ["word-piece", "byte-level"])
def test_decoders_keep_no_tokenizer_alive(kind: str) -> None:
    local = copy.deepcopy(tokenizer(kind))
    output = TextOutput(local, (), ["x"])
    output.push([1, 2])
    assert output.text
    gone = weakref.ref(local)
    del local, output
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_that_the_prompt_begins_is_part_of_the_text(kind: str) -> None:
    tokens = encode("a€", kind)
    output = TextOutput(tokenizer(kind), tokens[:-1])
    output.push([*tokens[-1:], *encode("b", kind)[-1:]])
    assert output.text == "€b"


def test_an_incomplete_character_ends_with_the_next_one() -> None:
    output = TextOutput(tokenizer("byte-level"))
    output.push(encode("€")[:1])
    assert output.piece() == ""
    output.push(encode("ok"))
    assert output.piece() == "\ufffdok"


def test_completes_stop_does_not_change_the_text() -> None:
    output = TextOutput(tokenizer("byte-level"), (), ["xyz"])
    output.push(encode("abc€")[:-1])
    assert output.completes_stop([*encode("€")[-1:], *encode("xyz")]) and not output.stopped
    assert not output.completes_stop(encode("xy"))
    output.push([*encode("€")[-1:], *encode("def")])
    assert output.text == "abc€def"
