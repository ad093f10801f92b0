"""Train the starter embedder: a table of token vectors, contrastively, on permissive text.

A passage and a query made from it (its heading, one of its sentences, a few of its words) should
be nearer than the query and the other passages of the batch; half of a batch are neighbours from
the same documents, which are the hard ones. Human questions about permissive documents are mixed
in. No share-alike text is read. Reimers and Gurevych 2019 give the loss (in-batch negatives).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from text_data import read_permissive

Ids = list[int]

SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+(?=[\"'(]?[A-Z0-9])|\n+")
PREFIXES = (
    *("what is", "what are", "what does", "how do i", "how does", "how to", "why does", "when is"),
    *("which", "where", "who", "can i", "what is the", "how many", "what happens when", "", "", ""),
)
_SMALL_WORDS = (
    "a an and are as at be but by can do does for from had has have how if in into is it its not of"
    " on or so such than that the their then there these they this to was were what when where"
    " which who will with would you your"
)
SMALL_WORDS = frozenset(_SMALL_WORDS.split())


@dataclass(frozen=True)
class Settings:
    """Size of the table and course of the training."""

    vocabulary: int = 8192
    dimensions: int = 224
    batch: int = 1024
    steps: int = 350
    rate: float = 0.02
    scale: float = 20.0
    group: int = 16
    seed: int = 1


@dataclass(frozen=True)
class Source:
    """One passage, in words: its title, its sentences, and the human questions about it."""

    title: list[str]
    sentences: list[list[str]]
    questions: list[list[str]]


def read_sources(shared: Path) -> tuple[list[tuple[str, str, list[str]]], list[str]]:
    """Return (title, passage text, questions) of permissive train documents, and raw texts."""
    folder = shared / "data" / "retrieval"
    documents = {
        record["doc_id"]: record["title"]
        for record in read_permissive(folder / "passage_docs.jsonl.gz")
        if record["split"] == "train"
    }
    questions: dict[str, list[str]] = {}
    for query in read_permissive(folder / "queries.jsonl.gz"):
        if query["split"] == "train" and query["origin"] in ("covid", "pyfaq"):
            for gold in query["gold"]:
                questions.setdefault(gold, []).append(query["question"])
    passages = [
        (documents[record["doc"]], record["text"], questions.get(record["id"], []))
        for record in read_permissive(folder / "passages.jsonl.gz")
        if record["doc"] in documents
    ]
    # Question records of articles carry share-alike passages beside their own: leave them out.
    records = read_permissive(shared / "data" / "lm" / "train.jsonl.gz")
    texts = [record["text"] for record in records if record["kind"] != "qa"]
    return passages, texts


def train_tokenizer(texts: list[str], size: int) -> Any:
    """Train a lower-case WordPiece of `size` tokens (a `tokenizers.Tokenizer`)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=40))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=["[UNK]"], limit_alphabet=200, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def cut_sources(passages: list[tuple[str, str, list[str]]], tokenizer: Any) -> list[Source]:
    """Cut (title, text, questions) into words; passages without any are left out."""

    def cut(text: str) -> list[str]:
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    sources = []
    for title, text, questions in passages:
        sentences = [words for part in SENTENCE_BREAK.split(text) if (words := cut(part))]
        if sentences:
            sources.append(Source(cut(title), sentences, [cut(q) for q in questions]))
    return sources


class Words:
    """Token ids of words; each word is encoded once."""

    def __init__(self, tokenizer: Any) -> None:
        self._one = cache(lambda word: tokenizer.encode(word, add_special_tokens=False).ids)

    def ids(self, words: list[str]) -> Ids:
        """Return the token ids of words, in a row."""
        return [token for word in words for token in self._one(word)]


