"""A training sample with its weights and hints, and the disguise of its words."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field

from text_questions import STOPWORDS, TEMPLATE_WORDS

EOS_ID = 0
WORD = re.compile(r"[^\W\d_]{3,}|\d{2,}")
PLAIN = STOPWORDS | TEMPLATE_WORDS


@dataclass
class Sample:
    """Token ids, their loss weights, and hints on where to look.

    The weight of a token is that of predicting it. A hint is (hop, start, number) for a token: hop
    1 is a passage's token, with the first token of its own sentence and the number of its passage;
    hop 2 is a question's token, with those of the evidence; hop 0 has no hint.
    """

    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    hints: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, tokens: list[int], weight: float, hint: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Append tokens of one weight and one hint."""
        self.tokens.extend(tokens)
        self.weights.extend([weight] * len(tokens))
        self.hints.extend([hint] * len(tokens))


class Disguise:
    """Replaces words by others, the same word always by the same other one.

    A passage in disguise cannot be recited from memory, only copied: each text then gives endless
    new ones, with names and numbers that were never seen together.
    """

    def __init__(self, words: list[str], salt: int, rate: float) -> None:
        """Draw replacements from `words`; `rate` is the share of the words replaced."""
        self.words, self.salt, self.rate = words, salt, rate

    def __call__(self, text: str) -> str:
        """Replace words of three letters or more, stopwords apart, and numbers."""
        return WORD.sub(self._replace, text) if self.rate else text

    def _replace(self, match: re.Match[str]) -> str:
        word = match[0]
        low = word.lower()
        draw = zlib.crc32(f"{self.salt} {low}".encode())
        if low in PLAIN or (draw & 0xFFFF) > self.rate * 0x10000:
            return word
        if word.isdigit():
            return str(draw)[-len(word) :].replace("0", "7", 1)
        other = self.words[(draw >> 8) % len(self.words)]
        return other.capitalize() if word[0].isupper() and not word.isupper() else other
