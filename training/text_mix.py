"""The training mix of the starter text models: copying, question answering, plain text.

Every sample is a list of token ids with one loss weight per token; rows are packed from samples
with `<|endoftext|>` (0) between them. A batch depends on (seed, step) alone, so that a run can be
resumed at any step.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from text_data import Document, GoldQuestion, sentence_spans
from text_questions import heading_question, is_askable, make_question

EOS_ID = 0
HEADING = re.compile(r"^#+ ")


@dataclass
class Sample:
    """Token ids and their loss weights (weight of a token = of predicting it)."""

    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, tokens: Sequence[int], weight: float) -> None:
        """Append tokens of one weight."""
        self.tokens.extend(tokens)
        self.weights.extend([weight] * len(tokens))


@dataclass(frozen=True)
class Shares:
    """Shares of the tokens of a batch, and how hard its questions are (0 to 1)."""

    copying: float = 0.35
    answering: float = 0.5
    hardness: float = 1.0


class Mix:
    """Draws batches from documents and human questions with a Hugging Face tokenizer."""

    def __init__(
        self, documents: list[Document], questions: list[GoldQuestion], tokenizer: Any, seed: int
    ) -> None:
        """Index the documents by size and title; keep `seed` for the batches."""
        self.documents = [document for document in documents if len(document.text) > 600]
        self.sizes = [min(len(document.text), 60_000) for document in self.documents]
        self.prose = [d for d in self.documents if d.kind in ("docs", "article", "book")]
        # Articles are the kind of text that people ask facts about: draw them more often.
        factor = {"docs": 1.0, "article": 4.0, "book": 0.5}
        self.prose_sizes = [factor[d.kind] * min(len(d.text), 60_000) for d in self.prose]
        self.articles = {d.title: d for d in self.documents if d.kind == "article"}
        self.questions = questions
        self.vocabulary = len(tokenizer)
        self.seed = seed
        self._tokenizer = tokenizer
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def encode(self, text: str) -> list[int]:
        """Encode text without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def batch(
        self, step: int, rows: int, length: int, shares: Shares
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draw `rows` rows of `length + 1` tokens with their weights."""
        rng = random.Random(f"{self.seed}/{step}")
        packed = [self.row(length + 1, shares, rng) for _ in range(rows)]
        return [row.tokens for row in packed], [row.weights for row in packed]

    def row(self, length: int, shares: Shares, rng: random.Random) -> Sample:
        """Pack samples into one row; copying and text stretch to fill what is left."""
        row = Sample()
        while (room := length - len(row.tokens)) > 0:
            draw = rng.random()
            sample = None
            if draw < shares.answering and room > 100:
                sample = self.answering(room, shares.hardness, rng)
            elif draw > 1.0 - shares.copying and room > 24:
                sample = self.copying(room, rng)
            if sample is None:
                sample = self.text(room, rng)
            row.add([], 0.0)
            row.tokens.extend(sample.tokens[:room])
            row.weights.extend(sample.weights[:room])
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
        real = rng.random() < 0.35
        span = rng.randint(8, max(9, min(400, room // 2 - 2)))
        source = self.text(room, rng).tokens[:-1] if real else self.noise(room, rng)
        part, gap = source[:span], source[span:]
        gap = gap[: rng.choice([0, 0, rng.randint(0, max(0, room - 2 * span))])]
        sample = Sample()
        sample.add(part, 0.3 if real else 0.0)
        sample.add(gap, 0.3 if real else 0.0)
        while room - len(sample.tokens) > 8 and len(part) > 4:
            start = rng.choice([0, rng.randrange(len(part) - 3)])
            again = part[start : start + room - len(sample.tokens) - 1]
            sample.add(again[:1], 0.0)
            sample.add(again[1:], 1.0)
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

    def answering(self, room: int, hardness: float, rng: random.Random) -> Sample | None:
        """Lay out passages, then as many questions about them as fit in `room` tokens."""
        words = rng.randint(80, 125) if rng.random() < 0.2 + 0.5 * hardness else rng.randint(20, 80)
        count = rng.choices([1, 2, 3, 4], [1.3 - hardness, 1.2 - hardness / 2, 1, hardness])[0]
        count = max(1, min(count, room // int(words * 1.6 + 30)))
        asked: list[tuple[str, str, str, str]] = []
        passages: list[tuple[str, list[str], str]] = []
        if self.questions and rng.random() < 0.3:
            gold = rng.choice(self.questions)
            passages.append((gold.title, [], gold.passage))
            asked.append((gold.passage, gold.question, gold.evidence, gold.answer))
            document = self.articles.get(gold.title)
        else:
            document = None
        document = document or rng.choices(self.prose, self.prose_sizes)[0]
        passages += self.passages(document, count - len(passages), words, rng)
        rng.shuffle(passages)
        return self.lay_out(passages, asked, room, rng)

    def passages(
        self, document: Document, count: int, words: int, rng: random.Random
    ) -> list[tuple[str, list[str], str]]:
        """Cut `count` passages of about `words` words: (title, sentences, text)."""
        result = []
        other = rng.random() < 0.25
        anchor = rng.random()
        for _ in range(count):
            if other:
                document = rng.choices(self.prose, self.prose_sizes)[0]
            spans = self.spans(document)
            # Half of the time near each other, as neighbours share their words.
            place = anchor + rng.uniform(-0.1, 0.1) if rng.random() < 0.5 else rng.random()
            first = min(max(0, int(place * len(spans))), len(spans) - 1)
            stop = first
            total = 0
            while stop < len(spans) and total < words:
                total += len(document.text[slice(*spans[stop])].split())
                stop += 1
            sentences = [document.text[a:b] for a, b in spans[first:stop]]
            text = document.text[spans[first][0] : spans[stop - 1][1]]
            if len(text) < words * 12:
                result.append((document.title, sentences, text))
        return result

    def spans(self, document: Document) -> list[tuple[int, int]]:
        """Give the sentence offsets of a document, computed once."""
        key = id(document)
        if key not in self._spans:
            self._spans[key] = sentence_spans(document.text)
        return self._spans[key]

    def lay_out(
        self,
        passages: list[tuple[str, list[str], str]],
        asked: list[tuple[str, str, str, str]],
        room: int,
        rng: random.Random,
    ) -> Sample | None:
        """Write the context and the questions with their evidence and answers."""
        flat = rng.random() < 0.4
        blocks = []
        for number, (title, _, text) in enumerate(passages, start=1):
            body = " ".join(text.split()) if flat else text
            blocks.append(f"[{number}] {title}\n{body}")
        sample = Sample()
        learn = 0.5 if rng.random() < 0.25 else 0.0
        sample.add(self.encode("Context:\n" + "\n\n".join(blocks)), learn)
        if len(sample.tokens) + 60 > room:
            return None
        triples = self.ask(passages, asked, rng)
        before = len(sample.tokens)
        opening = "\n\nQuestion:"
        for number, question, evidence, answer in triples:
            prompt = self.encode(f"{opening} {question}\nEvidence:")
            label = self.encode(f" [{number}]")
            quote = self.encode(f" {evidence}")
            tail = self.encode(f"\nAnswer: {answer}")
            size = len(prompt) + len(label) + len(quote) + len(tail) + 1
            if len(sample.tokens) + size > room:
                break
            sample.add(prompt, 0.0)
            sample.add(label, 2.0)
            sample.add(quote[:3], 3.0)
            sample.add(quote[3:], 1.0)
            sample.add(tail, 1.5)
            sample.add([EOS_ID], 1.5)
            opening = "Question:"
        return sample if len(sample.tokens) > before else None

    def ask(
        self,
        passages: list[tuple[str, list[str], str]],
        asked: list[tuple[str, str, str, str]],
        rng: random.Random,
    ) -> list[tuple[int, str, str, str]]:
        """List (passage number, question, evidence, answer): human ones first, then made ones."""
        texts = [text for _, _, text in passages]
        triples = [
            (texts.index(passage) + 1, question, evidence, answer)
            for passage, question, evidence, answer in asked
        ]
        made = []
        for number, (title, sentences, _) in enumerate(passages, start=1):
            for i, sentence in enumerate(sentences):
                if not is_askable(sentence) or HEADING.match(sentence):
                    continue
                quote = " ".join(sentence.split())
                result = make_question(quote, title, rng)
                if result is None:
                    continue
                question, answer = result.question, result.answer
                if i and HEADING.match(sentences[i - 1]) and rng.random() < 0.5:
                    question = heading_question(sentences[i - 1], rng)
                made.append((number, question, quote, answer))
        rng.shuffle(made)
        return triples + made[: rng.randint(3, 7)]
