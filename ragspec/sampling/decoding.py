"""Incremental decoding of tokens: what later tokens can change is kept apart."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, proxy

from ragspec.types import Tokenizer

_REPLACEMENT = "\ufffd"
Decodes: TypeAlias = "Tokenizer | Callable[[list[int]], str]"
_CONTEXT, _LONGEST = 6, 14  # tokens before new ones that are decoded with them
# The end of a text whose spaces `clean_up_tokenization` may remove when more follows.
_UNDECIDED = re.compile(r" [ ']*(?:n[ ']*|[vr])?$")
# The bytes of the characters by which byte-level tokenizers name them: first the visible ones.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTES = {chr(byte): byte for byte in _VISIBLE}
_BYTES |= {chr(256 + number): byte for number, byte in enumerate(_OTHERS)}


class Decoder:
    """Decodes tokens with a transformers tokenizer, another tokenizer, or a function.

    Attributes:
        size: Tokens of the vocabulary of a transformers tokenizer, else 0.
        special: The special tokens as they are written.
        skipped: The ids of those.
        byte_ids: Tokens of single bytes. A run of them is decoded as a whole, so that its last byte
            may change all its characters.
        clean: Removes spaces before punctuation, if the tokenizer does.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

        self.size = 0
        self.special: tuple[str, ...] = ()
        self.skipped: frozenset[int] = frozenset()
        self.byte_ids: frozenset[int] = frozenset()
        self.clean: Callable[[str], str] | None = None
        self._decode: Callable[..., Any] = getattr(tokenizer, "decode", tokenizer)
        self._options: dict[str, Any] = {}
        self._skips = hasattr(tokenizer, "decode")
        self._name_of: Callable[[int], Any] = str
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            return
        self.size, special = len(tokenizer), special_tokens(tokenizer)
        self.special, self.skipped = tuple(special), frozenset(special.values())
        vocabulary = tokenizer.get_vocab()
        names = (f"<0x{byte:02X}>" for byte in range(256))
        self.byte_ids = frozenset(vocabulary[name] for name in names if name in vocabulary)
        # Decoders are kept by tokenizer, so none may keep its tokenizer.
        kind, weak = type(tokenizer), proxy(tokenizer)
        self._decode = partial(kind.decode, weak)
        self._name_of = partial(kind.convert_ids_to_tokens, weak)
        custom = tokenizer.is_fast and kind._decode is not PreTrainedTokenizerFast._decode
        if custom or kind.decode is not PreTrainedTokenizerBase.decode:
            return
        cleans = bool(tokenizer.clean_up_tokenization_spaces)
        if tokenizer.is_fast:
            backend: Any = tokenizer.backend_tokenizer
            self._decode = backend.decode
            forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
            is_bpe = type(backend.model).__name__ == "BPE"
            cleans = cleans and (not is_bpe or bool(getattr(tokenizer, forced, False)))
        else:
            self._options = {"clean_up_tokenization_spaces": False}
        if cleans:
            self.clean = partial(kind.clean_up_tokenization, weak)

    def piece(self, token: int, *, skip: bool = False) -> str:
        """Return a token's text inside a longer one: some tokenizers drop a space at its start."""
        alone, twice = self.decode([token], skip), self.decode([token, token], skip)
        return (twice.removeprefix(alone) if twice.startswith(alone) else "") or alone

    def piece_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token's text, also of a part of a character; None if unknown."""
        text = self.piece(token)
        if _REPLACEMENT not in text or _REPLACEMENT in (name := str(self._name_of(token))):
            return text.encode()  # a token may be that character itself
        if token in self.byte_ids:
            return bytes([int(name[3:5], 16)])
        values = [_BYTES.get(character, -1) for character in name]
        raw = bytes(values) if min(values, default=-1) >= 0 else b""
        return raw if raw.decode(errors="replace") == text else None

    def decode(self, tokens: list[int], skip: bool) -> str:
        """Return the text of tokens, before spaces are removed; `skip` leaves special ones out."""
        if not tokens:
            return ""
        if not self._skips:
            return str(self._decode(tokens))
        return str(self._decode(tokens, skip_special_tokens=skip, **self._options))