class Pairs:
    """Batches of (query, passage) token ids."""

    def __init__(self, sources: list[Source], words: Words, settings: Settings) -> None:
        self.sources = sources
        self.words = words
        self.settings = settings
        self.with_questions = [number for number, source in enumerate(sources) if source.questions]

    def batch(self, rng: random.Random) -> tuple[list[Ids], list[Ids]]:
        """Draw a batch: half alone, half in runs of neighbours, a few with human questions."""
        size, group = self.settings.batch, self.settings.group
        chosen = set(rng.sample(self.with_questions, min(size // 50, len(self.with_questions))))
        while len(chosen) < size // 2:
            start = rng.randrange(len(self.sources))
            chosen.update(range(start, min(start + group, len(self.sources))))
        while len(chosen) < size:
            chosen.add(rng.randrange(len(self.sources)))
        queries, passages = [], []
        for number in sorted(chosen):
            query, passage = self.pair(self.sources[number], rng)
            queries.append(self.words.ids(query))
            passages.append(self.words.ids(passage))
        return queries, passages

    def pair(self, source: Source, rng: random.Random) -> tuple[list[str], list[str]]:
        """Make a query and the passage text that it should find."""
        number = rng.randrange(len(source.sentences))
        sentence = source.sentences[number]
        selected = list(range(len(source.sentences)))
        draw = rng.random()
        if source.questions and draw < 0.7:
            query = rng.choice(source.questions)
        elif draw < 0.15:
            query = source.title
            return query, [word for s in source.sentences for word in s]
        elif draw < 0.4:
            query = sentence
            if len(selected) > 1 and rng.random() < 0.7:
                selected.remove(number)
        else:
            query = self.keywords(sentence, rng)
        text = [word for place in selected for word in source.sentences[place]]
        return query, (source.title + text if rng.random() < 0.8 else text)

    def keywords(self, sentence: list[str], rng: random.Random) -> list[str]:
        """Make something like a question: a prefix and two to eight words of a sentence."""
        places = [i for i, word in enumerate(sentence) if word.lower() not in SMALL_WORDS]
        places = places or list(range(len(sentence)))
        count = min(len(places), rng.randint(2, 8))
        start = rng.randrange(len(places) - count + 1)
        near = places[start : start + count + 3]
        picked = sorted(rng.sample(near, min(count, len(near))))
        return rng.choice(PREFIXES).split() + [sentence[place] for place in picked]


def to_bags(rows: list[Ids]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids in one row i64 [tokens] and where each text starts i64 [texts]."""
    starts = np.cumsum([0] + [len(row) for row in rows[:-1]])
    flat: NDArray[np.int64] = np.fromiter((t for row in rows for t in row), dtype=np.int64)
    return torch.from_numpy(flat), torch.from_numpy(starts)


def first_table(sources: list[Source], words: Words, settings: Settings) -> torch.Tensor:
    """Return random directions with lengths by rarity (inverse document frequency)."""
    counts = np.zeros(settings.vocabulary)
    for source in sources:
        tokens = {t for sentence in source.sentences for t in words.ids(sentence)}
        counts[list(tokens)] += 1
    rarity = np.log((1 + len(sources)) / (1 + counts))
    generator = torch.Generator().manual_seed(settings.seed)
    table = torch.randn(settings.vocabulary, settings.dimensions, generator=generator)
    return table / math.sqrt(settings.dimensions) * torch.from_numpy(rarity).float()[:, None]


def train(pairs: Pairs, table: torch.Tensor, settings: Settings) -> Iterator[tuple[int, float]]:
    """Train the table in place; yield (step, loss)."""
    rng = random.Random(settings.seed)
    table.requires_grad_(True)
    optimizer = torch.optim.Adam([table], lr=settings.rate, betas=(0.9, 0.99))
    for step in range(settings.steps):
        warm = min(1.0, (step + 1) / 100)
        rest = 1 - step / settings.steps
        optimizer.param_groups[0]["lr"] = settings.rate * warm * rest
        queries, passages = pairs.batch(rng)
        vectors = [
            torch.nn.functional.normalize(
                torch.nn.functional.embedding_bag(flat, table, starts, mode="mean"), dim=-1
            )
            for flat, starts in (to_bags(queries), to_bags(passages))
        ]
        scores = settings.scale * vectors[0] @ vectors[1].T
        target = torch.arange(len(queries))
        loss = torch.nn.functional.cross_entropy(scores, target)
        loss = (loss + torch.nn.functional.cross_entropy(scores.T, target)) / 2
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield step, float(loss.detach())
    table.requires_grad_(False)


def save(folder: Path, tokenizer: Any, table: torch.Tensor) -> None:
    """Write the sentence-transformers folder (half precision, compact tokenizer)."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({"embedding.weight": table.half().contiguous()}, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)
    compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(compact, encoding="utf-8")
    kinds = (
        "sentence_transformer.modules.StaticEmbedding",
        "sentence_transformer.modules.Normalize",
    )
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_Normalize",
            "type": f"sentence_transformers.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules, indent=1))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "SentenceTransformer", "similarity_fn_name": "cosine"}, indent=1)
    )


def main() -> None:
    """Train and save the embedder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("ragspec/starter/embedder"))
    for name, value in Settings().__dict__.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = vars(parser.parse_args())
    shared, out = args.pop("shared"), args.pop("out")
    settings = Settings(**args)
    began = time.perf_counter()
    passages, texts = read_sources(shared)
    tokenizer = train_tokenizer(texts, settings.vocabulary)
    sources = cut_sources(passages, tokenizer)
    words = Words(tokenizer)
    table = first_table(sources, words, settings)
    print(f"{len(sources)} passages, {time.perf_counter() - began:.0f} s", flush=True)
    for step, loss in train(Pairs(sources, words, settings), table, settings):
        if step % 100 == 0 or step == settings.steps - 1:
            print(f"step {step} loss {loss:.4f} {time.perf_counter() - began:.0f} s", flush=True)
    save(out, tokenizer, table)


if __name__ == "__main__":
    main()
