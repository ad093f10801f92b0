"""Question-answering samples: passages, questions about them, evidence lines, short answers.

The layout is that of the shared training text: "Context:", the passages as "[1] title" with their
text below, "Question: ...", "Evidence: [k] sentence", "Answer: span" and `<|endoftext|>`. Several
questions follow one context, each ended by `<|endoftext|>`: the first is the layout of use, the
others make more of the same passages.
"""

from __future__ import annotations

import random
import re
import zlib
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from text_data import Document, GoldQuestion, sentence_spans
from text_questions import (
    STOPWORDS,
    TEMPLATE_WORDS,
    clean,
    heading_question,
    is_askable,
    is_content,
    make_question,
)

EOS_ID = 0
HEADING = re.compile(r"^#+ ")
PLAIN = STOPWORDS | TEMPLATE_WORDS
WORD = re.compile(r"[^\W\d_]{3,}|\d{2,}")


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


@dataclass(frozen=True)
class Passage:
    """A cut of a document: its title, its text and the sentences in it."""

    title: str
    text: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """A question about a passage with its evidence sentence and its answer."""

    passage: Passage
    question: str
    evidence: str
    answer: str


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


class Answering:
    """Makes question-answering samples from documents and human questions."""

    def __init__(
        self,
        documents: list[Document],
        questions: list[GoldQuestion],
        tokenizer: Any,
    ) -> None:
        """Keep the prose of `documents`, the questions and the tokenizer."""
        self.documents = [d for d in documents if d.kind in ("docs", "article", "book")]
        # Articles are the kind of text that people ask facts about: draw them more often.
        factor = {"docs": 1.0, "article": 4.0, "book": 0.5}
        self.sizes = [factor[d.kind] * min(len(d.text), 60_000) for d in self.documents]
        articles = {d.title: d for d in documents if d.kind == "article"}
        self.questions = [(q, articles.get(q.title)) for q in questions]
        # Unique words, so that rare names come as often as common words.
        self.words = sorted(
            {w for d in self.documents for w in re.findall(r"\b[^\W\d_]{3,12}\b", d.text)}
        )
        self._tokenizer = tokenizer
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def spans(self, document: Document) -> list[tuple[int, int]]:
        """Give the sentence offsets of a document, computed once."""
        key = id(document)
        if key not in self._spans:
            self._spans[key] = sentence_spans(document.text)
        return self._spans[key]

    def sample(
        self, room: int, hardness: float, rng: random.Random, brief: bool = False
    ) -> Sample | None:
        """Lay out passages and questions in at most `room` tokens; None when they do not fit.

        A brief sample asks many questions, most of them a single word, and gives only the number
        and the first tokens of each evidence line: it teaches where to look, many times a row.
        """
        long = rng.random() < 0.8 * hardness
        words = rng.randint(80, 125) if long else rng.randint(20, 80)
        count = rng.choices(
            [1, 2, 3, 4], [1.2 - hardness, 1.1 - hardness / 2, 0.2 + hardness, hardness]
        )[0]
        count = max(1, min(count, room // int(words * 1.7 + 30)))
        first, document = self.first(words, hardness, rng)
        if first is None:
            return None
        passages = self.distractors(first, document, count - 1, words, hardness, rng)
        for kept in range(len(passages), -1, -1):
            chosen = [*passages[:kept], first.passage]
            rng.shuffle(chosen)
            rest = self.made(chosen, hardness, rng)
            rest = [asked for asked in rest if asked.evidence != first.evidence]
            # Short sentences first while it is easy: more questions in the same room.
            rest.sort(key=lambda asked: rng.random() * len(asked.evidence) ** (1.0 - hardness))
            if brief:
                rest = [*rest[: rng.randint(0, 8)], *self.looked_up(chosen, rng)]
                rng.shuffle(rest)
            asked = [first, *rest[: 40 if brief else rng.randint(3, 8)]]
            if sample := self.lay_out(chosen, asked, room, rng, brief):
                return sample
        return None

    def first(
        self, words: int, hardness: float, rng: random.Random
    ) -> tuple[Asked | None, Document]:
        """Choose the first question: a human one in up to three tenths of the samples."""
        if self.questions and rng.random() < 0.1 + 0.2 * hardness:
            gold, article = rng.choice(self.questions)
            document = article or rng.choices(self.documents, self.sizes)[0]
            place = document.text.find(gold.evidence) if article else -1
            if place < 0:
                passage = Passage(gold.title, gold.passage, ())
            else:
                passage = self.window_at(document, place, words, rng)
            return Asked(passage, gold.question, gold.evidence, gold.answer), document
        for _ in range(5):
            document = rng.choices(self.documents, self.sizes)[0]
            passage = self.window(document, rng.randrange(len(self.spans(document))), words)
            if made := self.made([passage], hardness, rng):
                return rng.choice(made), document
        return None, document

    def window_at(self, document: Document, place: int, words: int, rng: random.Random) -> Passage:
        """Cut a passage that holds the character `place`, at a random distance from its start."""
        spans = self.spans(document)
        hit = max(i for i, (start, _) in enumerate(spans) if start <= place)
        first, count = hit, 0
        back = rng.random() * words * 0.8
        while first > 0:
            count += len(document.text[slice(*spans[first - 1])].split())
            if count > back:
                break
            first -= 1
        passage = self.window(document, first, words)
        return (
            passage
            if spans[hit][0] < spans[first][0] + len(passage.text)
            else self.window(document, hit, words)
        )

    def window(self, document: Document, first: int, words: int) -> Passage:
        """Cut a passage of about `words` words from sentence `first` on."""
        spans = self.spans(document)
        stop = first
        total = 0
        while stop < len(spans) and total < words:
            total += len(document.text[slice(*spans[stop])].split())
            stop += 1
        sentences = tuple(document.text[a:b].strip() for a, b in spans[first:stop])
        text = document.text[spans[first][0] : spans[stop - 1][1]]
        return Passage(document.title, text[: words * 14], sentences)

    def distractors(
        self,
        asked: Asked,
        document: Document,
        count: int,
        words: int,
        hardness: float,
        rng: random.Random,
    ) -> list[Passage]:
        """Cut other passages; hard ones share words with the question, as a retriever's would."""
        hard = rng.random() < 0.7 * hardness
        wanted = {clean(word).lower() for word in asked.question.split() if is_content(word)}
        candidates: list[tuple[float, int, Passage]] = []
        for number in range(count * (5 if hard else 1)):
            if rng.random() < 0.2:
                document = rng.choices(self.documents, self.sizes)[0]
            passage = self.window(document, rng.randrange(len(self.spans(document))), words)
            if asked.evidence in passage.text or passage.text[:80] in asked.passage.text:
                continue
            present = {clean(word).lower() for word in passage.text.split()}
            candidates.append((-len(wanted & present) if hard else 0.0, number, passage))
        return [passage for _, _, passage in sorted(candidates, key=lambda c: c[:2])[:count]]

    def made(self, passages: list[Passage], hardness: float, rng: random.Random) -> list[Asked]:
        """Make one question for each sentence of the passages that can be asked about."""
        counts: Counter[str] = Counter()
        for passage in passages:
            for sentence in passage.sentences:
                counts.update({clean(word).lower() for word in sentence.split()})
        common = frozenset(word for word, count in counts.items() if count > 1)
        result = []
        for passage in passages:
            headed = False
            for sentence in passage.sentences:
                heading, headed = headed, bool(HEADING.match(sentence))
                if headed or not is_askable(sentence) or sentence not in passage.text:
                    last = sentence
                    continue
                made = make_question(sentence, passage.title, rng, hardness, common)
                if made is None:
                    continue
                question = made.question
                if heading and rng.random() < 0.6:
                    question = heading_question(last, rng)
                result.append(Asked(passage, question, sentence, made.answer))
        return result

    def looked_up(self, passages: list[Passage], rng: random.Random) -> list[Asked]:
        """Ask with one or two words that stand in a single sentence of the passages."""
        counts: Counter[str] = Counter()
        for passage in passages:
            counts.update(clean(word).lower() for word in passage.text.split())
        result = []
        for passage in passages:
            for sentence in passage.sentences:
                if sentence not in passage.text or len(sentence.split()) < 4:
                    continue
                bare = [clean(word) for word in sentence.split() if is_content(word)]
                alone = [word for word in bare if counts[word.lower()] == 1]
                rng.shuffle(alone)
                for i in range(min(4, len(alone))):
                    words = alone[i : i + rng.choice([1, 1, 2, 3])]
                    result.append(Asked(passage, " ".join(words), sentence, ""))
        return result

    def lay_out(
        self,
        passages: list[Passage],
        questions: list[Asked],
        room: int,
        rng: random.Random,
        brief: bool,
    ) -> Sample | None:
        """Write the context, then the questions that fit with their evidence and answers."""
        flat = rng.random() < 0.4
        rate = rng.uniform(0.2, 0.9) if rng.random() < 0.45 else 0.0
        disguise = Disguise(self.words, rng.getrandbits(32), rate)
        blocks = []
        for number, passage in enumerate(passages, start=1):
            body = " ".join(passage.text.split()) if flat else passage.text
            blocks.append(disguise(f"[{number}] {passage.title}\n{body}"))
        sample = Sample()
        # Learning the passages as plain text too costs little and keeps the language model.
        learn = 0.5 if not rate and not brief and rng.random() < 0.25 else 0.0
        self.add_context(sample, blocks, learn)
        before = len(sample.tokens)
        opening = "\n\nQuestion:"
        for asked in questions:
            number = passages.index(asked.passage) + 1
            quote = " ".join(asked.evidence.split()) if flat else asked.evidence
            quote_text = disguise(quote)
            label, quoted = self._encode(f" [{number}]"), self._encode(f" {quote_text}")
            # The passage number and the first word decide everything that follows.
            parts = [
                (self._encode(f"{opening} {disguise(asked.question)}\nEvidence:"), 0.0),
                (label[:1], 0.5),
                (label[1:2], 3.0),
                (label[2:], 0.5),
                (quoted[:1], 4.0),
                (quoted[1:3], 2.0),
                (quoted[3:], 1.0),
                (self._encode(f"\nAnswer: {disguise(asked.answer)}"), 1.0),
            ]
            if brief:
                # No loss on what follows: a line cut short is not to be learned.
                parts = [*parts[:6], (self._encode("\n"), 0.0)]
            if len(sample.tokens) + sum(len(tokens) for tokens, _ in parts) + 1 > room:
                break
            hint = (2, quoted[0], number)
            for i, (tokens, weight) in enumerate(parts):
                sample.add(tokens, weight, hint if i == 0 else (0, 0, 0))
            if not brief:
                sample.add([EOS_ID], 1.0)
            opening = "Question:"
        return sample if len(sample.tokens) > before else None

    def add_context(self, sample: Sample, blocks: list[str], weight: float) -> None:
        """Append the passages, with the hint of its sentence and its passage for every token."""
        text = "Context:"
        edges: list[tuple[int, int]] = []
        for number, block in enumerate(blocks, start=1):
            text += ("\n" if number == 1 else "\n\n") + block
            edges.append((len(text), number))
        spans = sentence_spans(text)
        starts = [self._encode(" " + text[a : min(b, a + 40)].lstrip())[0] for a, b in spans]
        begins = [a for a, _ in spans]
        coded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (at, end) in zip(coded["input_ids"], coded["offset_mapping"], strict=True):
            # A token's own white space belongs to what follows it.
            hint = (1, starts[max(0, bisect_right(begins, end - 1) - 1)], number_at(edges, at))
            sample.add([token], weight, hint)


def number_at(edges: list[tuple[int, int]], place: int) -> int:
    """Give the number of the passage that holds a character; edges are (end, number)."""
    return next((number for end, number in edges if place < end), edges[-1][1])