def special_tokens(tokenizer: object) -> dict[str, int]:
    """Return the special tokens of a transformers tokenizer as they are written, with their ids.

    Those that were added as special count, too: `all_special_tokens` lacks most role tokens.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(each.content): int(token) for token, each in added.items() if each.special}
    names = getattr(tokenizer, "all_special_tokens", [])
    ids = getattr(tokenizer, "all_special_ids", [])
    return special | {name: token for name, token in zip(names, ids, strict=False) if name}


_decoders: WeakKeyDictionary[Any, Decoder] = WeakKeyDictionary()


def decoder_of(tokenizer: Decodes) -> Decoder:
    """Return the decoder of a tokenizer, kept for those of transformers until they grow."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return Decoder(tokenizer)
    decoder = _decoders.get(tokenizer)
    if decoder is None or decoder.size != len(tokenizer):
        decoder = _decoders[tokenizer] = Decoder(tokenizer)
    return decoder


class Decoding:
    """The text of tokens that follow a prompt.

    New tokens are decoded together with a few before them, since many tokenizers join, strip or
    split characters across tokens.

    Attributes:
        text: The part that later tokens cannot change.
    """

    def __init__(self, decoder: Decoder, skip: bool, prompt: Sequence[int]) -> None:
        self.text = ""
        self._decoder, self._skip = decoder, skip
        # Tokens of context, then those that are not in the text.
        self._window, context = self._context(prompt)
        if context.endswith(_REPLACEMENT):  # new tokens may complete this character
            end = self._run_start()
            run = end < len(self._window)
            context = decoder.decode(self._window[:end], skip) if run else context[:-1]
        self._settled = len(context)  # characters of the window that are in the text

    @property
    def whole(self) -> str:
        """The text, with the part that later tokens may change."""
        window = self._decoder.decode(self._window, self._skip)
        return self.text + self._cleaned(window, len(window))

    @property
    def length(self) -> int:
        """The characters of the text, but incomplete ones at its end."""
        return len(self.whole.rstrip(_REPLACEMENT))

    def push(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        window, decoder = self._window, self._decoder
        window.extend(tokens)
        end = self._run_start() if decoder.byte_ids else len(window)
        whole = decoder.decode(window if end == len(window) else window[:end], self._skip)
        settled = len(whole.rstrip(_REPLACEMENT))
        if decoder.clean is not None and (undecided := _UNDECIDED.search(whole, 0, settled)):
            settled = undecided.start()
        if settled <= self._settled or not (piece := self._cleaned(whole, settled)):
            return
        self.text += piece
        self._settled = settled
        if settled == len(whole) and end == len(window) > _LONGEST:
            self._window, context = self._context(window)
            self._settled = len(context)

    def fork(self) -> "Decoding":
        """Return an independent copy."""
        other = object.__new__(Decoding)  # five times as fast as copy.copy
        other.__dict__.update(self.__dict__, _window=list(self._window))
        return other

    def _run_start(self) -> int:
        """Return where the run of bytes at the end of the window begins."""
        window, end = self._window, len(self._window)
        for at in range(len(window) - 1, -1, -1):
            if window[at] in self._decoder.byte_ids:
                end = at
            elif not (self._skip and window[at] in self._decoder.skipped):
                break
        return end

    def _cleaned(self, window: str, end: int) -> str:
        """Return the characters of the window from the settled ones to `end`."""
        clean = self._decoder.clean
        if clean is None:
            return window[self._settled : end]
        return clean(window[:end])[len(clean(window[: self._settled])) :]

    def _context(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Return the last tokens that new ones are decoded with, and their text."""
        decoder, count = self._decoder, _CONTEXT
        while True:
            context = list(tokens[-count:])
            text = decoder.decode(context, self._skip)
            cut = decoder.clean is not None and _UNDECIDED.match(" " + text) is not None
            if count >= len(tokens) or (text and context[0] not in decoder.byte_ids and not cut):
                return context, text
            count *= 2
