"""The training mix of the starter text models: copying, question answering, plain text.

Every sample is a list of token ids with one loss weight per token; rows are packed from samples
with `<|endoftext|>` (0) between them. A batch depends on (seed, step) alone, so that a run can be
resumed at any step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from text_answering import Answering, fork_weight, forking
from text_data import Document, GoldQuestion
from text_sample import EOS_ID, Sample


@dataclass(frozen=True)
class Shares:
    """Shares of copying and answering samples, how hard the questions are (0 to 1), how many brief.

    `brief` is the share of the answering samples that only teach where to look.
    """

    copying: float = 0.35
    answering: float = 0.5
    hardness: float = 1.0
    brief: float = 0.0


class Mix:
    """Draws batches from documents and human questions with a Hugging Face tokenizer."""

    def __init__(
        self, documents: list[Document], questions: list[GoldQuestion], tokenizer: Any, seed: int
    ) -> None:
        """Index the documents by size; keep `seed` for the batches."""
        self.documents = [document for document in documents if len(document.text) > 600]
        self.sizes = [min(len(document.text), 60_000) for document in self.documents]
        self.answering = Answering(self.documents, questions, tokenizer)
        self.vocabulary = len(tokenizer)
        self.seed = seed
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Encode text without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def batch(self, step: int, rows: int, length: int, shares: Shares) -> list[Sample]:
        """Draw `rows` rows of `length + 1` tokens with their weights and hints."""
        rng = random.Random(f"{self.seed}/{step}")
        return [self.row(length + 1, shares, rng) for _ in range(rows)]

    def row(self, length: int, shares: Shares, rng: random.Random) -> Sample:
        """Pack samples into one row; copying and text stretch to fill what is left."""
        row = Sample()
        while (room := length - len(row.tokens)) > 0:
            draw = rng.random()
            sample = None
            if draw < shares.answering and room > 100:
                brief = rng.random() < shares.brief
                sample = self.answering.sample(room, shares.hardness, rng, brief)
            elif draw > 1.0 - shares.copying and room > 24:
                sample = self.copying(room, rng)
            if sample is None:
                sample = self.text(room, rng)
            row.tokens.extend(sample.tokens[:room])
            row.weights.extend(sample.weights[:room])
            row.hints.extend(sample.hints[:room])
        return row

    def text(self, room: int, rng: random.Random) -> Sample:
        """Draw a window of plain text of at most `room` tokens."""
        room = min(room, rng.randint(100, 600))
        document = rng.choices(self.documents, self.sizes)[0]
        characters = room * 6
        start = rng.randrange(max(1, len(document.text) - characters // 2))
        tokens = self.encode(document.text[start : start + characters])[: room - 1]
        sample = Sample()
        sample.add(tokens, 1.0)
        sample.add([EOS_ID], 0.0)
        return sample

    def copying(self, room: int, rng: random.Random) -> Sample:
        """Repeat a span (random tokens or text) after a gap; only the repeats carry full weight."""
        room = min(room, rng.choice([96, 192, 256, 512, 900]))
        real = rng.random() < 0.55
        span = rng.randint(8, max(9, min(400, room // 2 - 2)))
        source = self.text(room, rng).tokens[:-1] if real else self.noise(room, rng)
        part, gap = source[:span], source[span:]
        gap = gap[: rng.choice([0, 0, rng.randint(0, max(0, room - 2 * span))])]
        sample = Sample()
        sample.add(part, 0.3 if real else 0.0)
        sample.add(gap, 0.3 if real else 0.0)
        forks = forking(sample.tokens)
        while room - len(sample.tokens) > 8 and len(part) > 4:
            start = rng.choice([0, rng.randrange(len(part) - 3)])
            again = part[start : start + room - len(sample.tokens) - 1]
            # The start of a repeat is unknown.
            sample.add(again[:1], 0.0)
            for before, token in pairwise(again):
                sample.add([token], fork_weight(before, forks))
            if rng.random() < 0.5:
                break
        sample.add([EOS_ID], 0.0)
        return sample

    def noise(self, count: int, rng: random.Random) -> list[int]:
        """Draw tokens without order: uniform ids, or the shuffled tokens of a text."""
        if rng.random() < 0.7:
            return [rng.randrange(1, self.vocabulary) for _ in range(count)]
        tokens = self.text(count + 40, rng).tokens[:-1]
        rng.shuffle(tokens)
        return tokens[:count]
