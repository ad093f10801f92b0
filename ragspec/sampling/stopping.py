"""When a text ends, and how tokens become text piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ragspec.errors import InputError

Criterion = Callable[[torch.Tensor, torch.Tensor], Any]

_REPLACEMENT = "�"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used to turn tokens into text."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any:
        """Return the text of the ids."""
        ...


class TextStream:
    """Turns tokens into text as they come, holding back half-written characters.

    Tokenizers may join, strip or split characters across tokens, so each piece is the difference
    of two decodings that start at the same earlier token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._anchor = 0
        self._read = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Take more tokens and return the text that they complete."""
        self._tokens.extend(tokens)
        before = self._decode(self._tokens[self._anchor : self._read])
        after = self._decode(self._tokens[self._anchor :])
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            return ""
        piece = after[len(before) :]
        self._anchor, self._read = self._read, len(self._tokens)
        self.text += piece
        return piece

    def flush(self) -> str:
        """Return what was held back, half-written characters as they are."""
        before = self._decode(self._tokens[self._anchor : self._read])
        piece = self._decode(self._tokens[self._anchor :])[len(before) :]
        self._read = len(self._tokens)
        self.text += piece
        return piece

    def fork(self) -> TextStream:
        """Return an independent copy, to look ahead with."""
        other = TextStream(self._tokenizer)
        other.text = self.text
        other._tokens = list(self._tokens)
        other._anchor, other._read = self._anchor, self._read
        return other

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a text: end tokens, strings (not part of the text), a number of new tokens.

    criteria: transformers stopping criteria, asked after every emitted token. pause: tokens after
    which a call returns though the text has not ended, None for never.
    """

    ends: frozenset[int]
    max_new_tokens: int
    strings: tuple[str, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    pause: int | None = None

    def open(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> StopState:
        """Return the state for one row; `prompt` is what criteria see before the new tokens.

        written: tokens of the text that are there already; the state has a reason at once where it
        ends with the last of them. Raises InputError where it has ended before.
        """
        stream = TextStream(tokenizer) if self.strings and tokenizer else None
        return StopState(self, stream, prompt, written)

    def room(self, written: int = 0) -> int:
        """Return how many tokens may follow so many before the text ends or pauses."""
        left = self.max_new_tokens - written
        return left if self.pause is None else min(left, self.pause)


class StopState:
    """Follows one row and says where it ends.

    count: tokens of its text, those of before this call included.
    """

    def __init__(
        self,
        rule: StopRule,
        stream: TextStream | None,
        prompt: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        self.rule = rule
        self.count = self._before = len(written)
        self.last = self.count + rule.room(self.count)
        self._tokens = [*prompt, *written[:-1]] if rule.criteria else []
        self.reason: str | None = None
        self.cut: int | None = None
        self._stream = stream
        if any(token in rule.ends or self._completes_string(token) for token in written[:-1]):
            raise InputError(
                "the tokens in written= go on after an end token or a stop string; expected a text "
                "that ends there, or none of these in it."
            )
        if written and self._ends(written[-1]):
            self.reason = "stop"
        elif written and self.count >= rule.max_new_tokens:
            self.reason = "length"

    @property
    def fresh(self) -> int:
        """Tokens of this call."""
        return self.count - self._before

    def push(self, token: int) -> bool:
        """Take one emitted token; return whether the text ends with it.

        Afterwards `reason` is "stop", "length" or "paused", and `cut` the length of the text before
        a stop string, where one ended it.
        """
        self.count += 1
        if self._ends(token):
            self.reason = "stop"
        elif self.count >= self.rule.max_new_tokens:
            self.reason = "length"
        elif self.count >= self.last:
            self.reason = "paused"
        return self.reason is not None

    def peek(self, tokens: Sequence[int]) -> bool:
        """Return whether the text would end at or before the last of these tokens."""
        if self.count + len(tokens) >= self.last:
            return True
        if any(token in self.rule.ends for token in tokens):
            return True
        if self._stream is None:
            return False
        ahead = StopState(self.rule, self._stream.fork())
        return any(ahead._completes_string(token) for token in tokens)

    def _ends(self, token: int) -> bool:
        """Take one token; return whether one of the rule's ends is reached with it."""
        return token in self.rule.ends or self._completes_string(token) or self._meets(token)

    def _meets(self, token: int) -> bool:
        if not self.rule.criteria:
            return False
        self._tokens.append(token)
        ids = torch.tensor([self._tokens])
        scores = torch.empty(1, 0)
        return any(bool(torch.as_tensor(met(ids, scores)).all()) for met in self.rule.criteria)

    def _completes_string(self, token: int) -> bool:
        if self._stream is None:
            return False
        start = len(self._stream.text)
        self._stream.push([token])
        reach = max(len(string) for string in self.rule.strings) - 1
        window = max(0, start - reach)
        found = [
            place
            for string in self.rule.strings
            if (place := self._stream.text.find(string, window)) >= 0
        ]
        self.cut = min(found, default=None)
        return bool(found)
