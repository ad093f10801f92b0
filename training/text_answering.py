"""Question-answering samples: passages, questions about them, evidence lines, short answers.

The layout is that of the shared training text: "Context:", the passages as "[1] title" with their
text below, "Question: ...", "Evidence: [k] sentence", "Answer: span" and `<|endoftext|>`. Several
questions follow one context, each ended by `<|endoftext|>`: the first is the layout of use, the
others make more of the same passages.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from typing import Any

from text_data import Document, GoldQuestion, sentence_spans
from text_passages import Cutter, Passage, Requests, rank
from text_questions import clean, heading_question, is_askable, is_content, make_question
from text_sample import EOS_ID, Disguise, Sample

HEADING = re.compile(r"^#+ ")


class Answering:
    """Makes question-answering samples from documents and human questions."""

    def __init__(
        self, documents: list[Document], questions: list[GoldQuestion], tokenizer: Any
    ) -> None:
        """Keep the prose of `documents`, the questions and the tokenizer."""
        self.cutter = Cutter(documents)
        self.articles = {d.title: d for d in documents if d.kind == "article"}
        self.questions = [
            q
            for q in questions
            if q.title in self.articles and q.evidence in self.articles[q.title].text
        ]
        self.questions_of: dict[str, list[GoldQuestion]] = {}
        for question in self.questions:
            self.questions_of.setdefault(question.title, []).append(question)
        # Unique words, so that rare names come as often as common words.
        self.words = sorted(
            {w for d in self.cutter.documents for w in re.findall(r"\b[^\W\d_]{3,12}\b", d.text)}
        )
        self._tokenizer = tokenizer

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

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
        result = self.human(words, count, rng) if rng.random() < 0.1 + 0.25 * hardness else None
        result = result or self.invented(words, count, hardness, rng)
        if result is None:
            return None
        first, passages = result
        for selected in range(len(passages), 0, -1):
            chosen = passages[:selected]
            if first.passage not in chosen:
                chosen[-1] = first.passage
            rest = self.rest(first, chosen, hardness, rng)
            if brief:
                rest = [*rest[: rng.randint(4, 20)], *self.looked_up(chosen, rng)[:16]]
                rng.shuffle(rest)
            requests = [first, *rest[: 40 if brief else rng.randint(3, 8)]]
            if sample := self.lay_out(chosen, requests, room, rng, brief):
                return sample
        return None

    def human(
        self, words: int, count: int, rng: random.Random
    ) -> tuple[Requests, list[Passage]] | None:
        """Choose a human question, with passages of its article as BM25 ranks them, as in use."""
        if not self.questions:
            return None
        gold = rng.choice(self.questions)
        document = self.articles[gold.title]
        cuts = self.cutter.cuts(document, words, rng)
        order = [cuts[i] for i in rank(gold.question, [cut.text for cut in cuts])]
        passage = next((cut for cut in order if gold.evidence in cut.text), None)
        if passage is None:
            place = document.text.find(gold.evidence)
            passage = self.cutter.window_at(document, place, words, rng)
        passages = order[:count]
        if passage not in passages:
            passages[-1] = passage
        return Requests(passage, gold.question, gold.evidence, gold.answer), passages

    def invented(
        self, words: int, count: int, hardness: float, rng: random.Random
    ) -> tuple[Requests, list[Passage]] | None:
        """Make a question about a passage and add others, mostly in the order of their rank."""
        for _ in range(5):
            document = self.cutter.draw(rng)
            passage = self.cutter.anywhere(document, words, rng)
            if instance := self.create([passage], hardness, rng):
                break
        else:
            return None
        first = rng.choice(instance)
        others = self.cutter.distractors(first, document, count - 1, words, hardness, rng)
        passages = [*others, passage]
        if rng.random() < 0.2:
            rng.shuffle(passages)
            return first, passages
        order = rank(first.question, [p.text for p in passages])
        return first, [passages[i] for i in order]

    def rest(
        self, first: Requests, passages: list[Passage], hardness: float, rng: random.Random
    ) -> list[Requests]:
        """Gather more questions about the passages, human ones first."""
        instance = self.create(passages, hardness, rng)
        # Short sentences first while it is easy: more questions in the same room.
        instance.sort(key=lambda request: rng.random() * len(request.evidence) ** (1.0 - hardness))
        title = first.passage.title
        humans = [
            Requests(passage, gold.question, gold.evidence, gold.answer)
            for gold in self.questions_of.get(title, ())
            for passage in passages
            if gold.evidence in passage.text
        ]
        rng.shuffle(humans)
        return [
            request for request in [*humans[:4], *instance] if request.evidence != first.evidence
        ]

    def create(
        self, passages: list[Passage], hardness: float, rng: random.Random
    ) -> list[Requests]:
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
                instance = make_question(sentence, passage.title, rng, hardness, common)
                if instance is None:
                    continue
                question = instance.question
                if heading and rng.random() < 0.6:
                    question = heading_question(last, rng)
                result.append(Requests(passage, question, sentence, instance.answer))
        return result

    def looked_up(self, passages: list[Passage], rng: random.Random) -> list[Requests]:
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
                    result.append(Requests(passage, " ".join(words), sentence, ""))
        return result

    def lay_out(
        self,
        passages: list[Passage],
        questions: list[Requests],
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
        rarity = Counter(sample.tokens)
        forks = forking(sample.tokens)
        opening = "\n\nQuestion:"
        for request in questions:
            number = passages.index(request.passage) + 1
            quote = " ".join(request.evidence.split()) if flat else request.evidence
            quote_text = disguise(quote)
            label, quoted = self._encode(f" [{number}]"), self._encode(f" {quote_text}")
            # The passage number and the first word decide everything that follows.
            parts = [
                (self._encode(f"{opening} {disguise(request.question)}\nEvidence:"), 0.0),
                (label[:1], 0.5),
                (label[1:2], 3.0),
                (label[2:], 0.5),
                (quoted[:1], 4.0),
                (quoted[1:3], 2.0),
                *(
                    (quoted[i : i + 1], fork_weight(quoted[i - 1], forks))
                    for i in range(3, len(quoted))
                ),
                (self._encode(f"\nAnswer: {disguise(request.answer)}"), 1.0),
            ]
            if brief:
                # No loss on what follows: a line cut short is not to be learned.
                parts = [*parts[:6], (self._encode("\n"), 0.0)]
            if len(sample.tokens) + sum(len(tokens) for tokens, _ in parts) + 1 > room:
                break
            # Hints only for what can be found: words of the evidence that are rare in the context.
            known = {token for token in quoted if rarity[token] <= 3}
            for token in parts[0][0]:
                sample.add([token], 0.0, (2, quoted[0], number) if token in known else (0, 0, 0))
            for tokens, weight in parts[1:]:
                sample.add(tokens, weight)
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


def forking(tokens: list[int]) -> frozenset[int]:
    """List the tokens that several different ones follow: there a copy may leave its line."""
    followers: dict[int, int] = {}
    forks = set()
    for token, after in pairwise(tokens):
        if followers.setdefault(token, after) != after:
            forks.add(token)
    return frozenset(forks)


def fork_weight(token: int, forks: frozenset[int]) -> float:
    """Weigh the copying of what follows `token`: most where copying by one token alone fails."""
    return 2.5 if token in forks else 0.7


def number_at(edges: list[tuple[int, int]], place: int) -> int:
    """Give the number of the passage that holds a character; edges are (end, number)."""
    return next((number for end, number in edges if place < end), edges[-1][1])
