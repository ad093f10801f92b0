"""Incremental decoding of tokens to text, without incomplete characters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that turns tokens into text."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any:
        """Return the text of the ids."""


class TextOutput:
    """Decodes tokens to text one by one, and holds back incomplete characters.

    Tokenizers join, strip or split characters across tokens. So each piece is the difference of
    two decodings that start at the same earlier token. Fast tokenizers do this in
    `tokenizers.decoders.DecodeStream`. Other tokenizers, and runs of bytes on which it fails, are
    decoded here in the same manner.

    Args:
        decode: A tokenizer, or a function from token ids to text.
        skip_special_tokens: Leave special tokens out; for tokenizers alone.
    """

    def __init__(
        self, decode: Tokenizer | Callable[[list[int]], str], *, skip_special_tokens: bool = True
    ) -> None:
        self.text = ""
        self._decoder = decode
        self._skip = skip_special_tokens
        self._tokens: list[int] = []  # from the token at which decoding starts
        self._read = 0  # how many of them are in the text
        self._backend = _fast_backend(decode)
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream

            self._stream: Any = DecodeStream(skip_special_tokens=skip_special_tokens)

    def push(self, tokens: Sequence[int]) -> str:
        """Take more tokens and return the text that they complete."""
        self._tokens.extend(tokens)
        piece = self._step(tokens)
        if piece:
            self.text += piece
            self._tokens, self._read = self._tokens[self._read :], len(self._tokens) - self._read
        return piece

    def flush(self) -> str:
        """End the text, and return the rest of it, incomplete characters included."""
        piece = self._difference()
        self._read = len(self._tokens)
        self.text += piece
        return piece

    def fork(self) -> TextOutput:
        """Return an independent copy, for looking ahead."""
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        if self._backend is not None:
            other._stream = copy.copy(self._stream)
        return other

    def _step(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete; they are the last of `_tokens`."""
        if self._backend is not None and tokens:
            try:
                return self._stream.step(self._backend, list(tokens)) or ""
            except Exception:  # of no specific class: a later byte changed earlier text
                self._backend = None
        piece = self._difference()
        return "" if piece.endswith(_REPLACEMENT) else piece

    def _difference(self) -> str:
        before = self._decode(self._tokens[: self._read])
        return self._decode(self._tokens)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        if hasattr(self._decoder, "decode"):
            return str(self._decoder.decode(tokens, skip_special_tokens=self._skip))
        return self._decoder(tokens)


def _fast_backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` that decodes exactly as the tokenizer does, or None."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    from transformers import PreTrainedTokenizerFast

    kind, backend = type(tokenizer), tokenizer.backend_tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    if kind.decode is not PreTrainedTokenizerFast.decode:
        return None
    if kind._decode is not PreTrainedTokenizerFast._decode:
        return None
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    is_bpe = type(backend.model).__name__ == "BPE" and not getattr(tokenizer, forced, False)
    return backend if is_bpe or not tokenizer.clean_up_tokenization_spaces else None
