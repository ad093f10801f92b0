"""The ends of a text: end tokens, stop strings, lengths, criteria, repetition."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.text_output import TextOutput
from ragspec.types import Tokenizer

Criterion = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True, slots=True)
class StopRule:
    """The conditions that end a text.

    Attributes:
        ends: End tokens, which are part of the text.
        strings: Stop strings, which are not part of it.
        criteria: Stopping criteria of transformers, called after every emitted token.
        stop_after: Tokens after which a call returns before the text has ended, None for never.
    """

    ends: frozenset[int]
    max_new_tokens: int
    strings: tuple[str, ...] = ()
    criteria: tuple[Criterion, ...] = ()
    stop_after: int | None = None


class StopState:
    """Follows the tokens of one row and finds its end.

    Args:
        tokenizer: Decodes tokens, for the text and its stop strings; None for token ids alone.
        prompt: Tokens before the text.
        resume_from: Tokens of the text from earlier calls.

    Attributes:
        count: Tokens of the text, those of earlier calls included.
        last: The most of them, until an end or a pause.
        reason: "stop", "length" or "paused" once the text has ended, else None.

    Raises:
        InputError: The text ended before the last token of `resume_from`.
    """

    def __init__(
        self,
        rule: StopRule,
        tokenizer: "Tokenizer | None" = None,
        prompt: Sequence[int] = (),
        resume_from: Sequence[int] = (),
    ) -> None:
        self.rule = rule
        self.count, self.last = len(resume_from), rule.max_new_tokens
        if rule.stop_after is not None:
            self.last = min(self.last, self.count + rule.stop_after)
        self._tokens = [*prompt, *resume_from[:-1]] if rule.criteria else []
        self.reason: str | None = None
        self._output = None if tokenizer is None else TextOutput(tokenizer, prompt, rule.strings)
        if any(self._completes_string(token) or token in rule.ends for token in resume_from[:-1]):
            raise InputError(
                "the tokens in resume_from= go on after an end token or a stop string; expected a "
                "text that ends there, or none of these in it."
            )
        if resume_from and self._ends(resume_from[-1]):
            self.reason = "stop"
        elif resume_from and self.count >= rule.max_new_tokens:
            self.reason = "length"

    @property
    def text(self) -> str:
        """The text so far, cut at the first stop string; "" without a tokenizer."""
        return "" if self._output is None else self._output.text

    def push(self, token: int) -> bool:
        """Take one emitted token, and return whether the text ends with it."""
        self.count += 1
        if self._ends(token):
            self.reason = "stop"
        elif self.count >= self.rule.max_new_tokens:
            self.reason = "stop" if self._output and self._output.finish() else "length"
        elif self.count >= self.last:
            self.reason = "paused"
        return self.reason is not None

    def peek(self, tokens: Sequence[int]) -> bool:
        """Return whether the text would end at or before the last of these tokens."""
        full = self.count + len(tokens) >= self.last
        if full or any(token in self.rule.ends for token in tokens):
            return True
        return self._output is not None and self._output.completes_stop(tokens)

    def _ends(self, token: int) -> bool:
        """Take one token, and return whether it ends the text by another reason than length."""
        if self._completes_string(token) or token in self.rule.ends:
            return True
        if not self.rule.criteria:
            return False
        self._tokens.append(token)
        ids, scores = torch.tensor([self._tokens]), torch.empty(1, 0)
        return any([_met(each(ids, scores)) for each in self.rule.criteria])

    def _completes_string(self, token: int) -> bool:
        if self._output is None:
            return False
        self._output.push([token])
        return self._output.stopped


ROUNDS, LEAST, LONGEST = 3, 24, 96  # rounds of a cycle, their least tokens, the longest cycle


def _met(verdict: object) -> bool:
    """Return whether a stopping criterion returned True, or a tensor of it alone."""
    with suppress(RuntimeError, TypeError, ValueError):
        if (values := torch.as_tensor(verdict)).numel():
            return bool(values.all())
    raise InputError(
        f"a stopping criterion returned {verdict!r:.60}; expected True, False or a tensor of them, "
        "as transformers does."
    )


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether a text ends with three rounds of a cycle of at most 96 tokens."""
    for period in range(1, min(LONGEST, len(tokens) // ROUNDS) + 1):
        first = len(tokens) - max(period * ROUNDS, LEAST)
        same = first >= 0 and tokens[-1] == tokens[-1 - period]
        if same and tokens[first + period :] == tokens[first:-period]:
            return True
    return False


@dataclass(frozen=True, slots=True)
class EndRepetition:
    """A stopping criterion that ends a text once it repeats itself, see `repeats`.

    Args:
        prompt: Number of tokens before the text.
    """

    prompt: int

    def __call__(self, ids: Tensor, scores: Tensor) -> bool:
        """Return whether the text of ids i64 [1, T] ends with the third round of a cycle."""
        return repeats(ids[0, max(self.prompt, ids.shape[1] - LONGEST * ROUNDS) :].tolist())
